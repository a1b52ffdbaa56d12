"""Which model answers a call: the server's own, one of this machine beside it, or an upstream's. Calls find their model
by the `model` of their bodies, or by a canary of that name, in this one place.

A call for the server's own model goes on as it came. While there is no other model, bodies are not looked at. A call
for a model of a folder waits here until that is loaded (control.models.on_demand), and keeps it until it is over. Of an
answer of a canary it is noted, from its bytes, whether it failed, when it began and how fast its events came.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.errors import ClientGone
from ..api.json_encoder import encode_json
from ..api.ollama.parse import asks_nothing, read_keep_alive
from ..api.ollama.routes import unloaded_reply
from ..api.sandbox import HEAVY_BYTES, caller_of
from ..cluster.on_demand import State
from ..control.models.canaries import Canaries, Canary
from ..control.models.registry import ModelRegistry
from ..control.models.served import LOCAL, ServedModel
from ..core.errors import ModelNotFound, TokenmillError, Unavailable
from ..core.ports import Clock
from ..text.calls import context_limit
from ..text.text_model import TextModel
from .http import route_of
from .limits import Limits


def unread(scope: Scope, body: bytes, receive: Receive) -> tuple[Scope, Receive]:
    """A scope and a receive by which a body that was read is read again, as it was decoded."""
    dropped = (b"content-encoding", b"content-length")
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((b"content-length", str(len(body)).encode()))
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": headers}, again


class LocalModel:
    """A ServedModel. app: of `build_app`, beside the server's own; path: where the model lies; stop: ends what is
    behind it, once."""

    kind = LOCAL

    def __init__(self, name: str, app: Starlette, path: str, stop: Callable[[], Awaitable[None]]) -> None:
        self.name = name
        self._app = app
        self._path = path
        self._stop = stop

    @property
    def num_open(self) -> int:
        """A response in the background counts while it calls a tool too."""
        state = self._app.state
        num_open: int = state.client.num_open + len(state.background.between(state.client))
        return num_open

    @property
    def registry(self) -> CollectorRegistry | None:
        registry: CollectorRegistry = self._app.state.client.observers.metrics.registry
        return registry

    @property
    def memory_bytes(self) -> int:
        ready = self._app.state.client.ready
        return 0 if ready is None else sum(size for _, size in ready.memory)

    @property
    def why_not(self) -> str:
        return "" if self._app.state.client.ready is not None else "no engine is ready"

    def takes(self, path: str) -> bool:
        return True

    async def answer(self, path: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app.state.inside(*unread(scope, body, receive), send)

    @property
    def text(self) -> TextModel:
        text: TextModel = self._app.state.text
        return text

    @property
    def context_length(self) -> int:
        """The longest sequence."""
        ready = self._app.state.client.ready
        return self.text.max_context if ready is None else context_limit(ready)

    async def view(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What an operator asks of it."""
        await self._app.state.inside(scope, receive, send)

    def facts(self) -> dict[str, Any]:
        ready = self._app.state.client.ready
        memory = () if ready is None else ready.memory
        return {
            "path": self._path,
            "max_model_len": None if ready is None else ready.max_model_len,
            "memory_bytes": dict(memory),
        }

    def open(self) -> None:
        """It serves since it was made."""

    def end_calls(self) -> None:
        state, error = self._app.state, Unavailable("The model is unloaded.")
        state.client.fail_open(error)
        state.background.end_between(state.client, error)

    async def close(self) -> None:
        await self._stop()


_REFUSED = 429
MIN_EVENTS = 4
"""Events of a stream by which its speed is told."""


class AnswerWatch:
    """`tell`: is told, once, of an answer that tells something of its server: is_error, ttft_s, tpot_s. An event of a
    stream counts as a token. What the client did wrong, and a client that left, tell nothing."""

    def __init__(
        self, now: Callable[[], float], tell: Callable[[bool, float | None, float | None], None], header: bytes
    ) -> None:
        self._now = now
        self._tell = tell
        self._header = (b"x-tokenmill-version", header)
        self._begun_s = now()
        self._status = 0
        self._is_stream = self._is_over = False
        self._first_s = self._last_s = 0.0
        self._num_events = 0

    def through(self, send: Send) -> Send:
        """The same, watched."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._start(message)
                message = {**message, "headers": [*message["headers"], self._header]}
            else:
                if self._is_stream and (body := message.get("body", b"")):
                    self._last_s = self._now()
                    self._first_s = self._first_s or self._last_s
                    self._num_events += body.count(b"\n\n")
                self._is_over = not message.get("more_body", False)
            await send(message)

        return watched

    def refused(self, status: int) -> None:
        """Nothing was answered but an error of this status."""
        self._status = status
        self._is_over = True

    def end(self, *, has_failed: bool) -> None:
        """The answer is over, as far as it came. has_failed: it could not be completed."""
        status = self._status
        if has_failed or (self._is_over and (status >= 500 or status == _REFUSED)):
            self._tell(True, None, None)
        elif self._is_over and status == 200:
            ttft_s = tpot_s = None
            if self._first_s:
                ttft_s = self._first_s - self._begun_s
                if self._num_events >= MIN_EVENTS:
                    tpot_s = (self._last_s - self._first_s) / (self._num_events - 1)
            self._tell(False, ttft_s, tpot_s)

    def _start(self, message: Message) -> None:
        self._status = message["status"]
        kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)


_ELSEWHERE = (
    "/admin/",
    "/v1/files",
    "/v1/batches",
    "/v1/conversations",
    "/v1/messages/batches",
    "/v1/responses/resp_",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/console/",
    "/models/load",
    "/models/unload",
)
"""What is posted there has no model, or is about models, or means adapters of the server's own."""

_NEEDS_NONE = ("/api/show", "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
"""What is posted there is about a model, and does not have it loaded."""

_VIEWS = (
    "/health",
    "/v1/health",
    "/load",
    "/admin/load",
    "/admin/requests",
    "/admin/slo",
    "/admin/workers",
    "/props",
    "/slots",
    "/lora-adapters",
    "/tokenizer_info",
)
"""What is looked at with ?model=NAME is that model's, if it is of this machine."""

Handler = Callable[[HttpRequest, Exception], Awaitable[Response]]


class _Named(msgspec.Struct):
    model: str | None = None
    keep_alive: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"")
    safety_identifier: msgspec.Raw = msgspec.Raw(b"")
    user: msgspec.Raw = msgspec.Raw(b"")

    def session(self, scope: Scope) -> str:
        """Whose calls get one version: the session or user that a client names, else the client."""
        given = Headers(scope=scope).get("x-session-id", "")
        told = bytes(self.prompt_cache_key or self.safety_identifier or self.user).decode("utf8", "replace")
        return f"{scope['state'].get('client', '')}\x00{given or told}"


_NO_NAME = _Named()
_NAMES = re.compile(rb'(?<!\\)"model"\s*:\s*("(?:[^"\\]|\\.){0,1200}")')
"""Values of all keys "model", at whatever level: within a string of JSON a quote has a backslash before it."""
_read_text = msgspec.json.Decoder(str).decode
_read = msgspec.json.Decoder(_Named).decode
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ModelDispatch:
    """ASGI middleware in front of the server's own application. refuse, note_gone: answer for a call that is refused,
    and one whose client left."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        models: ModelRegistry,
        canaries: Canaries,
        limits: Limits,
        clock: Clock,
        refuse: Handler,
        note_gone: Handler,
    ) -> None:
        self._app = app
        self._models = models
        self._canaries = canaries
        self._clock = clock
        self._limits = limits
        self._refuse = refuse
        self._note_gone = note_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._models.is_alone or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_of(scope)
        if scope["method"] == "POST" and path.startswith(_ELSEWHERE):
            await self._app(scope, receive, send)
            return
        request = HttpRequest(scope, receive)
        try:
            if scope["method"] != "POST":
                viewed = self._viewed(path, scope)
                await (self._app if viewed is None else viewed.view)(scope, receive, send)
                return
            async with self._limits.body(request) as data:
                named = named_in(data, self._models.is_beside)
                self._models.require_loaded(named.model)
                canary = self._canaries.find(named.model)
                if canary is not None:
                    await self._answer_canary(canary, named, path, data, scope, receive, send)
                    return
                if (reply := self._unneeded(named, path, data)) is not None:
                    await reply(scope, receive, send)
                    return
                async with self._loaded(named, path, request):
                    model = self._models.find(named.model)
                    if model is not None:
                        await self._answer(model, path, data, scope, receive, send)
                        return
                    if self._models.on_demand is not None:
                        await self._app(*unread(scope, data, receive), send)
                        return
        except TokenmillError as error:
            await (await self._refuse(request, error))(scope, receive, send)
            return
        except ClientGone as error:
            await (await self._note_gone(request, error))(scope, receive, send)
            return
        await self._app(*unread(scope, data, receive), send)

    @contextlib.asynccontextmanager
    async def _loaded(self, named: _Named, path: str, request: HttpRequest) -> AsyncIterator[None]:
        """Has the model that is named in memory until the block ends, where calls load it. Raises TokenmillError where
        it cannot be had, and ClientGone."""
        on_demand = self._models.on_demand
        if on_demand is None or path in _NEEDS_NONE:
            yield
            return
        if not self._models.is_beside(named.model or "") and named.model not in (None, *self._models.home):
            await on_demand.refresh()
        name = on_demand.find(named.model)
        if name is None:
            yield
            return
        keep_s = read_keep_alive(bytes(named.keep_alive))
        self._limits.refuse_when_draining()
        if not on_demand.enter_at_once(name):
            caller = caller_of(request)
            self._limits.check_quota(caller)
            await caller.stay(on_demand.enter(name))
        try:
            yield
        finally:
            on_demand.leave(name, keep_s)

    def _unneeded(self, named: _Named, path: str, data: bytes) -> ASGIApp | None:
        """The answer to who wants a model unloaded, in Ollama's way, that is not loaded."""
        on_demand = self._models.on_demand
        name = None if on_demand is None else on_demand.find(named.model)
        if on_demand is None or name is None or on_demand.state(name) in (State.LOADING, State.LOADED):
            return None
        asks = read_keep_alive(bytes(named.keep_alive)) == 0 and asks_nothing(path, data)
        return unloaded_reply(path, named.model or name) if asks else None

    def _viewed(self, path: str, scope: Scope) -> LocalModel | None:
        """The model that is asked about, by ?model=NAME; None: the server's own. Raises Unavailable for one that is not
        loaded, and ModelNotFound for one of another server."""
        if not path.startswith(_VIEWS) or b"model=" not in scope["query_string"]:
            return None
        name, on_demand = QueryParams(scope["query_string"]).get("model"), self._models.on_demand
        model = self._models.find(name)
        if model is None and on_demand is not None and (found := on_demand.find(name)) not in (None, on_demand.home):
            raise Unavailable(f"The model {found} is not loaded.", param="model")
        if model is not None and not isinstance(model, LocalModel):
            raise _not_asked(model, path)
        return model

    async def _answer_canary(
        self, canary: Canary, named: _Named, path: str, data: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        name = canary.choose(named.session(scope))
        named = msgspec.structs.replace(named, model=name)
        data = encode_json(_read_fields(data) | {"model": name})
        watch = AnswerWatch(self._clock.now, partial(self._canaries.note, canary, name), name.encode())
        state = scope["state"]
        direct, watched = state.get("send"), watch.through(send)
        if direct is not None:
            state["send"] = watch.through(direct)
        has_failed = True
        try:
            async with self._loaded(named, path, HttpRequest(scope, receive)):
                model = self._models.find(name)
                if model is None:
                    inner, again = unread(scope, data, receive)
                    if (log := state.get("stream_log")) is not None:  # who goes on with it need not know this name
                        log.headers, log.body = tuple(inner["headers"]), bytearray(data)
                    await self._app(inner, again, watched)
                else:
                    await self._answer(model, path, data, scope, receive, watched)
            has_failed = bool(state.get("has_failed"))
        except (ClientGone, asyncio.CancelledError):
            has_failed = False
            raise
        except TokenmillError as error:
            watch.refused(error.status)
            has_failed = False
            raise
        finally:
            watch.end(has_failed=has_failed)
            if direct is not None:
                state["send"] = direct

    async def _answer(
        self, model: ServedModel, path: str, data: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not model.takes(path):
            raise _not_asked(model, path)
        await model.answer(path, data, scope, receive, send)


def _not_asked(model: ServedModel, path: str) -> ModelNotFound:
    message = f"The model {model.name!r} is served by another server, which is not asked for {path}."
    return ModelNotFound(message, param="model")


def named_in(body: bytes, is_beside: Callable[[str], bool] = lambda name: True) -> _Named:
    """The model that a body names, and for whom; nothing where it is nothing that could. A large body that has no name
    for which `is_beside` is true is not parsed: that would hold all streams up."""
    if len(body) > HEAVY_BYTES and not any(is_beside(_text(found)) for found in _NAMES.findall(body)):
        return _NO_NAME
    try:
        return _read(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _NO_NAME


def _text(string: bytes) -> str:
    """Of a JSON string."""
    try:
        return _read_text(string)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
