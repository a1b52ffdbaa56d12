"""Which path leads where."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from ..core.errors import TokenmillError
from ..core.ports import Clock
from ..text.load import TextModel
from .audit.keys import note_changes
from .audit.log import AuditLog
from .audit.routes import routes as audit_routes
from .client import EngineClient
from .config import ServerConfig
from .console.routes import routes as console_routes
from .errors import ClientGone
from .files.handover import Handover
from .files.routes import routes as file_routes
from .files.runner import Batches
from .files.store import FileStore
from .generation import Generation
from .helper import Helper
from .http import on_http, on_unexpected
from .ids.routes import routes as ids_routes
from .kv.metrics import EngineTierMetrics, TierMetrics
from .kv.routes import routes as kv_routes
from .kv.store import AskStore
from .kv.wanted import pin_always
from .layers import layers
from .llama.routes import routes as llama_routes
from .messages.routes import routes as message_routes
from .metrics import Metrics
from .models.book import ModelBook
from .models.canaries import Canaries
from .models.door import ModelDoor
from .models.metrics import CanaryMetrics
from .models.routes import routes as model_routes
from .observe.audit_metrics import AuditMetrics
from .observe.expert_metrics import ExpertMetrics
from .observe.observer import Observer
from .observe.routes import routes as observe_routes
from .observe.traced import Traced
from .observe.traces import Tracing
from .ollama.routes import routes as ollama_routes
from .openapi.routes import routes as openapi_routes
from .repeats.keyed import Keyed
from .repeats.metrics import RepeatMetrics
from .repeats.store import AnswerStore
from .request_log import RequestLog
from .responses.routes import routes as responses_routes
from .responses.store import ResponseStore
from .result_cache import ResultCache
from .resume.metrics import book_of
from .resume.routes import routes as resume_routes
from .resume.store import MODEL, ResumeStore
from .service import Service
from .signatures import routes as signature_routes
from .signing import Signer
from .slo.idle_job import IdleTime, Job
from .slo.routes import routes as slo_routes
from .slo.start import Measuring
from .tenants.access import Access
from .tenants.routes import routes as tenant_routes
from .upstream.prefixes import Prefixes
from .upstream.start import add_upstreams
from .upstream.upstream import Upstream
from .usage.books import Books
from .usage.metrics import UsageMetrics
from .usage.routes import routes as usage_routes
from .vectors import VectorService
from .workers.routes import routes as worker_routes

_log = logging.getLogger(__name__)
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")


def build_app(
    config: ServerConfig,
    text: TextModel,
    client: EngineClient,
    helper: Helper,
    *,
    clock: Clock,
    new_seed: Callable[[], int],
    new_id: Callable[[str], str],
    store: ResponseStore | None = None,
    access: Access | None = None,
    books: Books | None = None,
    audit: AuditLog | None = None,
    signer: Signer | None = None,
    answers: AnswerStore | None = None,
    tracing: Tracing | None = None,
    idle_job: Job | None = None,
    upstreams: Sequence[Upstream] = (),
    max_upstream_calls: int = 256,
    upstream_prefixes: Mapping[str, Prefixes] | None = None,
    resume: ResumeStore | None = None,
    beside: bool = False,
    ask_kv: AskStore | None = None,
) -> Starlette:
    """The ASGI application in front of `client`, whose engine may come and go. `store`, `books`, `audit` and `answers`:
    open as long as it serves; None: responses are not kept, usage is not counted, nothing is noted, no call has an
    Idempotency-Key. `access`: as well, and open longer; None: the keys of `config` alone. `tracing`: where spans go;
    None: nowhere. `signer`: of answers; None: they are not signed.

    `upstreams`: servers of others, which are asked for the models they are named by, each for at most
    `max_upstream_calls` at once; looked at while `app.state.models` is open. `upstream_prefixes`: what they have
    cached, by name of the model.

    `idle_job`: has the machine while nobody has a call open, from `app.state.idle_time.open()` on; None: there is none.

    `resume`: as `store`; None: no stream is kept. `await app.state.resume.restart(app)` before it serves.

    `ask_kv`: of the KV store with tiers of this machine; None: there is none.

    `beside`: another application has the connections and the accounts, and gives this one the calls of its model by
    `app.state.inside`.

    `app.state.limits.draining = True` makes it refuse new calls; `app.state.client` is `client`.
    """
    access = access or Access(config.api_keys)
    client.hearers.metrics = Metrics(config.model_names[0], text.max_context)
    client.hearers.metrics.num_parameters = text.about.num_parameters
    client.hearers.metrics.name_adapter = client.adapters.name_of
    client.hearers.metrics.count_waiting = lambda: client.num_waiting
    client.hearers.metrics.overload.level = lambda: client.desk.pressure.level(clock.now())
    client.hearers.metrics.predict_wait = lambda: client.desk.usual_wait_s(clock.now())
    client.gateway.is_shared = True
    client.hearers.observer = Observer(config.model_names[0], client.hearers.metrics.registry)
    client.roster.on_change = client.hearers.observer.happenings.worker
    if tracing is not None:
        tracing.model_of = lambda digest: client.adapters.name_of(digest) if digest else config.model_names[0]
        tracing.decode = partial(text.tokenizer.decode, skip_special=False)
        client.hearers.observer.trace(tracing)
    if config.log_requests:
        decode = partial(text.tokenizer.decode, skip_special=False)
        client.hearers.request_log = RequestLog(config.model_names[0], decode, config.max_log_len)
        client.hearers.request_log.name_adapter = client.adapters.name_of
    meter = None if books is None else books.meter
    if books is not None:
        client.hearers.watchers.append(books.meter)
        if not beside:
            client.hearers.metrics.registry.register(UsageMetrics(config.model_names[0], books))
    results = None
    if config.result_cache:
        results = ResultCache(
            config.result_cache, config.model_names[0], client.hearers.metrics.registry, lambda: client.ready
        )
        client.hearers.watchers.append(results)
    generation = Generation(config, text, client, helper, clock, new_seed, new_id, meter, results)
    generation.limits.quotas = access.quotas
    if books is not None:
        generation.limits.why_uncounted = books.journal.why_not
    if access.quotas is not None:
        client.hearers.watchers.append(access.quotas)
    if audit is not None:
        access.on_change = partial(note_changes, audit)
    book = ModelBook(config.model_names)
    registry = client.hearers.metrics.registry
    add_upstreams(
        book, upstreams, generation.limits, clock, new_id,
        max_open=max_upstream_calls, prefixes=upstream_prefixes or {}, registry=registry, meter=meter, audit=audit,
    )  # fmt: skip
    canaries = Canaries(book, audit, generation.objectives.usual_targets)
    registry.register(CanaryMetrics(canaries))
    generation.other_names = book.names
    tier_metrics = None if ask_kv is None else TierMetrics(config.model_names[0], ask_kv)
    registry.register(ExpertMetrics(config.model_names[0], lambda: client.hearers.experts.load))
    registry.register(EngineTierMetrics(config.model_names[0], lambda: client.stats))
    if tier_metrics is not None:
        registry.register(tier_metrics)
    service = Service(generation, book, tier_metrics)
    vectors = VectorService(
        config,
        text,
        client,
        helper,
        clock,
        new_id,
        generation.limits,
        generation.encoder,
        generation.check_model,
        generation.log_unknown,
        meter,
        results,
    )
    keyed = Middleware(
        Keyed,
        store=answers,
        limits=generation.limits,
        max_body_bytes=config.max_body_bytes,
        note=RepeatMetrics(config.model_names[0], client.hearers.metrics.registry).note,
    )
    if audit is not None:
        client.hearers.metrics.registry.register(AuditMetrics(config.model_names[0], audit.status))
    door = partial(
        ModelDoor, book=book, canaries=canaries, limits=generation.limits, clock=clock,
        refuse=service.refuse, note_gone=service.note_gone,
    )  # fmt: skip
    if resume is not None:
        book.kept, book.keep = dict(resume.loaded(MODEL)), partial(resume.keep_loaded, MODEL)
    streams = None if resume is None else book_of(resume, config, access, client, generation.limits)
    middleware = layers(config, access, streams, keyed, new_id, audit=audit, signer=signer, tracing=tracing)
    middleware.append(Middleware(door))
    idle_time = None
    if idle_job is not None:
        idle_time = IdleTime(config.model_names[0], client, clock, idle_job)
        client.hearers.watchers.append(idle_time)
        client.hearers.metrics.registry.register(idle_time)
        generation.limits.on_call, generation.limits.on_read = idle_time.note_call, idle_time.note_read
    routes = [
        *(Route(path, service.chat, methods=["POST"]) for path in ("/v1/chat/completions", "/chat/completions")),
        Route("/v1/completions", service.completion, methods=["POST"]),
        *responses_routes(generation, store),
        Route("/v1/embeddings", vectors.embeddings, methods=["POST"]),
        *(Route(path, vectors.score, methods=["POST"]) for path in ("/v1/score", "/score")),
        *(Route(path, vectors.rerank, methods=["POST"]) for path in _RERANK_PATHS),
        *(Route(path, service.models) for path in ("/v1/models", "/models")),
        Route("/v1/models/{name:path}", service.model),
        Route("/v1/load_lora_adapter", service.load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", service.unload_adapter, methods=["POST"]),
        Route("/tokenize", service.tokenize, methods=["POST"]),
        Route("/detokenize", service.detokenize, methods=["POST"]),
        *(Route(path, service.health) for path in ("/health", "/v1/health")),
        Route("/ping", service.health, methods=["GET", "POST"]),
        Route("/load", service.load),
        Route("/metrics", service.show_metrics),
        Route("/metrics/workers", service.show_worker_metrics),
        Route("/version", service.version),
        *message_routes(generation),
        *ollama_routes(generation, vectors),
        *llama_routes(generation, vectors),
        *ids_routes(generation),
        *observe_routes(client, client.hearers.observer, clock),
        *tenant_routes(access, generation.limits),
        *console_routes(generation, ask_kv),
        *usage_routes(books, time.time),
        *audit_routes(audit),
        *openapi_routes(config.root_path),
        *worker_routes(client, generation.limits),
        *kv_routes(generation, access, ask_kv),
        *model_routes(book, canaries, generation.limits),
        *slo_routes(generation.objectives, generation.scorer, idle_time),
        *signature_routes(signer),
        *resume_routes(streams),
    ]
    handlers: dict[Any, Any] = {
        TokenmillError: service.refuse,
        ClientGone: service.note_gone,
        HTTPException: on_http,
        Exception: on_unexpected,
    }
    batches = None
    alone = Starlette(routes=routes, exception_handlers=handlers)  # no gate: who calls has passed one
    if config.files_dir:
        inside: ASGIApp = door(alone)
        inside = inside if tracing is None else Traced(inside, tracing=tracing)
        files = FileStore(config.files_dir, new_id)
        batches = Batches(files, inside, client, service.serves, config.max_body_bytes, access.tenant_of)
    app = Starlette(
        routes=[*routes, *file_routes(generation, batches)], middleware=middleware, exception_handlers=handlers
    )
    app.state.inside = alone
    app.state.pin_kv = None if ask_kv is None else partial(pin_always, generation, ask_kv)
    app.state.batches = batches
    app.state.handover = None if batches is None else Handover(batches)
    app.state.idle_time = idle_time
    app.state.resume = streams
    app.state.measuring = Measuring(client, generation.objectives, clock, new_id)
    app.state.limits = generation.limits
    app.state.models = book
    app.state.canaries = canaries
    app.state.client = client
    app.state.config = config
    app.state.access = access
    return app
