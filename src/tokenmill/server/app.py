"""Which path leads where."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from ..api.errors import ClientGone
from ..api.ids.routes import routes as ids_routes
from ..api.llama.routes import routes as llama_routes
from ..api.messages.routes import routes as message_routes
from ..api.ollama.routes import routes as ollama_routes
from ..api.openai.routes import routes as openai_routes
from ..api.responses.background import Background
from ..api.responses.routes import routes as responses_routes
from ..api.sandbox import Sandbox
from ..control.audit.entries import note_changes
from ..control.audit.log import AuditLog, AuditMetrics
from ..control.kv_store import AskStore, EngineTierMetrics, TierMetrics
from ..control.models.canaries import Canaries, CanaryMetrics
from ..control.models.registry import ModelRegistry
from ..control.observe.metrics import Metrics
from ..control.observe.monitor import Monitor
from ..control.observe.plugin_observers import Feed, PluginEvents, PluginObserverMetrics
from ..control.observe.request_log import RequestLog
from ..control.observe.traces import Tracing
from ..control.signing import Signer
from ..control.slo.idle_job import IdleTime, Job
from ..control.slo.objectives import Measuring
from ..control.tenants.access import Access
from ..control.usage.accounting import Accounting, UsageMetrics
from ..control.usage.meter import Meter
from ..control.workers.metrics import ExpertMetrics
from ..core.errors import TokenmillError
from ..core.ports import Clock
from ..state.file import StateFile
from ..text.text_model import TextModel
from .admin.models import routes as model_routes
from .admin.requests import routes as observe_routes
from .admin.slo import routes as slo_routes
from .admin.tenants import routes as tenant_routes
from .admin.tenants import usage_routes
from .admin.workers import routes as worker_routes
from .audit import audit_routes
from .client import EngineClient
from .config import ServerConfig
from .console.routes import routes as console_routes
from .files.routes import routes as file_routes
from .files.runner import Batches, Handover
from .files.store import FileStore
from .generation import Generation
from .http import on_http, on_unexpected
from .idempotency.layer import Idempotency, IdempotencyMetrics
from .idempotency.store import AnswerStore
from .kv.routes import pin_always
from .kv.routes import routes as kv_routes
from .layers import Traced, layers, signature_routes
from .listing import Listing
from .mcp_client import McpClient
from .models import ModelDispatch
from .openapi.routes import routes as openapi_routes
from .response_store import ResponseStore
from .result_cache import ResultCache
from .resume.layer import routes as resume_routes
from .resume.registry import StreamRegistry, stream_registry
from .resume.store import MODEL, ResumeStore
from .service import Service
from .upstream.prefixes import Prefixes
from .upstream.start import add_upstreams
from .upstream.upstream import Upstream
from .vectors import VectorService


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What an application uses and does not own: open as long as it serves. What is None is not there.

    new_seed, new_id  of requests that name none
    store       of responses
    access      who may call; None: those with the keys of the configuration
    accounting  of usage
    audit       notes who did what
    signer      of answers
    answers     of calls with an Idempotency-Key
    kept        what records of files go to; None: a file in their folder
    tracing     where spans go
    idle_job    has the machine while nobody has a call open, from `app.state.idle_time.open()` on
    upstreams   servers of others, which are asked for the models they are named by, each for at most
                `max_upstream_calls` at once; looked at while `app.state.models` is open
    upstream_prefixes   what they have cached, by name of the model
    resume      of streams; `await app.state.resume.restart(app)` before it serves
    background  of responses that are under way, of all models of this process
    beside      another application has the connections and the accounts, and gives this one the calls of its model by
                `app.state.inside`
    ask_kv      of the KV store with tiers of this machine
    feeds       of observers of plug-ins
    """

    clock: Clock
    new_seed: Callable[[], int]
    new_id: Callable[[str], str]
    store: ResponseStore | None = None
    access: Access | None = None
    accounting: Accounting | None = None
    audit: AuditLog | None = None
    signer: Signer | None = None
    answers: AnswerStore | None = None
    kept: StateFile | None = None
    tracing: Tracing | None = None
    idle_job: Job | None = None
    upstreams: Sequence[Upstream] = ()
    max_upstream_calls: int = 256
    upstream_prefixes: Mapping[str, Prefixes] = field(default_factory=dict)
    resume: ResumeStore | None = None
    background: Background = field(default_factory=Background)
    beside: bool = False
    ask_kv: AskStore | None = None
    feeds: Sequence[Feed] = ()


def build_app(
    config: ServerConfig, text: TextModel, client: EngineClient, sandbox: Sandbox, resources: Resources
) -> Starlette:
    """The ASGI application in front of `client`, whose engine may come and go.

    `app.state.limits.draining = True` makes it refuse new calls; `app.state.client` is `client`.
    """
    access = resources.access or Access(config.api_keys)
    _hear(config, text, client, resources)
    results = _result_cache(config, client)
    generation = _generation(config, text, client, sandbox, resources, results, access)
    models = _model_registry(generation, resources)
    canaries = Canaries(models, resources.audit, generation.objectives.usual_targets)
    tiers = _register_metrics(generation, canaries, resources)
    service = Service(generation, models, tiers)
    vectors = _vectors(generation, resources, results)
    idempotency = _idempotency(generation, resources)
    if resources.audit is not None:
        generation.metrics.registry.register(AuditMetrics(config.model_names[0], resources.audit.status))
    streams = _streams(generation, resources, access)
    idle_time = _idle_time(generation, resources)
    dispatch = partial(
        ModelDispatch,
        models=models,
        canaries=canaries,
        limits=generation.limits,
        clock=resources.clock,
        refuse=service.refuse,
        note_gone=service.note_gone,
    )
    routes = [
        *_generating_routes(generation, vectors, resources),
        *ollama_routes(generation, vectors, Listing(models)),
        *_model_routes(service, models, canaries, generation),
        *_operating_routes(generation, service, access, resources),
        *slo_routes(generation.objectives, generation.scorer, idle_time),
        *resume_routes(streams),
    ]
    alone = Starlette(routes=routes, exception_handlers=_handlers(service))  # no gate: who calls has passed one
    batches = _batches(generation, service, dispatch(alone), resources, access)
    app = Starlette(
        routes=[*routes, *file_routes(generation, batches)],
        middleware=[*_layers(config, access, streams, idempotency, resources), Middleware(dispatch)],
        exception_handlers=_handlers(service),
    )
    app.state.inside = alone
    app.state.background = resources.background
    app.state.batches = batches
    app.state.handover = None if batches is None else Handover(batches)
    app.state.idle_time = idle_time
    app.state.resume = streams
    app.state.models = models
    app.state.canaries = canaries
    app.state.access = access
    _show(app, generation, resources)
    return app


def _hear(config: ServerConfig, text: TextModel, client: EngineClient, resources: Resources) -> None:
    """Have the client tell metrics, the monitor, traces, the log of requests and usage what engines do."""
    name, observers = config.model_names[0], client.observers
    observers.metrics = metrics = Metrics(name, text.max_context)
    metrics.num_parameters = text.info.num_parameters
    metrics.name_adapter = client.adapters.name_of
    metrics.count_waiting = lambda: client.num_waiting
    metrics.overload.level = lambda: client.request_queue.pressure.level(resources.clock.now())
    metrics.predict_wait = lambda: client.request_queue.usual_wait_s(resources.clock.now())
    client.gateway.is_shared = True
    observers.monitor = Monitor(name, metrics.registry)
    client.roster.on_change = observers.monitor.decisions.worker
    decode = partial(text.tokenizer.decode, skip_special=False)
    if resources.tracing is not None:
        resources.tracing.model_of = lambda digest: client.adapters.name_of(digest) if digest else name
        resources.tracing.decode = decode
        observers.monitor.trace(resources.tracing)
    if config.log_requests:
        observers.request_log = RequestLog(name, decode, config.max_log_len)
        observers.request_log.name_adapter = client.adapters.name_of
    if resources.accounting is not None:
        observers.added.append(resources.accounting.meter)
        if not resources.beside:
            metrics.registry.register(UsageMetrics(name, resources.accounting))
    if resources.feeds:
        observers.added.append(PluginEvents(name, resources.feeds))
        if not resources.beside:
            metrics.registry.register(PluginObserverMetrics(name, resources.feeds))


def _result_cache(config: ServerConfig, client: EngineClient) -> ResultCache | None:
    if not config.result_cache:
        return None
    assert client.observers.metrics is not None
    registry = client.observers.metrics.registry
    results = ResultCache(config.result_cache, config.model_names[0], registry, lambda: client.ready)
    client.observers.added.append(results)
    return results


def _generation(
    config: ServerConfig,
    text: TextModel,
    client: EngineClient,
    sandbox: Sandbox,
    resources: Resources,
    results: ResultCache | None,
    access: Access,
) -> Generation:
    """What generates, with the limits of tenants and of usage that cannot be written down."""
    clock, new_seed, new_id = resources.clock, resources.new_seed, resources.new_id
    generation = Generation(config, text, client, sandbox, clock, new_seed, new_id, _meter(resources), results)
    client.deleted_tenants = lambda: access.deleted
    generation.limits.quotas = access.quotas
    if resources.accounting is not None:
        generation.limits.why_uncounted = resources.accounting.journal.why_not
    if access.quotas is not None:
        client.observers.added.append(access.quotas)
    if resources.audit is not None:
        access.on_change = partial(note_changes, resources.audit)
    return generation


def _meter(resources: Resources) -> Meter | None:
    return None if resources.accounting is None else resources.accounting.meter


def _model_registry(generation: Generation, resources: Resources) -> ModelRegistry:
    """The models of this server, those of upstreams, and those that were loaded before it was started again."""
    models = ModelRegistry(generation.config.model_names)
    add_upstreams(
        models,
        resources.upstreams,
        generation.limits,
        resources.clock,
        resources.new_id,
        max_open=resources.max_upstream_calls,
        prefixes=resources.upstream_prefixes,
        registry=generation.metrics.registry,
        meter=_meter(resources),
        audit=resources.audit,
    )
    generation.other_names = models.names
    if resources.resume is not None:
        models.kept, models.keep = dict(resources.resume.loaded(MODEL)), partial(resources.resume.keep_loaded, MODEL)
    return models


def _register_metrics(generation: Generation, canaries: Canaries, resources: Resources) -> TierMetrics | None:
    """Series about canaries, experts and KV; returns those of the KV store, where there is one."""
    name, client, registry = generation.config.model_names[0], generation.client, generation.metrics.registry
    registry.register(CanaryMetrics(canaries))
    registry.register(ExpertMetrics(name, lambda: client.observers.experts.load))
    registry.register(EngineTierMetrics(name, lambda: client.stats))
    if resources.ask_kv is None:
        return None
    tiers = TierMetrics(name, resources.ask_kv)
    registry.register(tiers)
    return tiers


def _vectors(generation: Generation, resources: Resources, results: ResultCache | None) -> VectorService:
    return VectorService(
        generation.config,
        generation.text,
        generation.client,
        generation.sandbox,
        resources.clock,
        resources.new_id,
        generation.limits,
        generation.encoder,
        generation.check_model,
        generation.log_unknown,
        _meter(resources),
        results,
    )


def _idempotency(generation: Generation, resources: Resources) -> Middleware:
    """The layer that answers calls with an Idempotency-Key again."""
    return Middleware(
        Idempotency,
        store=resources.answers,
        limits=generation.limits,
        max_body_bytes=generation.config.max_body_bytes,
        note=IdempotencyMetrics(generation.config.model_names[0], generation.metrics.registry).note,
    )


def _streams(generation: Generation, resources: Resources, access: Access) -> StreamRegistry | None:
    if resources.resume is None:
        return None
    return stream_registry(resources.resume, generation.config, access, generation.client, generation.limits)


def _idle_time(generation: Generation, resources: Resources) -> IdleTime | None:
    if resources.idle_job is None:
        return None
    client = generation.client
    idle_time = IdleTime(generation.config.model_names[0], lambda: client.num_open, resources.clock, resources.idle_job)
    client.observers.added.append(idle_time)
    generation.metrics.registry.register(idle_time)
    generation.limits.on_call, generation.limits.on_read = idle_time.note_call, idle_time.note_read
    return idle_time


def _layers(
    config: ServerConfig, access: Access, streams: StreamRegistry | None, idempotency: Middleware, resources: Resources
) -> list[Middleware]:
    audit, signer, tracing = resources.audit, resources.signer, resources.tracing
    return layers(config, access, streams, idempotency, resources.new_id, audit=audit, signer=signer, tracing=tracing)


def _handlers(service: Service) -> dict[Any, Any]:
    return {
        TokenmillError: service.refuse,
        ClientGone: service.note_gone,
        HTTPException: on_http,
        Exception: on_unexpected,
    }


def _generating_routes(generation: Generation, vectors: VectorService, resources: Resources) -> list[Route]:
    """The APIs: what gives tokens, vectors or scores, and what reads texts as they do."""
    return [
        *openai_routes(generation, vectors, generation.config.tells_tokenizer),
        *responses_routes(generation, resources.store, resources.background, _mcp(generation.config)),
        *message_routes(generation),
        *llama_routes(generation, vectors),
        *ids_routes(generation),
    ]


def _mcp(config: ServerConfig) -> McpClient | None:
    return McpClient(config.allowed_mcp_servers) if config.allowed_mcp_servers else None


def _model_routes(service: Service, models: ModelRegistry, canaries: Canaries, generation: Generation) -> list[Route]:
    return [
        *(Route(path, service.models) for path in ("/v1/models", "/models")),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/load_lora_adapter", service.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", service.unload_adapter, methods=["POST"]),
        *model_routes(models, canaries, generation.limits),
    ]


def _operating_routes(generation: Generation, service: Service, access: Access, resources: Resources) -> list[Route]:
    """Health, metrics, and what operators look at and change."""
    client = generation.client
    assert client.observers.monitor is not None
    return [
        *(Route(path, service.health) for path in ("/health", "/v1/health")),
        Route("/ping", service.health, methods=["GET", "POST"]),
        Route("/load", service.load),
        Route("/metrics", service.show_metrics),
        Route("/metrics/workers", service.show_worker_metrics),
        Route("/version", service.version),
        *observe_routes(client, client.observers.monitor, resources.clock),
        *tenant_routes(access, generation.limits),
        *console_routes(generation, resources.ask_kv),
        *usage_routes(resources.accounting, time.time),
        *audit_routes(resources.audit),
        *openapi_routes(generation.config.root_path),
        *worker_routes(client, generation.limits),
        *kv_routes(generation, access, resources.ask_kv),
        *signature_routes(resources.signer),
    ]


def _batches(
    generation: Generation, service: Service, inside: ASGIApp, resources: Resources, access: Access
) -> Batches | None:
    """What answers the calls of batches by `inside`."""
    config = generation.config
    if not config.files_dir:
        return None
    if resources.tracing is not None:
        inside = Traced(inside, tracing=resources.tracing)
    files = FileStore(config.files_dir, resources.new_id, resources.kept)
    return Batches(files, inside, generation.client, service.serves, config.max_body_bytes, access.tenant_of)


def _show(app: Starlette, generation: Generation, resources: Resources) -> None:
    """Give `app.state` what whoever serves the application asks it for."""
    ask_kv = resources.ask_kv
    app.state.pin_kv = None if ask_kv is None else partial(pin_always, generation, ask_kv)
    app.state.measuring = Measuring(generation.client, generation.objectives, resources.clock, resources.new_id)
    app.state.limits = generation.limits
    app.state.client = generation.client
    app.state.text = generation.text
    app.state.config = generation.config
