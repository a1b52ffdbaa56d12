"""Messages as frames on a stream of bytes, whatever carries it: a Unix socket, TCP, TLS over TCP.

    length, 4 bytes, lowest first | message | length | message | ...

The socket is driven by the event loop's reader callback, and a message is written at once by whoever sends it: one
system call each way, and no thread between. Queues are bounded: an end reads at most `_INBOX` messages ahead, and then
the socket's own buffer pushes back until the sender waits.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque

_LENGTH = 4
_INBOX = 1024
_READ_BYTES = 1 << 16


class Pipe:
    """What both ends share, once they are connected and before: bytes in, bytes out, and the news that the peer has
    gone. One reader at a time."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._received = bytearray()  # the beginning of a message
        self._inbox: deque[bytes] = deque()
        self._is_reading = False
        self._is_gone = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._turn = asyncio.Lock()

    def connect(self, end: socket.socket) -> None:
        """From now on bytes go through `end`; needs a running loop."""
        if self._is_gone:
            return end.close()
        end.setblocking(False)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._watch()
        self._wake()

    def end(self) -> None:
        """No further byte goes either way."""
        self._is_gone = True
        if self._socket is not None:
            self._watch()
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        self._wake()

    async def send(self, data: bytes, more: bytes = b"") -> None:
        """One message, of `data` and then `more`, which is not copied. Raises EOFError when the peer is gone. Waits
        while nobody has connected, or reads."""
        async with self._turn:
            whole = (len(data) + len(more)).to_bytes(_LENGTH, "little") + data
            left, rest = memoryview(whole), memoryview(more)
            try:
                while left or rest:
                    if not left:
                        left, rest = rest, left
                    if self._is_gone:
                        raise EOFError("The other end of the link is gone.")
                    if self._socket is None:
                        await self._change()
                        continue
                    try:
                        left = left[self._socket.send(left) :]
                    except BlockingIOError:
                        self._loop.add_writer(self._socket, self._writable)
                        await self._change()
                    except OSError as error:  # what the peer sent before it went can still be received
                        raise EOFError("The other end of the link is gone.") from error
            except asyncio.CancelledError:
                if len(left) < len(whole) or len(rest) < len(more):  # half a message would garble all that follow
                    self.end()
                raise

    async def receive(self) -> bytes:
        """Raises EOFError once the peer is gone and everything that had arrived is taken."""
        while not self._inbox:
            if self._is_gone:
                raise EOFError("The other end of the link is gone.")
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
        assert self._socket is not None
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self.end()
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH:
            end = begin + _LENGTH + int.from_bytes(received[begin : begin + _LENGTH], "little")
            if len(received) < end:
                break
            self._inbox.append(bytes(received[begin + _LENGTH : end]))
            begin = end
        del received[:begin]
        self._watch()
        if self._inbox:
            self._wake()

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
