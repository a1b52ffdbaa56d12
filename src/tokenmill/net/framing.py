"""Messages as frames on a stream of bytes: a Unix socket, TCP, or TLS over TCP.

    length, 4 bytes, lowest first | message | length | message | ...

The event loop's reader callback reads the socket, and the sender of a message writes it at once: one system call each
way, without another thread. Queues are bounded: an end reads at most `_INBOX` messages ahead; then the socket's buffer
fills, and the sender waits.

An empty message is a keepalive (see `keepalive`) and is not delivered.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque

_LENGTH = 4
_INBOX = 1024
_READ_BYTES = 1 << 16
"""More than a TLS record, so that a read leaves nothing in the TLS library, where no selector would see it."""

_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_GONE = "The other end of the link is gone."


class Pipe:
    """What both ends share, once they are connected and before: bytes in, bytes out, and the news that the peer has
    gone. One reader at a time.

    max_bytes   longest message taken; a longer one ends the pipe before it is stored
    why_ended   a sentence
    """

    def __init__(self, max_bytes: int = 256**_LENGTH - 1) -> None:
        self.max_bytes = max_bytes
        self.why_ended = ""
        self._socket: socket.socket | None = None
        self._received = bytearray()  # the beginning of a message
        self._inbox: deque[bytes] = deque()
        self._is_reading = False
        self._is_gone = False
        self._has_heard = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    def connect(self, end: socket.socket) -> None:
        """From now on bytes go through `end`; needs a running loop."""
        if self._is_gone:
            return end.close()
        end.setblocking(False)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._watch()
        self._wake()

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    @property
    def is_sending(self) -> bool:
        return self._turn.locked()

    def take_heard(self) -> bool:
        """Whether anything has come since the last call, or cannot come, because what came before is not taken."""
        heard, self._has_heard = self._has_heard, False
        return heard or not self._is_reading

    def end(self, why: str = _GONE) -> None:
        """No further byte goes either way."""
        self._is_gone = True
        self.why_ended = self.why_ended or why
        self._ended.set()
        if self._socket is not None:
            self._watch()
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        self._wake()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def send(self, data: bytes, more: bytes = b"") -> None:
        """One message, of `data` and then `more`, which is not copied. Raises EOFError when the peer is gone. Waits
        while nobody has connected, or reads."""
        async with self._turn:
            whole = (len(data) + len(more)).to_bytes(_LENGTH, "little") + data
            left, rest = memoryview(whole), memoryview(more)
            is_begun = False
            try:
                while left or rest:
                    if not left:
                        left, rest = rest, left
                    if self._is_gone:
                        raise EOFError(self.why_ended)
                    if self._socket is None:
                        await self._change()
                        continue
                    try:
                        left = left[self._socket.send(left) :]
                        is_begun = True
                    except _BLOCKED as error:
                        is_begun |= isinstance(error, ssl.SSLError)  # TLS may have begun a record of it
                        self._loop.add_writer(self._socket, self._writable)
                        await self._change()
                    except OSError as error:  # what the peer sent before it went can still be received
                        raise EOFError(_GONE) from error
            except asyncio.CancelledError:
                if is_begun and (left or rest):  # half a message would garble all that follow
                    self.end()
                raise

    async def receive(self) -> bytes:
        """Raises EOFError once the peer is gone and everything that had arrived is taken."""
        while not self._inbox:
            if self._is_gone:
                raise EOFError(self.why_ended)
            await self._change()
        data = self._inbox.popleft()
        self._watch()
        return data

    def _watch(self) -> None:
        """Read on where there is room; else leave to the socket what comes."""
        wants = not self._is_gone and len(self._inbox) < _INBOX
        if self._socket is not None and wants != self._is_reading:
            self._is_reading = wants
            if wants:
                self._loop.add_reader(self._socket, self._read)
            else:
                self._loop.remove_reader(self._socket)

    def _read(self) -> None:
        """Until nothing is left: uvloop calls once, and not again, where the peer has broken the connection off."""
        while self._is_reading and (data := self._take_bytes()):
            self._has_heard = True
            self._cut(data)
            self._watch()
        if self._inbox:
            self._wake()

    def _take_bytes(self) -> bytes:
        """What has come; nothing: there is no more now. Ends the pipe at the end."""
        assert self._socket is not None
        try:
            data = self._socket.recv(_READ_BYTES)
        except _BLOCKED:
            return b""
        except ssl.SSLError as error:
            self.end(f"TLS failed: {error.reason or error}.")
            return b""
        except OSError:
            data = b""
        if not data:
            self.end()
        return data

    def _cut(self, data: bytes) -> None:
        """Messages into the inbox; the beginning of one stays."""
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH:
            size = int.from_bytes(received[begin : begin + _LENGTH], "little")
            if size > self.max_bytes:
                self.end(f"A message of {size} bytes was announced; at most {self.max_bytes} are taken.")
                break
            end = begin + _LENGTH + size
            if len(received) < end:
                break
            if size:
                self._inbox.append(bytes(received[begin + _LENGTH : end]))
            begin = end
        del received[:begin]

    def _writable(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket)
        self._wake()

    async def _change(self) -> None:
        """Wait until something has happened that a sender or the reader may be waiting for."""
        change = asyncio.get_running_loop().create_future()
        self._waiting.add(change)
        try:
            await change
        finally:
            self._waiting.discard(change)

    def _wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)
