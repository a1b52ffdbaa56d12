"""Which path leads where, and the order of steps of a call: read, validate, encode, admit, submit, answer."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from ..core.errors import InvalidRequest, ModelNotFound, TokenmillError, Unavailable
from ..core.events import Ready
from ..core.policy import Newcomer
from ..core.ports import Clock
from ..text.calls import context_limit, make_requests, require_tokens
from ..text.choice import Choice
from ..text.load import TextModel
from ..text.standins import Rendered
from .adapters import ServedAdapter
from .client import EngineClient
from .clients import Clients
from .config import ServerConfig
from .errors import ClientGone
from .fields import Fields
from .helper import Caller, Helper, caller_of
from .http import Gate, JSONReply, error_reply, on_http, on_unexpected
from .limits import Limits, newcomer, wait_ready
from .logprobs import TokenNames
from .metrics import Metrics
from .openai import Call, Rules
from .reading import parse_small, read_call
from .replies import Answer
from .request_log import RequestLog
from .stream import EventStream, WholeReply
from .tokens import Encoder, prompt_text, text_call
from .vectors import VectorService
from .visitors import Visitors

_log = logging.getLogger(__name__)
_MAX_LOGGED = 1000
_MAX_NAME = 200


def build_app(
    config: ServerConfig,
    text: TextModel,
    client: EngineClient,
    helper: Helper,
    *,
    clock: Clock,
    new_seed: Callable[[], int],
    new_id: Callable[[str], str],
) -> Starlette:
    """The ASGI application in front of `client`, whose engine may come and go.

    `app.state.limits.draining = True` makes it refuse new calls; `app.state.client` is `client`.
    """
    client.metrics = Metrics(config.model_names[0], text.max_context)
    client.metrics.name_adapter = client.adapters.name_of
    client.metrics.count_waiting = lambda: client.num_waiting
    client.metrics.predict_wait = lambda: client.desk.usual_wait_s(clock.now())
    client.is_shared = True
    if config.log_requests:
        decode = partial(text.tokenizer.decode, skip_special=False)
        client.request_log = RequestLog(config.model_names[0], decode, config.max_log_len)
        client.request_log.name_adapter = client.adapters.name_of
    service = _Service(config, text, client, helper, clock, new_seed, new_id)
    vectors = VectorService(
        config,
        text,
        client,
        helper,
        clock,
        new_id,
        service.limits,
        service.encoder,
        service.check_model,
        service.log_unknown,
    )
    visitors = Visitors(config.allowed_hosts, config.cors_origins)
    clients = Clients(config.trusted_proxies)
    middleware = [Middleware(Gate, api_keys=config.api_keys, visitors=visitors, clients=clients)]
    if config.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completion, methods=["POST"]),
            Route("/v1/embeddings", vectors.embeddings, methods=["POST"]),
            *(Route(path, vectors.score, methods=["POST"]) for path in ("/v1/score", "/score")),
            *(Route(path, vectors.rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/v1/load_lora_adapter", service.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", service.unload_adapter, methods=["POST"]),
            Route("/tokenize", service.tokenize, methods=["POST"]),
            Route("/detokenize", service.detokenize, methods=["POST"]),
            Route("/health", service.health),
            Route("/ping", service.health, methods=["GET", "POST"]),
            Route("/load", service.load),
            Route("/metrics", service.show_metrics),
            Route("/version", service.version),
        ],
        middleware=middleware,
        exception_handlers={
            TokenmillError: service.refuse,
            ClientGone: service.note_gone,
            HTTPException: on_http,
            Exception: on_unexpected,
        },
    )
    app.state.limits = service.limits
    app.state.client = client
    app.state.config = config
    return app


class _Service:
    """The endpoints of one application."""

    def __init__(
        self,
        config: ServerConfig,
        text: TextModel,
        client: EngineClient,
        helper: Helper,
        clock: Clock,
        new_seed: Callable[[], int],
        new_id: Callable[[str], str],
    ) -> None:
        assert client.metrics is not None
        self._config = config
        self._text = text
        self._client = client
        self._metrics = client.metrics
        self._clock = clock
        self._new_seed = new_seed
        self._new_id = new_id
        self._helper = helper
        self.encoder = Encoder(text, helper)
        self._rules = Rules(text.tokenizer.vocab_size, text.sampling_defaults, config.allow_chat_template)
        self._created = int(time.time())
        self._logged_fields: set[str] = set()
        self.limits = Limits(config, client, clock)

    async def chat(self, request: HttpRequest) -> ASGIApp:
        return await self._generate(request, "chat", "chatcmpl")

    async def completion(self, request: HttpRequest) -> ASGIApp:
        return await self._generate(request, "completion", "cmpl")

    async def _generate(self, request: HttpRequest, endpoint: str, prefix: str) -> ASGIApp:
        arrival_s = self._clock.now()
        self.limits.refuse_when_draining()
        caller = caller_of(request)
        async with self.limits.body(request) as data:
            call, unknown, rendered = await self._read(endpoint, data, caller)
            self.log_unknown(unknown)
            adapter = self.check_model({"model": call.model})
            return await self._start(call, rendered, adapter, prefix, arrival_s, request.state, caller)

    async def _read(self, endpoint: str, data: bytes, caller: Caller) -> tuple[Any, list[str], Rendered | None]:
        room = self._max_model_len()
        return await read_call(endpoint, data, self._rules, self._helper, caller, self.check_model, room)

    async def _start(
        self,
        call: Call,
        rendered: Rendered | None,
        adapter: ServedAdapter | None,
        prefix: str,
        arrival_s: float,
        state: State,
        caller: Caller,
    ) -> ASGIApp:
        """Encode a call, submit it to the engine, and return what answers it."""
        ready = await wait_ready(self._client, self._config, caller)
        require_tokens(ready)
        self.limits.check_possible(max(1, len(call.prompts)) * call.sampling.n)
        self.limits.admit(Newcomer(state.client, call.priority))
        prompts = await self.encoder.encode_call(call, context_limit(ready), rendered=rendered, caller=caller)
        root_id = self._new_id(prefix)
        given_id = call.request_id or state.request_id
        requests = make_requests(
            text_call(call, self._text, "" if adapter is None else adapter.digest),
            [prompt.tokens for prompt in prompts],
            ready,
            root_id=root_id,
            arrival_s=arrival_s,
            new_seed=self._new_seed,
        )
        self.limits.admit(newcomer(state.client, requests))
        tokenizer = self._text.tokenizer
        skip_special = call.sampling.skip_special_tokens
        answer = Answer(
            id=f"{prefix}-{given_id}" if given_id else root_id,
            created=int(time.time()),
            model=self._config.model_names[0] if adapter is None else adapter.name,
            fingerprint=fingerprint(ready, "" if adapter is None else adapter.digest),
            call=call,
            prompts=prompts,
            choices=[Choice(index, each, tokenizer) for index, each in enumerate(requests)],
            names=TokenNames(tokenizer, as_ids=call.tokens_as_ids),
            echoes=[prompt_text(self._text, prompt, skip_special) for prompt in prompts] if call.echo else (),
        )
        stream = self._client.open(requests, state.client)
        if self._client.request_log is not None:
            self._client.request_log.came(requests, answer.id)
        self._metrics.call_admitted(call.sampling.n)
        return EventStream(answer, stream, self._metrics) if call.stream else WholeReply(answer, stream, self._metrics)

    async def models(self, request: HttpRequest) -> Response:
        cards = [self._card(name) for name in self._config.model_names]
        cards += [self._card(adapter.name, adapter) for adapter in self._client.adapters]
        return JSONReply({"object": "list", "data": cards})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        return JSONReply(self._card(name, self.check_model({"model": name})))

    async def load_adapter(self, request: HttpRequest) -> Response:
        """vLLM's: {"lora_name", "lora_path", "load_inplace"}. Only from folders under the configured one."""
        async with self.limits.body(request) as data:
            fields = Fields(parse_small(data))
        name, path = fields.required_text("lora_name"), fields.required_text("lora_path")
        in_place = bool(fields.flag("load_inplace"))
        self.log_unknown(fields.unread())
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
        async with self.limits.body(request) as data:
            fields = Fields(parse_small(data))
        name = fields.required_text("lora_name")
        self.log_unknown(fields.unread())
        if not self._config.lora_dir:
            raise InvalidRequest(
                "Adapters cannot be unloaded over HTTP here; start the server with --lora-dir.", param="lora_name"
            )
        self._client.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def tokenize(self, request: HttpRequest) -> ASGIApp:
        caller = caller_of(request)
        async with self.limits.body(request) as data:
            call, unknown, rendered = await self._read("tokenize", data, caller)
            self.log_unknown(unknown)
            if call.conversation is None:
                (prompt,), param = call.prompts, "prompt"
            else:
                prompt = rendered or await self.encoder.render(call.conversation, caller)
                param = "messages"
            body = await self.encoder.tokenize(
                prompt,
                add_special=call.add_special,
                with_strings=call.with_strings,
                max_model_len=self._max_model_len(),
                param=param,
                caller=caller,
            )
        reply = Response(body, media_type="application/json")

        async def send_held(scope: Scope, receive: Receive, send: Send) -> None:
            with self.limits.held(len(body)):
                await reply(scope, receive, send)

        return send_held

    async def detokenize(self, request: HttpRequest) -> Response:
        async with self.limits.body(request) as data:
            call, unknown, _ = await self._read("detokenize", data, caller_of(request))
        self.log_unknown(unknown)
        return JSONReply({"prompt": self._text.tokenizer.decode(call.prompts[0], skip_special=False)})

    async def health(self, request: HttpRequest) -> Response:
        """200 only while an engine is ready and, if it has work, makes steps."""
        self.limits.refuse_when_draining()
        self._client.require_ready()
        stalled_s = self._client.stalled_s(self._clock.now())
        if stalled_s > self._config.stall_after_s:
            raise Unavailable(f"The engine has work but has made no step for {stalled_s:.0f} s.")
        return JSONReply({"status": "ok"})

    async def load(self, request: HttpRequest) -> Response:
        return JSONReply({"server_load": self._client.num_open})

    async def show_metrics(self, request: HttpRequest) -> Response:
        body, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: HttpRequest) -> Response:
        return JSONReply({"version": __version__})

    async def refuse(self, request: HttpRequest, error: Exception) -> Response:
        """An expected failure, before the answer had begun."""
        assert isinstance(error, TokenmillError)
        self._metrics.call_refused(error.status)
        return error_reply(error)

    async def note_gone(self, request: HttpRequest, error: Exception) -> Response:
        """The client left; nobody reads this. 499 is what access logs know for it."""
        self._metrics.client_gone()
        return Response(status_code=499)

    def check_model(self, body: dict[str, Any]) -> ServedAdapter | None:
        """The adapter that a body asks for by its model's name; None for the model itself, which no name means too."""
        name = Fields(body).text("model")
        if name is None or name in self._config.model_names:
            return None
        adapter = self._client.adapters.get(name)
        if adapter is None:
            known = ", ".join([*self._config.model_names, *(each.name for each in self._client.adapters)])
            raise ModelNotFound(
                f"The model {name[:200]!r} does not exist here; this server has: {known}.", param="model"
            )
        return adapter

    def _card(self, name: str, adapter: ServedAdapter | None = None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tokenmill",
            "root": self._config.model_names[0] if adapter is None else adapter.path,
            "parent": None if adapter is None else self._config.model_names[0],
            "max_model_len": self._max_model_len(),
        }

    def _max_model_len(self) -> int:
        ready = self._client.ready
        return self._text.max_context if ready is None else context_limit(ready)

    def log_unknown(self, names: list[str]) -> None:
        """Each name once, and not more names than a log should hold."""
        for name in names:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED:
                self._logged_fields.add(name)
                _log.warning("Ignoring the unknown request field %r.", name[:100])


def fingerprint(ready: Ready, adapter: str = "") -> str:
    """OpenAI's system_fingerprint: equal exactly where answers with the same seed are. `adapter`: its digest."""
    return "fp_" + hashlib.sha256(f"{ready.numerics_id} {ready.draw_version} {adapter}".encode()).hexdigest()[:16]
