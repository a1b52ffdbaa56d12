"""One call through to an upstream and its answer back: which upstream, what is tried again, what is counted.

Until the first byte of the answer has gone to the client, what one upstream fails to do another of the same name may: a
connection that fails, an answer of 5xx, one that is cut off or no JSON. After it an answer that cannot be completed
ends with an error. What an upstream computed is not resumed: it has the tokens, this front end has only their text.

Of several upstreams of one model the one gets a call that has much of its prompt, and few calls open:

    score = share of the prompt that is cached there - (calls open there - mean) / max(1, mean)

among those that may be asked (vLLM's production stack weighs so). Where nobody has anything, the one with fewest calls
open wins. It gets a client's body with the fields as they came, but for the model's name, the tenant's salt and the
wish for a count of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from ...api.errors import ClientGone, describe, openai_style
from ...api.json_encoder import encode_json
from ...api.sandbox import Caller, caller_of
from ...control.models.served import UPSTREAM
from ...control.tenants.quotas import RESERVED_OUTPUT
from ...core.errors import InvalidRequest, Overloaded, TokenmillError, Unavailable, UpstreamFailed
from ...core.ports import Clock
from ...core.request import Request, SamplingParams
from ...core.tenant import NO_LIMITS, Tenant
from ..limits import Limits
from .connection import BadReply, UpstreamConnection
from .prefixes import Known, Prefixes
from .tally import Events, Tally
from .upstream import Upstream

_USAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
"""Streams of these tell the tokens they used only where they are asked to."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Passed:
    """What goes to an upstream. stream: the answer is to be one; hides_usage: the client has not asked for the count of
    tokens that its stream will have; max_tokens: 0 where the call names none."""

    def __init__(self, path: str, body: bytes, tenant: Tenant) -> None:
        """Raises InvalidRequest."""
        try:
            self._fields: dict[str, Any] = dict(_decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The body is not a JSON object: {str(error)[:200]}.") from None
        self.stream = self._value("stream") is True
        wanted = [self._value(name) for name in _LIMITS]
        self.max_tokens = next((each for each in wanted if type(each) is int and 0 < each < 2**31), 0)
        self.hides_usage = False
        if self.stream and path in _USAGE_PATHS:
            given = self._value("stream_options")
            options = dict(given) if isinstance(given, dict) else {}
            if not options.get("include_usage"):
                self.hides_usage = True
                self._fields["stream_options"] = options | {"include_usage": True}
        if tenant.salt:
            salt = self._value("cache_salt")
            self._fields["cache_salt"] = tenant.salt_with(salt if isinstance(salt, str) else "")

    def body(self, model: str) -> bytes:
        """For an upstream that calls the model so."""
        return encode_json(self._fields | {"model": model})

    def _value(self, name: str) -> Any:
        raw = self._fields.get(name)
        try:
            return None if raw is None else _decode_any(raw)
        except RecursionError:
            raise InvalidRequest(f"{name} is nested too deeply.", param=name) from None


def best(num_open: Sequence[int], num_calls: Sequence[int], shares: Sequence[float]) -> int | None:
    """The place of the one that is to be asked; None where there is none. num_open, num_calls: of each, open now and
    given ever; shares: of the prompt that is cached there, 0 to 1."""
    if not num_open:
        return None
    mean = sum(num_open) / len(num_open)

    def worth(place: int) -> tuple[float, int, int, int]:
        score = shares[place] - (num_open[place] - mean) / max(1.0, mean)
        return -score, num_open[place], num_calls[place], place

    return min(range(len(num_open)), key=worth)


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""That are passed on; the same without /v1 as well."""

MAX_REPLY_BYTES = 64 << 20
_HELD_BYTES = 64 << 10
NOT_EXACT = (b"x-tokenmill-exact", b"false")
_RESPONSES = "/v1/responses"
_STREAM, _JSON = "text/event-stream", "application/json"


@dataclass(slots=True)
class Ended:
    """A call that an upstream worked on, at its end. outcome: the HTTP status, "cut" where an answer could not be
    completed, "gone" where the client left. address: of the upstream, "" where none answered. ttft_s: to the first byte
    of the answer, None where there was none."""

    model: str
    caller: Caller
    outcome: str
    address: str
    tally: Tally
    num_tries: int
    ttft_s: float | None
    duration_s: float

    @property
    def counts(self) -> bool:
        """Whether tokens were handed over."""
        return self.ttft_s is not None and self.outcome in ("200", "cut", "gone")


@dataclass(slots=True)
class _Call:
    path: str
    passed: Passed
    tally: Tally
    headers: dict[str, str]
    caller: Caller
    begun_s: float
    number: int
    known: Known = field(default_factory=Known)
    tried: list[Upstream] = field(default_factory=list)
    first_s: float | None = None
    outcome: str = "gone"
    address: str = ""
    is_told: bool = False


class UpstreamModel:
    """A ServedModel that one or more upstreams serve. max_open: calls that one may have. prefixes: what they have
    cached; None: calls go by load."""

    kind = UPSTREAM
    registry = None
    memory_bytes = 0

    def __init__(
        self,
        name: str,
        upstreams: list[Upstream],
        limits: Limits,
        clock: Clock,
        new_id: Callable[[str], str],
        *,
        max_open: int,
        prefixes: Prefixes | None = None,
    ) -> None:
        assert upstreams
        self._prefixes = prefixes
        self._numbers = itertools.count()
        self.name = name
        self.upstreams = upstreams
        self.num_open = 0
        self.on_end: list[Callable[[Ended], None]] = []
        self._limits = limits
        self._clock = clock
        self._new_id = new_id
        self._max_open = max_open

    def open(self) -> None:
        for upstream in self.upstreams:
            upstream.open()
        if self._prefixes is not None:
            self._prefixes.open()

    async def close(self) -> None:
        if self._prefixes is not None:
            await self._prefixes.close()
        await asyncio.gather(*(upstream.close() for upstream in self.upstreams))

    def end_calls(self) -> None:
        """All that are open, with an error."""
        for upstream in self.upstreams:
            upstream.end_calls()

    def facts(self) -> dict[str, Any]:
        facts = [each.facts() for each in self.upstreams]
        if self._prefixes is not None:
            facts = [each | {"num_cached_blocks": self._prefixes.num_blocks(at)} for at, each in enumerate(facts)]
        return {"upstreams": facts}

    @property
    def why_not(self) -> str:
        if any(upstream.health.is_up for upstream in self.upstreams):
            return ""
        return "; ".join(f"{upstream.address}: {upstream.health.why}" for upstream in self.upstreams)

    def takes(self, path: str) -> bool:
        return _with_version(path) in PATHS

    async def answer(self, path: str, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises TokenmillError before the answer has begun, and ClientGone."""
        caller = caller_of(HttpRequest(scope, receive))
        self._limits.refuse_when_draining()
        path = _with_version(path)
        call = _Call(
            path, Passed(path, body, caller.tenant), Tally(len(body)), _headers(scope), caller, self._clock.now(),
            next(self._numbers),
        )  # fmt: skip
        requests = await self._take_quota(call)
        self.num_open += 1
        scope["state"]["answered_by"] = (self.name, None)
        try:
            await caller.stay(self._answer(call, body, send))
        except TokenmillError as error:
            call.outcome = str(error.status)
            raise
        except (ClientGone, asyncio.CancelledError):
            call.outcome = "gone"  # also where the answer had begun
            raise
        finally:
            self.num_open -= 1
            self._tell_end(call)
            self._settle_quota(call, requests)

    async def _take_quota(self, call: _Call) -> list[Request]:
        tenant = call.caller.tenant
        if tenant.limits == NO_LIMITS:
            return []
        self._limits.check_quota(call.caller)
        prompt = (0,) * call.tally.num_prompt
        most = call.passed.max_tokens or RESERVED_OUTPUT
        requests = [Request(self._new_id("up"), prompt, SamplingParams(), most, seed=0)]
        await self._limits.take_quota(call.caller, requests, "messages" if "chat" in call.path else "input")
        return requests

    def _settle_quota(self, call: _Call, requests: list[Request]) -> None:
        quotas = self._limits.quotas
        if quotas is None or not requests:
            return
        if call.first_s is None:
            quotas.drop(requests)
        else:  # it knows the prompt as it was guessed
            tally = call.tally
            quotas.settle(requests, tally.num_output + tally.num_prompt - tally.first_prompt)

    async def _answer(self, call: _Call, body: bytes, send: Send) -> None:
        why = ""
        if self._prefixes is not None:
            call.known = await self._prefixes.read(call.path, body, call.caller)
        while (upstream := self._next(call)) is not None:
            call.tried.append(upstream)
            call.tally = call.tally.anew()
            upstream.num_open += 1
            upstream.num_calls += 1
            if self._prefixes is not None:
                self._prefixes.given(self.upstreams.index(upstream), str(call.number), call.known)
            try:
                await self._pass(call, upstream, send)
                return
            except BadReply as error:
                assert call.first_s is None, "an answer that has begun ends itself"
                why = f"{upstream.address}: {error}"
            finally:
                upstream.num_open -= 1
                if self._prefixes is not None:
                    self._prefixes.over(str(call.number))
        raise UpstreamFailed(f"The servers of {self.name} failed: {why}.")

    def _next(self, call: _Call) -> Upstream | None:
        """The best that is up and was not tried for this call. Raises Unavailable, Overloaded."""
        up = [each for each in self.upstreams if each.health.is_up]
        if not up and not call.tried:
            now = self._clock.now()
            after_s = max(1.0, min(each.health.next_check_s for each in self.upstreams) - now)
            raise Unavailable(f"No server of {self.name} can be reached: {self.why_not}.", retry_after_s=after_s)
        left = [each for each in up if each not in call.tried]
        free = [each for each in left if each.num_open < self._max_open]
        if left and not free and not call.tried:
            raise Overloaded(f"The servers of {self.name} have {self._max_open} calls open each; retry later.")
        hits = {} if self._prefixes is None else self._prefixes.hits(call.known)
        shares = [hits.get(self.upstreams.index(each), 0) / max(1, call.known.num_tokens) for each in free]
        place = best([each.num_open for each in free], [each.num_calls for each in free], shares)
        return None if place is None else free[place]

    async def _pass(self, call: _Call, upstream: Upstream, send: Send) -> None:
        """Raises BadReply as long as nothing has been sent."""
        body = call.passed.body(upstream.model)
        connection = await upstream.ask("POST", call.path, call.headers, body)
        try:
            kind = connection.headers.get("content-type", "").partition(";")[0].strip().lower()
            status = connection.status
            if status >= 500:
                raise BadReply(f"it answered {status}")
            if 300 <= status < 400:
                raise BadReply(f"it answered {status}, and redirects are not followed")
            if status in (401, 403, 407):
                raise BadReply(f"it answered {status}: give its key in --upstream-api-key-file")
            if status == 200 and call.passed.stream:
                if kind != _STREAM:
                    raise BadReply(f"it answered a stream with {kind[:100] or 'nothing'}")
                await self._stream(call, upstream, connection, send)
            else:
                await self._whole(call, upstream, connection, send)
            upstream.succeeded()
        except BadReply as error:
            upstream.failed(str(error), is_unreachable=False)
            raise
        finally:
            upstream.give_back(connection)

    async def _whole(self, call: _Call, upstream: Upstream, connection: UpstreamConnection, send: Send) -> None:
        with contextlib.ExitStack() as held:
            data, num_held = bytearray(), 0
            async for piece in connection.body(upstream.timeout_s):
                data += piece
                while num_held < len(data):
                    held.enter_context(self._limits.held(_HELD_BYTES))
                    num_held += _HELD_BYTES
                if len(data) > MAX_REPLY_BYTES:
                    raise BadReply(f"its answer is larger than {MAX_REPLY_BYTES >> 20} MiB")
            body, status = bytes(data), connection.status
            if status == 200:
                call.tally.note_whole(body)
            elif 200 < status < 300:
                raise BadReply(f"it answered {status}")
            headers = [(b"content-type", _JSON.encode()), (b"content-length", str(len(body)).encode()), NOT_EXACT]
            if (after := connection.headers.get("retry-after", "")).isdigit():
                headers.append((b"retry-after", after.encode()))
            if status != 200 and not body.startswith(b"{"):
                raise BadReply(f"it answered {status} without a reason")
            self._begin(call, upstream, str(status))
            self._tell_end(call)
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    async def _stream(self, call: _Call, upstream: Upstream, connection: UpstreamConnection, send: Send) -> None:
        events = Events()
        try:
            async for data in connection.body(upstream.timeout_s):
                ready = [
                    event
                    for event in events.feed(data)
                    if not (call.tally.note_event(event) and call.passed.hides_usage)
                ]
                if ready and call.first_s is None:
                    await self._start_stream(call, upstream, send)
                if ready:
                    await send({"type": "http.response.body", "body": b"".join(ready), "more_body": True})
            if not call.tally.is_complete or not events.is_empty:
                raise BadReply("its stream ended before the answer was complete")
        except BadReply as error:
            if call.first_s is None:
                raise
            upstream.failed(str(error), is_unreachable=False)
            call.outcome = "cut"
            if call.caller.request is not None:
                call.caller.request.state.has_failed = True
            last = _failure(call.path, UpstreamFailed(f"The server of {self.name} failed: {error}."))
            self._tell_end(call)
            await send({"type": "http.response.body", "body": last, "more_body": False})
            return
        self._tell_end(call)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start_stream(self, call: _Call, upstream: Upstream, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            NOT_EXACT,
        ]
        self._begin(call, upstream, "200")
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _begin(self, call: _Call, upstream: Upstream, outcome: str) -> None:
        call.first_s = self._clock.now() - call.begun_s
        call.outcome, call.address = outcome, str(upstream.address)

    def _tell_end(self, call: _Call) -> None:
        """Once, before the last bytes go out."""
        if call.is_told:
            return
        call.is_told = True
        duration_s = self._clock.now() - call.begun_s
        ended = Ended(
            self.name, call.caller, call.outcome, call.address, call.tally, len(call.tried), call.first_s, duration_s
        )
        for hear in self.on_end:
            hear(ended)


def _with_version(path: str) -> str:
    return path if path.startswith("/v1/") else f"/v1{path}"


def _headers(scope: Scope) -> dict[str, str]:
    """Of the call as upstreams get it: none of the client's but the name of the call."""
    request_id = scope["state"].get("request_id", "")
    named = {"x-request-id": request_id} if request_id and request_id.isascii() else {}
    return {"content-type": _JSON, "accept": f"{_JSON}, {_STREAM}", **named}


def _failure(path: str, error: TokenmillError) -> bytes:
    """The last words of a stream that is not complete."""
    if path != _RESPONSES:
        return b"data: " + encode_json(describe(error, openai_style)) + b"\n\n"
    body = {"type": "error", "code": error.kind, "message": error.message, "param": None}
    return b"event: error\ndata: " + encode_json(body) + b"\n\n"
