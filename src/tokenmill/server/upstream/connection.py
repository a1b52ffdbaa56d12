"""Where an upstream is, and HTTP/1.1 to it, who is not trusted: one call at a time over a connection, each part
bounded.

httptools (llhttp) parses. Read from the socket is only what is asked for, so a slow reader holds the other end up.
Heads are bounded in bytes, and so is what comes between two pieces of a body (lengths of chunks, their extensions,
trailers): no read goes on for ever without a piece of the body. No redirects, cookies, compression or HTTP/2.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

_VERSION = "/v1"


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """base: the path in front of /v1, without a slash at its end."""

    host: str
    port: int
    base: str = ""
    is_tls: bool = False

    @classmethod
    def of(cls, url: str) -> UpstreamAddress:
        """http://HOST[:PORT][/PATH], with or without /v1 at its end. Raises ValueError."""
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")  # as the look-up of the name does
        except ValueError:
            raise ValueError(f"must be the URL of a server, got {url!r}.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
            raise ValueError(f"must be an http:// or https:// URL, got {url!r}.")
        if parts.username is not None or parts.query or parts.fragment or " " in url:
            raise ValueError("must be a URL without user, query and fragment; keys go into --upstream-api-key-file.")
        is_tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix(_VERSION).rstrip("/")
        return cls(parts.hostname, port or (443 if is_tls else 80), base, is_tls)

    @property
    def authority(self) -> str:
        """As a Host header has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}{self.base}"

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if self.is_tls else None


MAX_HEAD_BYTES = 64 * 1024
MAX_EMPTY_BYTES = 64 * 1024
"""That are read with no piece of the body among them."""

_READ_BYTES = 64 * 1024
_MAX_INTERIM = 8


class BadReply(Exception):
    """What came is no whole HTTP/1.1 answer, or it did not come in time. is_kept: the connection had been used before
    and ended before any byte of the answer came, as servers end those that were idle."""

    def __init__(self, message: str, *, is_kept: bool = False) -> None:
        super().__init__(message)
        self.is_kept = is_kept


class UpstreamConnection:
    """`send` a call, read its `head`, then its `body` to the end; then it `is_reusable`, or is to be closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._num_calls = 0
        self._begin()

    @classmethod
    async def open(cls, address: UpstreamAddress, tls: ssl.SSLContext | None, timeout_s: float) -> UpstreamConnection:
        """Raises BadReply."""
        try:
            async with asyncio.timeout(timeout_s):
                opened = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=_READ_BYTES)
        except TimeoutError:
            raise BadReply(f"no connection within {timeout_s:g} s") from None
        except OSError as error:
            raise BadReply(f"no connection: {error.strerror or error}") from None
        return cls(*opened)

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.status = 0
        self._num_bytes = 0
        self._pieces: list[bytes] = []
        self._has_head = self._is_complete = self._is_bounded = self._is_kept_open = self._is_spoiled = False

    # ---- callbacks of the parser ----

    def on_message_begin(self) -> None:
        self._is_spoiled = self._is_complete  # an answer to nothing

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else they are trailers
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._has_head = True
            names = self.headers
            self._is_bounded = "content-length" in names or "chunked" in names.get("transfer-encoding", "").lower()
        else:
            self.headers = {}

    def on_body(self, data: bytes) -> None:
        if not self._is_complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_complete:
            self._is_complete = True
            self._is_kept_open = self._parser.should_keep_alive()

    # ---- a call ----

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes, timeout_s: float) -> None:
        """Raises BadReply."""
        self._begin()
        self._num_calls += 1
        if self._writer.is_closing():
            raise BadReply("the connection broke", is_kept=self._num_calls > 1)
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        try:
            self._writer.write("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body)
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
        except TimeoutError:
            raise BadReply(f"it took none of the call for {timeout_s:g} s") from None
        except OSError as error:
            raise BadReply(f"the connection broke: {error.strerror or error}", is_kept=self._num_calls > 1) from None

    async def head(self, timeout_s: float) -> int:
        """The status. `headers` has the fields then, names in lower case. Raises BadReply."""
        num_interim = 0
        while not self._has_head:
            data = await self._read(timeout_s)
            if not data:
                raise BadReply("it closed the connection without an answer", is_kept=self._was_given_up)
            self._feed(data)
            if not self._has_head:
                if 100 <= self.status < 200:
                    num_interim += 1
                if self._num_bytes > MAX_HEAD_BYTES or num_interim > _MAX_INTERIM:
                    raise BadReply("the head of its answer does not end")
        if self.status == 408 and self._num_calls > 1:  # as some say when they end an idle connection
            raise BadReply("it ended the connection", is_kept=True)
        return self.status

    async def body(self, timeout_s: float) -> AsyncIterator[bytes]:
        """Pieces as they come, none of them empty. `timeout_s`: the longest silence. Raises BadReply, also where the
        answer ends before its length."""
        num_empty = 0
        while True:
            if self._pieces:
                num_empty = 0
                data = b"".join(self._pieces)
                self._pieces.clear()
                yield data
            if self._is_complete:
                return
            data = await self._read(timeout_s)
            if not data:
                if self._is_bounded:
                    raise BadReply("it closed the connection before its answer was complete")
                self._is_complete = True
                return
            num_empty += len(data)
            self._feed(data)
            if not self._pieces and num_empty > MAX_EMPTY_BYTES:
                raise BadReply("its answer goes on without a body")

    @property
    def is_reusable(self) -> bool:
        is_over = self._is_complete and self._is_bounded and not self._pieces and not self._writer.is_closing()
        return is_over and self._is_kept_open and not self._is_spoiled and not self._reader.at_eof()

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.transport.abort()

    @property
    def _was_given_up(self) -> bool:
        return self._num_calls > 1 and not self._num_bytes

    async def _read(self, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._reader.read(_READ_BYTES)
        except TimeoutError:
            raise BadReply(f"it was silent for {timeout_s:g} s") from None
        except OSError as error:
            raise BadReply(f"the connection broke: {error.strerror or error}", is_kept=self._was_given_up) from None
        self._num_bytes += len(data)
        return data

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise BadReply("it changed the protocol") from None
        except httptools.HttpParserError as error:
            if not self._is_complete:  # what comes behind an answer spoils the connection, not the answer
                raise BadReply(f"it does not speak HTTP/1.1: {str(error)[:100]}") from None
            self._is_spoiled = True
