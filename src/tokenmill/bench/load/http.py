"""A small HTTP/1.1 client for many streams: kept connections, chunked bodies, arrival times before anything else.

When bytes arrive they are stamped and put aside; parsing waits until every ready socket of this turn of the loop has
been stamped, so that one stream's parsing never delays another's clock. No redirects and no proxies: a load generator
belongs next to what it measures; over https it measures decryption too. asyncio's protocols and msgspec keep a token
event near ten microseconds.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from ...core.errors import ConfigError
from .retries import GAVE_UP
from .stream import EventParser, Exchange, read_of


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `base`: path before /chat/completions, "/v1" unless the URL says otherwise. `tls`: for https;
    None for http."""

    host: str
    port: int
    base: str = "/v1"
    headers: dict[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None

    @property
    def root_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    def get(self, url: str, timeout_s: float, most: int) -> bytes:
        """The first bytes at `url`. Raises OSError, of which urllib's HTTPError is one."""
        request = urllib.request.Request(url, headers=self.headers)
        with urllib.request.urlopen(request, timeout=timeout_s, context=self.tls) as reply:
            data: bytes = reply.read(most)
        return data


def make_tls(ca_file: Path | None = None, insecure: bool = False) -> ssl.SSLContext:
    """What is asked of a server's certificate: to be signed by ca_file's, or the system's, or nothing. Raises
    ConfigError."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file} holds no certificates to trust: {error}.", param="ca_file") from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def parse_url(
    url: str, api_key: str | None = None, headers: Sequence[str] = (), tls: ssl.SSLContext | None = None
) -> Address:
    """`http(s)://host:port`, with or without /v1 or a path of the server's own. tls: for https, by default the system's
    checks. Raises ConfigError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port < 0:
        raise ConfigError(f"--url must look like http://127.0.0.1:8000, got {url}.", param="url")
    extra = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header must be NAME:VALUE, got {header}.", param="header")
        extra[name.strip()] = value.strip()
    if api_key is not None:
        extra["Authorization"] = f"Bearer {api_key}"
    for name, value in extra.items():
        if not (name + value).isascii() or any(ord(c) < 32 for c in name + value):
            raise ConfigError(f"--header {name} has characters that a header cannot have.", param="header")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions", "/responses", "/messages"):
        path = path.removesuffix(ending)
    is_secure = parts.scheme == "https"
    return Address(parts.hostname, port, path or "/v1", extra, (tls or make_tls()) if is_secure else None)


CONNECT_TIMEOUT_S = 10.0

LOST_AT_ONCE_S = 0.005
"""A kept connection that ends so soon after a request was written (beside the time a message takes there and back) had
been given up by the server before it saw the request. Whatever ends later may have been worked on, and has failed."""
OnDone = Callable[[Exchange], None]


class Client:
    """Sends calls and reports each exchange when it has ended. Not thread-safe: one loop owns it. Requests carry
    X-Request-Id: NAME-INDEX, so that a server's log can be joined with the result's rows."""

    def __init__(self, address: Address, path: str, *, timeout_s: float = 600.0, name: str = "bench") -> None:
        self.num_bytes = 0
        self.read = read_of(path)
        self._address = address
        self._timeout_s = timeout_s
        headers = {"Host": f"{address.host}:{address.port}", "Accept": "text/event-stream", **address.headers}
        lines = [f"POST {address.base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        self._head = "\r\n".join([*lines, "Content-Type: application/json", f"X-Request-Id: {name}-"]).encode()
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._arrivals: deque[tuple[_Connection, float, bytes]] = deque()
        self._sweep = self._loop.call_later(self._sweep_s, self._on_sweep)

    @property
    def _sweep_s(self) -> float:
        return min(0.5, self._timeout_s / 4)

    async def connect(self, num: int) -> None:
        """Have `num` connections open and idle. Raises OSError where the server cannot be reached."""
        opened = [await self._connect() for _ in range(num)]
        self._idle += opened

    def send(self, exchange: Exchange, body: bytes, on_done: OnDone) -> None:
        """Send at once on an idle connection, or on a new one; on_done is called exactly once, later."""
        request = b"%b%d\r\nContent-Length: %d\r\n\r\n%b" % (self._head, exchange.index, len(body), body)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                connection.start(exchange, request, on_done, is_fresh=False)
                return
        self.send_fresh(exchange, request, on_done)

    def send_fresh(self, exchange: Exchange, request: bytes, on_done: OnDone) -> None:
        """Send on a new connection; the time it takes to open is part of the latency."""
        task = self._loop.create_task(self._connect_and_send(exchange, request, on_done))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def give_up(self, exchange: Exchange) -> None:
        """Its client leaves: the connection is cut, and the exchange has failed."""
        for connection in self._open:
            if connection.exchange is exchange:
                connection.abort(*GAVE_UP)
                return
        exchange.fail(*GAVE_UP)  # its connection is being opened, and then of no use

    async def close(self) -> None:
        """Close every connection; exchanges in flight end as interrupted."""
        self._sweep.cancel()
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._open):
            connection.abort("interrupted", "the run ended before the answer")
        await asyncio.sleep(0)

    async def _connect_and_send(self, exchange: Exchange, request: bytes, on_done: OnDone) -> None:
        try:
            connection = await self._connect()
        except asyncio.CancelledError:
            exchange.fail("interrupted", "the run ended before the connection was open")
            exchange.end_s = time.perf_counter()
            on_done(exchange)
            raise
        except TimeoutError:
            exchange.fail("connect_timeout", f"no connection within {CONNECT_TIMEOUT_S:g} s")
        except OSError as error:
            exchange.fail("connect_error", str(error))
        else:
            if exchange.ok:
                connection.start(exchange, request, on_done, is_fresh=True)
                return
            self.release(connection)
        exchange.end_s = time.perf_counter()
        on_done(exchange)

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self._loop.create_connection(
                lambda: _Connection(self), self._address.host, self._address.port, ssl=self._address.tls
            )
        return connection

    def _on_sweep(self) -> None:
        """Ends exchanges that have been silent or running for too long."""
        oldest_s = time.perf_counter() - self._timeout_s
        for connection in list(self._open):
            if connection.exchange is not None and connection.written_s < oldest_s:
                connection.abort("timeout", f"no complete answer within {self._timeout_s:g} s")
        self._sweep = self._loop.call_later(self._sweep_s, self._on_sweep)

    def arrived(self, connection: _Connection, at_s: float, data: bytes) -> None:
        if not self._arrivals:
            self._loop.call_soon(self._parse_arrivals)
        self._arrivals.append((connection, at_s, data))

    def _parse_arrivals(self) -> None:
        while self._arrivals:
            connection, at_s, data = self._arrivals.popleft()
            self.num_bytes += len(data)
            connection.parse(at_s, data)

    def lost(self, connection: _Connection, error: Exception | None) -> None:
        """The connection is gone; what it had received still counts, then its exchange ends."""
        self._parse_arrivals()
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        connection.on_lost(error)

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def release(self, connection: _Connection) -> None:
        self._idle.append(connection)


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. Body states: head, length (bytes left), chunked, until_close."""

    def __init__(self, client: Client) -> None:
        self.exchange: Exchange | None = None
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._begun_s = time.perf_counter()
        self._round_trip_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._request = b""
        self.written_s = 0.0
        self._on_done: OnDone | None = None
        self._is_fresh = True
        self._state = "head"
        self._buffer = b""
        self._left = 0
        self._status = 0
        self._keep_alive = True
        self._events: EventParser | None = None
        self._plain: list[bytes] = []

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._round_trip_s = time.perf_counter() - self._begun_s
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        self._client.arrived(self, time.perf_counter(), data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client.lost(self, exc)

    def start(self, exchange: Exchange, request: bytes, on_done: OnDone, *, is_fresh: bool) -> None:
        assert self.exchange is None and self._transport is not None, "the connection is in use"
        self._reset()
        self.exchange, self._request, self._on_done, self._is_fresh = exchange, request, on_done, is_fresh
        self.written_s = time.perf_counter()
        if exchange.sent_s is None:
            exchange.sent_s = self.written_s
        self._transport.write(request)

    def abort(self, error: str, detail: str) -> None:
        if self.exchange is not None:
            self.exchange.fail(error, detail)
            self._finish(time.perf_counter(), is_reusable=False)
        if self._transport is not None:
            self._transport.abort()

    def on_lost(self, error: Exception | None) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        now_s = time.perf_counter()
        if self._state == "until_close" and error is None:
            self._finish(now_s, is_reusable=False)
            return
        if self._was_lost_at_once(now_s):
            assert self._on_done is not None
            self.exchange = None
            exchange.num_retries += 1
            self._client.send_fresh(exchange, self._request, self._on_done)
            return
        exchange.fail("disconnected", str(error or "the server closed the connection before the answer was complete"))
        self._finish(now_s, is_reusable=False)

    def _was_lost_at_once(self, now_s: float) -> bool:
        """Whether the server closed a kept connection while the request was on its way, and saw nothing of it."""
        is_silent = self._state == "head" and not self._buffer
        return not self._is_fresh and is_silent and now_s - self.written_s < LOST_AT_ONCE_S + self._round_trip_s

    def parse(self, at_s: float, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            # Bytes nobody asked for: the connection cannot be trusted any more.
            self.abort("", "")
            return
        exchange.num_bytes += len(data)
        try:
            self._parse(at_s, data)
        except ValueError as error:
            exchange.fail("bad_response", f"not HTTP/1.1: {error}")
            self._finish(at_s, is_reusable=False)

    def _parse(self, at_s: float, data: bytes) -> None:
        if self._state == "head":
            head, found, data = (self._buffer + data).partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return
            self._buffer = b""
            self._parse_head(head)
        if self._state == "chunked":
            self._parse_chunks(at_s, data)
        elif self._state == "length":
            self._on_body(at_s, data[: self._left])
            self._left -= len(data)
            if self._left <= 0:
                self._finish(at_s, is_reusable=self._left == 0)
        else:
            self._on_body(at_s, data)

    def _parse_head(self, head: bytes) -> None:
        status_line, *lines = head.split(b"\r\n")
        if not status_line.startswith(b"HTTP/1."):
            raise ValueError(f"it began {status_line[:40]!r}")
        self._status = int(status_line[9:12])
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (x.partition(b":") for x in lines)}
        if self._status in (429, 503) and self.exchange is not None:
            self.exchange.retry_after_s = _seconds(headers.get(b"retry-after"))
        self._keep_alive = headers.get(b"connection") != b"close" and not status_line.startswith(b"HTTP/1.0")
        if self._status == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            assert self.exchange is not None
            self._events = EventParser(self.exchange, self._client.read)
        if headers.get(b"transfer-encoding", b"").endswith(b"chunked"):
            self._state = "chunked"
        elif b"content-length" in headers:
            self._state, self._left = "length", int(headers[b"content-length"])
        else:
            self._state = "until_close"

    def _parse_chunks(self, at_s: float, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        position = 0
        body: list[bytes] = []
        while True:
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                break
            size = int(data[position:line_end].partition(b";")[0], 16)
            start, end = line_end + 2, line_end + 2 + size
            if size == 0:
                # Trailers are not asked for; what ends them must still be read off the connection.
                if data.find(b"\r\n", start) < 0:
                    break
                self._on_body(at_s, b"".join(body))
                self._finish(at_s, is_reusable=True)
                return
            if len(data) < end + 2:
                break
            body.append(data[start:end])
            position = end + 2
        self._buffer = data[position:]
        if body:
            self._on_body(at_s, body[0] if len(body) == 1 else b"".join(body))

    def _on_body(self, at_s: float, data: bytes) -> None:
        if self._events is not None:
            self._events.feed(at_s, data)
        elif data:
            self._plain.append(data)

    def _finish(self, at_s: float, *, is_reusable: bool) -> None:
        exchange, on_done = self.exchange, self._on_done
        assert exchange is not None and on_done is not None, "nothing to finish"
        if self._events is not None:
            self._events.close(at_s)
            if not exchange.is_complete and exchange.finish_reason is None:
                exchange.fail("incomplete", "the stream ended without a finish reason or [DONE]")
        elif self._status == 200:
            exchange.is_streamed = False
            self._client.read(exchange, at_s, b"".join(self._plain))
        elif self._status:
            exchange.fail(f"http_{self._status}", b"".join(self._plain).decode(errors="replace"))
        if not exchange.event_times:
            exchange.fail("no_tokens", "the answer held no tokens")
        exchange.end_s = at_s
        self.exchange = None
        if is_reusable and self._keep_alive and self.is_usable:
            self._client.release(self)
        elif self._transport is not None:
            self._transport.abort()
        on_done(exchange)


def _seconds(text: bytes | None) -> float | None:
    """Of a Retry-After; None where it is missing or a date."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
