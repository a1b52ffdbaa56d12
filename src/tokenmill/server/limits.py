"""What is refused because of load, and when to come back; how bodies are read within bounds; and what the front end
holds at most.

Bodies may come compressed: gzip and deflate are read, within the same bounds as plain ones; others are 415. A few bytes
can unfold to gigabytes, so no more is ever unfolded than a body may have, in pieces between which the event loop does
other work.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NoReturn

from starlette.requests import Request as HttpRequest

from ..api.errors import ClientGone, told_s
from ..api.jobs import MAX_RESULT_BYTES
from ..api.sandbox import Caller
from ..cluster.admission import PREDICTED, BoundedWait
from ..control.tenants.quotas import Quotas
from ..core.errors import BodyTooLarge, InvalidRequest, Overloaded, RateLimited, Unavailable, UnsupportedEncoding
from ..core.events import Ready
from ..core.policy import Newcomer, Refusal, Verdict
from ..core.ports import Clock
from ..core.request import Request
from ..core.slo import OFF
from ..core.tenant import NO_LIMITS
from ..core.units import KiB
from .client import EngineClient
from .config import SHADOW, ServerConfig

REPLY_BYTES = 64 * KiB
"""Of one open request: what was generated and is not sent yet, and the request itself without its prompt."""

_RESULTS = 3
"""Results of the sandbox that arrive at a time: its heavy jobs, and a rendering."""


def front_end_bytes(config: ServerConfig, base_bytes: int, *, tls: bool = False) -> int:
    """base_bytes: what the process holds when it is idle. Bodies are held as they came and once more as what was read
    from them; the first of the two, and prompts that wait, are the plan's queue."""
    decoded = config.max_buffered_bytes
    connections = config.http.max_bytes(tls=tls)
    held = connections + decoded + _RESULTS * MAX_RESULT_BYTES + config.result_cache
    return base_bytes + held + config.max_open_requests * REPLY_BYTES


READ = ("gzip", "x-gzip", "deflate")
_PIECE_BYTES = 1 << 18


async def decode_body(encoding: str, data: bytes, limit: int, hold: Callable[[int], None]) -> bytes:
    """`data` as it was before `encoding`, a Content-Encoding header. hold: called with the size of each piece that is
    unfolded. Raises UnsupportedEncoding, BodyTooLarge beyond `limit` bytes, InvalidRequest, and what `hold` raises."""
    codings = [coding.strip().lower() for coding in encoding.split(",")]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if len(codings) > 1 or any(coding not in READ for coding in codings):
        raise UnsupportedEncoding(
            f"A body with Content-Encoding {encoding[:100]!r} is not read here; send it plain, or by gzip or deflate."
        )
    return await _unfold(codings[0], data, limit, hold) if codings else data


async def _unfold(coding: str, data: bytes, limit: int, hold: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size, place, pending = 0, 0, b""
    unfolding = _start(coding, data)
    try:
        while not unfolding.eof:
            if not pending:
                pending = data[place : place + _PIECE_BYTES]
                place += len(pending)
            is_over = not pending
            part = unfolding.decompress(pending, _PIECE_BYTES)
            pending = unfolding.unconsumed_tail
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"The body is larger than {limit} bytes when it is decompressed.")
            hold(len(part))
            parts.append(part)
            if is_over and not part:
                raise InvalidRequest(f"The body is not valid {coding}: it ends too early.")
            await asyncio.sleep(0)
    except zlib.error:
        raise InvalidRequest(f"The body is not valid {coding}.") from None
    if unfolding.unused_data or place < len(data):
        raise InvalidRequest(f"The body is not valid {coding}: more follows its end.")
    return b"".join(parts)


def _start(coding: str, data: bytes) -> zlib._Decompress:
    """Deflate is sent with zlib's header, as it should be, and without."""
    if coding != "deflate":
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    has_header = len(data) > 1 and data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


MAX_OF_CALL = 1024
"""Choices of one call."""


class Limits:
    """Counts what this front end holds. `draining`: no new calls. `quotas`: what tenants with limits have used of
    them; None: no tenant has any. on_call, on_read: told that a call is here, and that it is submitted or refused.
    why_uncounted: why the usage of further calls could not be counted; "": it can."""

    def __init__(self, config: ServerConfig, client: EngineClient, clock: Clock) -> None:
        self._config = config
        self._client = client
        self._clock = clock
        self._buffered_bytes = 0
        self.draining = False
        self.quotas: Quotas | None = None
        self.why_uncounted: Callable[[], str] = lambda: ""
        self.on_call: Callable[[], None] = lambda: None
        self.on_read: Callable[[], None] = lambda: None
        client.gateway.admission = BoundedWait(
            config.max_open_requests, config.max_open_tokens, config.longest_wait_s, config.admission != OFF
        )

    def refuse_when_draining(self) -> None:
        if self.draining:
            raise Unavailable("The server is shutting down.")

    def check_possible(self, num_requests: int, param: str = "n") -> None:
        """Raises InvalidRequest for a call that could never be admitted."""
        most = min(self._config.max_open_requests, MAX_OF_CALL)
        if num_requests > most:
            raise InvalidRequest(
                f"The call asks for {num_requests} choices; this server takes at most {most} at once.", param=param
            )

    def admit(self, newcomer: Newcomer) -> Verdict:
        """What the admission says of a call. Raises InvalidRequest for a priority that nobody may claim, and Overloaded
        where the call may not enter; of a shadow's refusals the verdict tells."""
        if newcomer.priority < self._config.max_priority:
            raise InvalidRequest(
                f"priority must be at least {self._config.max_priority} on this server, got {newcomer.priority}; lower "
                "is more urgent.",
                param="priority",
            )
        verdict = self._client.judge(newcomer, self._clock.now())
        refusal = verdict.refusal
        if refusal is not None and not (self._config.admission == SHADOW and refusal.reason in PREDICTED):
            self._refuse(refusal)
        return verdict

    def check_quota(self, caller: Caller) -> None:
        """Raises RateLimited where it is known that `take_quota` would, Unavailable while nothing can be counted."""
        if why := self.why_uncounted():
            raise Unavailable(f"Usage cannot be written: {why}.", retry_after_s=5.0)
        if self.quotas is not None:
            with self._counted():
                self.quotas.check(caller.tenant)

    async def take_quota(self, caller: Caller, requests: Sequence[Request], param: str) -> None:
        """Let a call in as far as its tenant's limits go, and tell its answer's headers of them. It is given back when
        the requests have ended. Raises RateLimited, and InvalidRequest naming `param` for a prompt that no minute
        allows."""
        if self.quotas is None or caller.tenant.limits == NO_LIMITS:
            return
        with self._counted():
            headers = await self.quotas.take(caller.tenant, requests, param)
        if caller.request is not None:
            caller.request.state.ratelimit = headers

    @contextlib.contextmanager
    def dropping_quota(self, requests: Sequence[Request]) -> Iterator[None]:
        """What was let in counts not at all where the block fails: it does not come to the engine."""
        try:
            yield
        except BaseException:
            if self.quotas is not None:
                self.quotas.drop(requests)
            raise

    def settle_quota(self, requests: Sequence[Request], num_output: int) -> None:
        """Requests of a call that the engine knows as others are over, and came to so many tokens."""
        if self.quotas is not None:
            self.quotas.settle(requests, num_output)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except RateLimited as error:
            if self._client.observers.metrics is not None:
                self._client.observers.metrics.call_turned_away(f"tenant_{error.limit}")
            raise

    def _refuse(self, refusal: Refusal) -> NoReturn:
        if self._client.observers.metrics is not None:
            self._client.observers.metrics.call_turned_away(refusal.reason)
        message = f"{refusal.message}; retry in {told_s(refusal.retry_s)} s."
        raise Overloaded(message, retry_after_s=refusal.retry_s, reason=refusal.reason)

    @contextlib.contextmanager
    def held(self, num_bytes: int) -> Iterator[None]:
        """Texts that wait, or an answer until its client has taken it: they count as bodies do. Raises Overloaded when
        all together are too much."""
        if self._buffered_bytes + num_bytes > self._config.max_buffered_bytes:
            raise Overloaded("Too much is being held for other requests; retry later.")
        self._buffered_bytes += num_bytes
        try:
            yield
        finally:
            self._buffered_bytes -= num_bytes

    @contextlib.asynccontextmanager
    async def body(self, request: HttpRequest) -> AsyncIterator[bytes]:
        """The whole body, which counts as held until the block ends: what waits to be encoded is bounded too. Raises
        BodyTooLarge as soon as it is known to be, Overloaded when all bodies together are."""
        self.on_call()
        try:
            async with self._body(request) as data:
                yield data
        finally:
            self.on_read()

    @contextlib.asynccontextmanager
    async def _body(self, request: HttpRequest) -> AsyncIterator[bytes]:
        limit = self._config.max_body_bytes
        too_large = BodyTooLarge(f"The body is larger than {limit} bytes.")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                size += len(part)
                self._buffered_bytes += len(part)
                if size > limit:
                    raise too_large
                if self._buffered_bytes > self._config.max_buffered_bytes:
                    raise Overloaded("Too many large requests are being received; retry later.")
                parts.append(part)
                if not message.get("more_body", False):
                    break
            body = b"".join(parts)
            parts.clear()
            encoding = request.headers.get("content-encoding")
            if encoding is not None:

                def hold(more: int) -> None:
                    nonlocal size
                    size += more
                    self._buffered_bytes += more
                    if self._buffered_bytes > self._config.max_buffered_bytes:
                        raise Overloaded("Too many large requests are being received; retry later.")

                body = await decode_body(encoding, body, limit, hold)
            yield body
        finally:
            self._buffered_bytes -= size


async def wait_ready(client: EngineClient, config: ServerConfig, caller: Caller) -> Ready:
    """The engines' facts. A call waits for an engine that is being started as long as it would for a place. Raises
    Unavailable, and ClientGone."""
    ready = client.ready
    return await caller.stay(client.wait_ready(config.longest_wait_s)) if ready is None else ready
