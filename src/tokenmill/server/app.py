"""Which path leads where, and the endpoints that generate nothing. What those share that do is `generation`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from ..core.errors import InvalidRequest, Overloaded, TokenmillError, Unavailable
from ..core.ports import Clock
from ..text.load import TextModel
from ..text.standins import Rendered
from .adapters import ServedAdapter
from .audit.keys import note_changes
from .audit.log import AuditLog
from .audit.routes import routes as audit_routes
from .client import EngineClient
from .config import ServerConfig
from .console.routes import routes as console_routes
from .errors import ClientGone, anthropic_style
from .fields import Fields
from .files.handover import Handover
from .files.routes import routes as file_routes
from .files.runner import Batches
from .files.store import FileStore
from .generation import Generation
from .helper import Helper, caller_of
from .http import JSONReply, error_reply, on_http, on_unexpected, style_for
from .ids.routes import routes as ids_routes
from .layers import layers
from .llama.routes import routes as llama_routes
from .messages.models import model_body, page_body
from .messages.routes import routes as message_routes
from .metrics import Metrics
from .observe.audit_metrics import AuditMetrics
from .observe.observer import Observer
from .observe.routes import routes as observe_routes
from .observe.traced import Traced
from .observe.traces import Tracing
from .ollama.routes import routes as ollama_routes
from .openapi.routes import routes as openapi_routes
from .reading import parse_small
from .repeats.keyed import Keyed
from .repeats.metrics import RepeatMetrics
from .repeats.store import AnswerStore
from .replies import OpenAIShape
from .request_log import RequestLog
from .responses.routes import routes as responses_routes
from .responses.store import ResponseStore
from .result_cache import ResultCache
from .scopes import require_adapters
from .signatures import routes as signature_routes
from .signing import Signer
from .slo.idle_job import IdleTime, Job
from .slo.routes import routes as slo_routes
from .slo.start import Measuring
from .tenants.access import Access
from .tenants.routes import routes as tenant_routes
from .tenants.tenant import ADMIN
from .usage.books import Books
from .usage.metrics import UsageMetrics
from .usage.routes import routes as usage_routes
from .vectors import VectorService

_log = logging.getLogger(__name__)
_MAX_NAME = 200
_RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking")
_CHAT, _COMPLETION = OpenAIShape("chatcmpl"), OpenAIShape("cmpl")


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
) -> Starlette:
    """The ASGI application in front of `client`, whose engine may come and go. `store`, `books`, `audit` and `answers`:
    open as long as it serves; None: responses are not kept, usage is not counted, nothing is noted, no call has an
    Idempotency-Key. `access`: as well, and open longer; None: the keys of `config` alone. `tracing`: where spans go;
    None: nowhere. `signer`: of answers; None: they are not signed.

    `idle_job`: has the machine while nobody has a call open, from `app.state.idle_time.open()` on; None: there is none.

    `app.state.limits.draining = True` makes it refuse new calls; `app.state.client` is `client`.
    """
    access = access or Access(config.api_keys)
    client.hearers.metrics = Metrics(config.model_names[0], text.max_context)
    client.hearers.metrics.num_parameters = text.about.num_parameters
    client.hearers.metrics.name_adapter = client.adapters.name_of
    client.hearers.metrics.count_waiting = lambda: client.num_waiting
    client.hearers.metrics.overload.level = lambda: client.desk.pressure.level(clock.now())
    client.hearers.metrics.predict_wait = lambda: client.desk.usual_wait_s(clock.now())
    client.is_shared = True
    client.hearers.observer = Observer(config.model_names[0], client.hearers.metrics.registry)
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
        client.hearers.metrics.registry.register(UsageMetrics(config.model_names[0], books))
    results = None
    if config.result_cache:
        results = ResultCache(
            config.result_cache, config.model_names[0], client.hearers.metrics.registry, lambda: client.ready
        )
        client.hearers.watchers.append(results)
    generation = Generation(config, text, client, helper, clock, new_seed, new_id, meter, results)
    generation.limits.quotas = access.quotas
    if access.quotas is not None:
        client.hearers.watchers.append(access.quotas)
    if audit is not None:
        access.on_change = partial(note_changes, audit)
    service = _Service(generation)
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
    middleware = layers(config, access, keyed, new_id, audit=audit, signer=signer, tracing=tracing)
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
        Route("/version", service.version),
        *message_routes(generation),
        *ollama_routes(generation, vectors),
        *llama_routes(generation, vectors),
        *ids_routes(generation),
        *observe_routes(client, client.hearers.observer, clock),
        *tenant_routes(access, generation.limits),
        *console_routes(generation),
        *usage_routes(books, time.time),
        *audit_routes(audit),
        *openapi_routes(config.root_path),
        *slo_routes(generation.objectives, generation.scorer, idle_time),
        *signature_routes(signer),
    ]
    handlers: dict[Any, Any] = {
        TokenmillError: service.refuse,
        ClientGone: service.note_gone,
        HTTPException: on_http,
        Exception: on_unexpected,
    }
    batches = None
    if config.files_dir:
        inside: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)  # no gate: its owner has passed it
        inside = inside if tracing is None else Traced(inside, tracing=tracing)
        files = FileStore(config.files_dir, new_id)
        batches = Batches(files, inside, client, generation.serves, config.max_body_bytes, access.tenant_of)
    app = Starlette(
        routes=[*routes, *file_routes(generation, batches)], middleware=middleware, exception_handlers=handlers
    )
    app.state.batches = batches
    app.state.handover = None if batches is None else Handover(batches)
    app.state.idle_time = idle_time
    app.state.measuring = Measuring(client, generation.objectives, clock, new_id)
    app.state.limits = generation.limits
    app.state.client = client
    app.state.config = config
    app.state.access = access
    return app


class _Service:
    """The endpoints of one application."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._config = generation.config
        self._text = generation.text
        self._client = generation.client
        self._metrics = generation.metrics
        assert generation.client.hearers.observer is not None
        self._observer = generation.client.hearers.observer
        self._limits = generation.limits
        self._created = int(time.time())

    async def chat(self, request: HttpRequest) -> ASGIApp:
        return await self._generation.reply(request, "chat", _CHAT)

    async def completion(self, request: HttpRequest) -> ASGIApp:
        return await self._generation.reply(request, "completion", _COMPLETION)

    async def models(self, request: HttpRequest) -> Response:
        cards = [self._card(name) for name in self._config.model_names]
        cards += [self._card(adapter.name, adapter) for adapter in self._client.adapters]
        if style_for(request.scope) is anthropic_style:
            return JSONReply(page_body(cards))
        return JSONReply({"object": "list", "data": cards})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        card = self._card(name, self._generation.check_model({"model": name}))
        return JSONReply(model_body(card) if style_for(request.scope) is anthropic_style else card)

    async def load_adapter(self, request: HttpRequest) -> Response:
        """vLLM's: {"lora_name", "lora_path", "load_inplace"}. Only from folders under the configured one."""
        require_adapters(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
        in_place = bool(fields.flag("load_inplace"))
        self._generation.log_unknown(fields.unread())
        if not path.isprintable():
            raise InvalidRequest("lora_path must be the path of a folder.", param="lora_path")
        if not self._config.lora_dir:
            raise InvalidRequest(
                "Adapters cannot be loaded over HTTP here; start the server with --lora-dir.", param="lora_path"
            )
        if name in self._config.model_names or not name.isprintable() or len(name) > _MAX_NAME:
            raise InvalidRequest(
                f"lora_name must be printable, of at most {_MAX_NAME} characters and not the model's own.",
                param="lora_name",
            )
        self._client.require_ready()
        folder = os.path.join(self._config.lora_dir, path)
        adapter = ServedAdapter(name, folder, inside=self._config.lora_dir)
        await self._client.adapters.load(adapter, replace_loaded=in_place)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """vLLM's: {"lora_name"}. Requests that use the adapter run to their end."""
        require_adapters(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.required_text("lora_name")
        self._generation.log_unknown(fields.unread())
        if not self._config.lora_dir:
            raise InvalidRequest(
                "Adapters cannot be unloaded over HTTP here; start the server with --lora-dir.", param="lora_name"
            )
        self._client.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(self, request: HttpRequest) -> ASGIApp:
        caller = caller_of(request)
        async with self._limits.body(request) as data:
            call, rendered = await self._generation.read("tokenize", data, caller)
            if call.conversation is None:
                (prompt,), param = call.prompts, "content" if call.form in ("ids", "pieces") else "prompt"
                if not call.parse_special:
                    prompt = Rendered((prompt,), is_split=True)
            else:
                prompt = rendered or await self._generation.encoder.render(call.conversation, caller)
                param = "messages"
            body = await self._generation.encoder.tokenize(
                prompt,
                add_special=call.add_special,
                form=call.form,
                max_model_len=self._generation.max_model_len,
                param=param,
                caller=caller,
            )
        reply = Response(body, media_type="application/json")

        async def send_held(scope: Scope, receive: Receive, send: Send) -> None:
            with self._limits.held(len(body)):
                await reply(scope, receive, send)

        return send_held

    async def detokenize(self, request: HttpRequest) -> Response:
        async with self._limits.body(request) as data:
            call, _ = await self._generation.read("detokenize", data, caller_of(request))
        text = self._text.tokenizer.decode(call.prompts[0], skip_special=False)
        return JSONReply({"prompt": text, "content": text})

    async def health(self, request: HttpRequest) -> Response:
        """200 only while an engine is ready and, if it has work, makes steps."""
        self._limits.refuse_when_draining()
        self._client.require_ready()
        stalled_s = self._client.stalled_s(self._generation.clock.now())
        if stalled_s > self._config.stall_after_s:
            raise Unavailable(f"The engine has work but has made no step for {stalled_s:.0f} s.")
        return JSONReply({"status": "ok"})

    async def load(self, request: HttpRequest) -> Response:
        return JSONReply({"server_load": self._client.num_open})

    async def show_metrics(self, request: HttpRequest) -> Response:
        """Series by tenant only with an admin key."""
        more = (self._observer.tenants.registry,) if ADMIN in request.state.scopes else ()
        body, content_type = self._metrics.render(request.headers.get("accept", ""), more)
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: HttpRequest) -> Response:
        return JSONReply({"version": __version__})

    async def refuse(self, request: HttpRequest, error: Exception) -> Response:
        """An expected failure, before the answer had begun."""
        assert isinstance(error, TokenmillError)
        self._metrics.call_refused(error.status)
        reason = error.reason if isinstance(error, Overloaded) else ""
        self._observer.refused(request.state.tenant.id, reason or str(error.status))
        return error_reply(error, request.scope)

    async def note_gone(self, request: HttpRequest, error: Exception) -> Response:
        """The client left; nobody reads this. 499 is what access logs know for it."""
        self._metrics.client_gone()
        return Response(status_code=499)

    def _card(self, name: str, adapter: ServedAdapter | None = None) -> dict[str, Any]:
        """OpenAI's fields, vLLM's, and llama-server's `meta`."""
        about = self._text.about
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokenmill",
            "root": self._config.model_names[0] if adapter is None else adapter.path,
            "parent": None if adapter is None else self._config.model_names[0],
            "max_model_len": self._generation.max_model_len,
            "meta": {
                "n_vocab": self._text.tokenizer.vocab_size,
                "n_ctx_train": self._text.max_context,
                "n_embd": about.width,
                "n_params": about.num_parameters,
                "size": about.size_bytes,
            },
        }
