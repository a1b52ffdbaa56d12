"""One connection: uvicorn's protocol, with bounds on all that a client can make it hold.

uvicorn parses (httptools), pipelines and runs the application. Added here: heads, bodies and idle times are bounded
before any key is looked at; requests sent ahead of something broken are answered before it is refused; an offer to
speak another protocol (some clients make it with every request) is passed over, body and all.

A client that has sent its request may close its sending half and still gets its answer. One that has closed altogether
looks the same until something is sent to it: an answer that streams finds out by its own bytes; otherwise an interim
response (100 Continue, which every HTTP/1.1 client has to skip) is sent to learn it. Over HTTP/1.0, which knows no
interim responses, it is learnt by the answer; over TLS a closed half is the end of the connection.
"""

from __future__ import annotations

import asyncio
import re
import select
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..api.errors import Fault, Style, openai_style, style_of
from ..api.json_encoder import encode_json
from .access_log import log_access
from .connections import Connections, HttpBounds, address_group
from .http import Begun, route_of

_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
_REASONS = {
    400: b"Bad Request", 405: b"Method Not Allowed", 408: b"Request Timeout", 414: b"URI Too Long",
    431: b"Request Header Fields Too Large", 501: b"Not Implemented", 503: b"Service Unavailable",
    505: b"HTTP Version Not Supported",
}  # fmt: skip

Line = tuple[bytes, bytes]
"""Of a head: name in lower case, value."""


class Refusal(NamedTuple):
    status: int
    message: str


def judge_head(version: str, method: bytes, target: bytes, lines: list[Line]) -> bytes | Refusal:
    """The path that is asked for, or what is wrong. A target that names its host (as proxies send it) goes before the
    Host line, which becomes that one."""
    if version not in ("1.0", "1.1"):
        return Refusal(505, "This server speaks HTTP/1.1 and HTTP/1.0.")
    if method == b"CONNECT":
        return Refusal(405, "This server is no proxy.")
    num_hosts = sum(name == b"host" for name, _ in lines)
    if num_hosts > 1 or (not num_hosts and version == "1.1"):
        return Refusal(400, "A request needs one Host header.")
    codings = b",".join(value for name, value in lines if name == b"transfer-encoding").lower().split(b",")
    if len(codings) > 1 and codings[-1].strip() == b"chunked":  # where it is not the last, the parser has refused it
        return Refusal(501, "A body may come chunked; this server knows no other transfer coding.")
    absolute = _ABSOLUTE.match(target)
    if absolute is not None:
        target = b"/" + target[absolute.end() :].removeprefix(b"/")
        lines[:] = [line for line in lines if line[0] != b"host"] + [(b"host", absolute[1])]
    elif target == b"*" and method == b"OPTIONS":
        target = b"/*"
    if not target.startswith(b"/") or not target.isascii():
        return Refusal(400, "The target must be a path in ASCII.")
    return target


def too_large(bounds: HttpBounds) -> Refusal:
    return Refusal(
        431, f"The head is larger than {bounds.max_head_bytes} bytes or has more than {bounds.max_head_lines} lines."
    )


def refusal_bytes(refusal: Refusal, usual: Iterable[Line], style: Style = openai_style) -> bytes:
    """The whole response, after which the connection is closed. usual: headers of every response."""
    is_busy = refusal.status == 503
    kind, retry = ("unavailable_error", b"retry-after: 1\r\n") if is_busy else ("invalid_request_error", b"")
    fault = Fault(refusal.status, refusal.message, kind, code=503 if is_busy else None)
    body = encode_json(style(fault))
    line = b"HTTP/1.1 %d %s\r\n" % (refusal.status, _REASONS[refusal.status])
    shared = b"".join(b"%s: %s\r\n" % header for header in usual)
    length = b"content-length: %d\r\n" % len(body)
    fixed = b"content-type: application/json\r\nconnection: close\r\n"
    return line + shared + length + retry + fixed + b"\r\n" + body


_HANG_UP_CHECKS_S = (0.02, 0.1, 0.4)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PART_BYTES = 1 << 14
_LINE_BYTES = 128  # what Python takes for a header line besides its text
_REQUEST_BYTES = 2048  # and for a request


class _Open(NamedTuple):
    """A request that is to be answered, and what its head takes."""

    cycle: RequestResponseCycle
    held_bytes: int
    start_s: float


class Connection(HttpToolsProtocol):
    """The protocol object of one accepted connection. `check` is called again and again."""

    def __init__(self, shared: Connections, **how: Any) -> None:
        super().__init__(**how)
        self._shared = shared
        self._bounds = shared.bounds
        self._group = ""
        self._has_place = False
        self._is_deaf = False  # what still arrives is dropped
        self._is_half = False  # the client has closed its sending half
        self._is_framing = False  # the parser is told again where a body ends
        self._in_head = self._in_body = False
        self._size_bytes = 0  # of the head that arrives
        self._part_bytes = 0
        self._silent_bytes = 0  # fed since the last message, head or part of a body; it may be in the parser
        self._open: deque[_Open] = deque()  # in the order of their answers
        self._early: list[bytes] | None = None  # what arrives before a TLS transport is ours
        self._held_bytes = 0
        self._taken_bytes = 0  # of all heads, from the pot
        self._last_words: bytes | None = None  # after the answers that are due
        self._is_fresh = True  # no request has come yet
        self.url = b""
        self._since_s = self._progress_s = self.loop.time()  # the present wait for the client began; it last sent
        self._body_bytes = 0
        self._ended_s: float | None = None
        self._unsent_bytes = 0
        self._stuck_s = 0.0

    # ---- told by the transport ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._group = address_group(self.client[0]) if self.client else ""
        self._has_place = self._shared.enter(self, self._group)
        tls = self._shared.tls
        if not self._has_place:
            self._is_deaf = True
            if tls is None:
                refusal = Refusal(503, "Too many connections are open; retry in a second.")
                self.transport.write(refusal_bytes(refusal, self.server_state.default_headers))
            self.transport.close()
        elif tls is not None:
            self._early = []
            shaking = self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=self._bounds.head_s
            )
            # Its first steps at once: they are to take the first bytes, which may come before a task would run.
            steps = shaking.__await__()
            task = self.loop.create_task(self._secure(Begun(steps, next(steps))))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    async def _secure(self, shaking: Begun) -> None:
        """Shake hands: here and not in the listener, so that who does not finish holds a place like anybody else."""
        try:
            secure = await shaking
        except (OSError, EOFError):
            secure = None
        early, self._early = self._early or [], None
        if secure is None or not self._has_place:  # who gave way while it shook hands hears of its end from nobody else
            self.give_way()
            self.connection_lost(None)
            return
        self.transport, self.flow, self.scheme = secure, FlowControl(secure), "https"
        for data in early:
            self.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        now = self.loop.time()
        for cycle, _, start_s in self._open:
            _lose(cycle)
            log_access(cycle.scope, now - start_s, self._shared.mask, has_left=True)
        self._open.clear()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
            return
        self._unset_keepalive_if_required()
        for start in range(0, len(data), _PART_BYTES):
            self._feed(data[start : start + _PART_BYTES])

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection lives on to be written to."""
        if not self._open or self._in_body or self._ended_s is not None or self.scheme == "https":
            return False
        self._is_half = self._is_deaf = True
        first, last = self._open[0].cycle, self._open[-1].cycle
        if self._last_words is None:
            last.keep_alive = False
        if not first.response_started and first.scope["http_version"] != "1.0":
            self.transport.write(_CONTINUE)
        for delay_s in _HANG_UP_CHECKS_S:
            self.loop.call_later(delay_s, self._check_hang_up)
        return True

    # ---- told by the parser ----

    def _feed(self, data: bytes) -> None:
        if self._is_deaf or self.parser is None:
            return
        self._part_bytes = len(data)
        self._silent_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._pass_over_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(Refusal(400, "The request is not valid HTTP."))
        if self._silent_bytes > self._bounds.max_head_bytes + _PART_BYTES:
            between = Refusal(400, "The body has too much between its chunks.")
            self._refuse(between if self._in_body else too_large(self._bounds))
        elif self._silent_bytes:
            self._settle()

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """The parser has stopped at the end of the head: a new one is told the framing alone and takes the body."""
        if self._is_deaf:
            return
        framing = [line for line in self.headers if line[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_framing = True
        lines = [b"%s: %s\r\n" % line for line in framing]
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *lines, b"\r\n"]))
        if rest:
            self._feed(rest)

    def on_message_begin(self) -> None:
        if self._is_deaf or self._is_framing:
            return
        super().on_message_begin()
        self.scope["root_path"] = self._shared.root_path
        self._size_bytes = 0
        self._silent_bytes = self._part_bytes
        self._in_head = True
        if not self._is_fresh:
            self._since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        if self._is_deaf or self._is_framing:
            return
        super().on_url(url)
        most = self._bounds.max_target_bytes
        if len(self.url) > most:
            self._refuse(Refusal(414, f"The path and query are longer than {most} bytes."))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_deaf or self._is_framing or self._in_body:  # the last: a trailer, which nobody wants
            return
        super().on_header(name, value)
        self._size_bytes += len(name) + len(value) + len(b": \r\n")
        if self._size_bytes > self._bounds.max_head_bytes or len(self.headers) > self._bounds.max_head_lines:
            self._refuse(too_large(self._bounds))

    def on_headers_complete(self) -> None:
        if self._is_deaf or self._is_framing:
            self._is_framing = False
            return
        version, method = self.parser.get_http_version(), self.parser.get_method()
        judged = judge_head(version, method, self.url, self.headers)
        if isinstance(judged, Refusal):
            self._refuse(judged)
            return
        self.url = judged
        super().on_headers_complete()
        held_bytes = self._head_bytes()
        self._open.append(_Open(self.cycle, held_bytes, self.loop.time()))
        self._held_bytes += held_bytes
        self._silent_bytes = self._body_bytes = 0
        self._in_head, self._in_body, self._is_fresh = False, True, False
        self._since_s = self._progress_s = self.loop.time()
        if len(self._open) > self._bounds.max_pipelined:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._is_deaf:
            return
        self._silent_bytes = 0
        self._progress_s = self.loop.time()
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_deaf or self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._silent_bytes = 0
        self._in_body = False
        if not self.cycle.keep_alive:
            self._is_deaf = True
        if self._open:
            self._shared.peers.busy(self._group, self)
        else:
            self._rest()

    # ---- told by uvicorn ----

    def on_response_complete(self) -> None:
        """The response of the first open request is written."""
        cycle, held_bytes, start_s = self._open.popleft()
        self._held_bytes -= held_bytes
        self._settle()
        log_access(cycle.scope, self.loop.time() - start_s, self._shared.mask)
        if self._last_words is not None and not self._open and not self.transport.is_closing():
            self._end(self._last_words)
            return
        super().on_response_complete()
        cycle.scope = {}  # type: ignore[typeddict-item]  # an answered request holds no head
        if not self._open:
            if not self._in_head:
                self.headers, self.scope = [], {}  # type: ignore[typeddict-item]
            self._rest()

    # ---- told by the connections of the server ----

    def shutdown(self) -> None:
        if self._early is not None:
            self.give_way()
        super().shutdown()

    def give_way(self) -> None:
        """Go at once, and leave the place to another."""
        self._is_deaf = True
        self.transport.abort()
        self._leave()

    def check(self, now: float) -> None:
        """Do what time has made due."""
        bounds = self._bounds
        if self._early is not None:
            return
        if self._is_stuck(now):
            self.transport.abort()
        elif self._ended_s is not None:
            if not self._unsent_bytes and now - self._ended_s > bounds.linger_s:
                self.transport.abort()
        elif self._in_body and not self._open:
            if now - self._since_s > bounds.linger_s:  # it has its answer and sends on
                self._end(b"")
        elif self._in_body:
            due_s = min(self._progress_s, self._since_s + self._body_bytes / bounds.min_body_rate) + bounds.body_s
            if now > due_s and not self.flow.read_paused:
                self._refuse(Refusal(408, f"The body did not arrive: nothing for {bounds.body_s:g} s, or too slowly."))
        elif self._open:
            if self._is_half:
                self._check_hang_up()
        elif self._in_head:
            if now - self._since_s > bounds.head_s:
                self._refuse(Refusal(408, f"The head was not complete after {bounds.head_s:g} s."))
        elif now - self._since_s > (bounds.head_s if self._is_fresh else bounds.idle_s):
            self.transport.close()

    # ---- its own ----

    def _leave(self) -> None:
        if self._has_place:
            self._has_place = False
            self._shared.leave(self, self._group)
            self._shared.peers.give(self._taken_bytes)
            self._taken_bytes = 0

    def _refuse(self, refusal: Refusal) -> None:
        """Say what is wrong after the answers that are due, then end."""
        if self._is_deaf:
            return
        self._is_deaf = True
        self._shared.note_refused(refusal.status)
        reply = refusal_bytes(refusal, self.server_state.default_headers, style_of(self._route()))
        if self._in_body and self.cycle is not None and not self.cycle.response_complete:
            cycle, held_bytes, _ = self._open.pop()
            self._held_bytes -= held_bytes
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            if cycle.response_started:
                reply = b""
            _lose(cycle)
        elif self._in_body:  # it has been answered
            reply = b""
        if self._open:
            self._last_words = reply
        else:
            self._end(reply)

    def _route(self) -> str:
        """The path that the newest request is for, as far as it is known."""
        return route_of({"path": self.url.decode("ascii", "replace"), "root_path": self._shared.root_path})

    def _end(self, last_words: bytes) -> None:
        """Close once all is written, and read and drop for a while what still arrives: the client would lose the
        answer to a reset if that were not read."""
        self._is_deaf = True
        self._ended_s = self.loop.time()
        self._shared.peers.busy(self._group, self)
        if self.transport.is_closing():
            return
        if last_words:
            self.transport.write(last_words)
        if self._is_half or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.flow.resume_reading()
            self.transport.write_eof()

    def _rest(self) -> None:
        """Nothing is owed, the client has the next word."""
        self._since_s = self._progress_s = self.loop.time()
        if not self.transport.is_closing():
            self._shared.peers.waits(self._group, self)

    def _head_bytes(self) -> int:
        return _REQUEST_BYTES + len(self.url) + self._size_bytes + _LINE_BYTES * len(self.headers)

    def _settle(self) -> None:
        """Beyond its own share a connection takes from the pot what its requests hold."""
        arriving_bytes = self._head_bytes() + self._silent_bytes if self._in_head else self._silent_bytes
        needed = max(0, self._held_bytes + arriving_bytes - self._bounds.own_head_bytes)
        if needed <= self._taken_bytes:
            self._shared.peers.give(self._taken_bytes - needed)
        elif not self._shared.peers.take(needed - self._taken_bytes):
            self._refuse(Refusal(503, "Too many bytes of requests are held; retry in a second."))
            return
        self._taken_bytes = needed

    def _is_stuck(self, now: float) -> bool:
        """Whether the client has long taken nothing of what was written."""
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent_bytes:
            self._unsent_bytes, self._stuck_s = unsent, now
        return bool(unsent) and now - self._stuck_s > self._bounds.write_s

    def _check_hang_up(self) -> None:
        """The client has closed its half: has it closed the other one too?"""
        if self.transport.is_closing():
            return
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poller.poll(0):  # POLLHUP or POLLERR, which come unasked
            self.transport.abort()


def _lose(cycle: RequestResponseCycle) -> None:
    """Tell the application that nobody waits for its answer."""
    cycle.disconnected = True
    cycle.message_event.set()
