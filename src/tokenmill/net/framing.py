"""Messages as frames on a stream of bytes: a Unix socket, TCP, or TLS over TCP.

    length, 4 bytes, lowest first | message | length | message | ...

Once the ends of a network link have authenticated each other (`protect`), a tag follows each length and each message
(`core.mac`). A wrong tag ends the pipe; the length has one of its own, so that a wrong length is never waited for.

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

from ..core.mac import MAC, TAG_BYTES, TAMPERED

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
        self._sending: MAC | None = None
        self._receiving: MAC | None = None
        self._tag_bytes = 0  # after each piece that comes
        self._received = bytearray()  # the beginning of a piece
        self._due = _LENGTH  # bytes of the piece that comes next: a length, and then its message
        self._is_message_due = False
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

    def protect(self, sending: MAC, receiving: MAC) -> None:
        """From now on both ends tag what they send. What has come without a tag and was not taken is from neither."""
        if self._inbox or self._received:
            self._inbox.clear()
            return self.end(TAMPERED)
        self._sending, self._receiving, self._tag_bytes = sending, receiving, TAG_BYTES

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
            number = 0 if self._sending is None else self._sending.number
            to_send = self._framed(data, more)
            left, is_begun = to_send.popleft(), False
            try:
                while left or to_send:
                    if not left:
                        left = to_send.popleft()
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
                if is_begun and (left or to_send):  # half a message would garble all that follow
                    self.end()
                elif not is_begun and self._sending is not None:
                    self._sending.number = number
                raise

    def _framed(self, data: bytes, more: bytes) -> deque[memoryview]:
        length = (len(data) + len(more)).to_bytes(_LENGTH, "little")
        if self._sending is None:
            head, tail = length + data, b""
        else:
            head = length + self._sending.tag(length) + data
            tail = self._sending.tag(data, more)
        parts = [head, more, tail] if more else [head + tail]
        return deque(memoryview(part) for part in parts if part)  # to send nothing to who has read all and gone fails

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
        """Messages into the inbox; the beginning of a piece stays."""
        received = self._received
        received += data
        begin = 0
        while not self._is_gone and len(received) - begin >= self._due + self._tag_bytes:
            end = begin + self._due
            piece = bytes(received[begin:end])
            begin = end + self._tag_bytes
            if self._receiving is not None and not self._receiving.accepts(received[end:begin], piece):
                self.end(TAMPERED)
            else:
                self._take(piece)
        del received[:begin]

    def _take(self, piece: bytes) -> None:
        """A length, or the message that it announced."""
        self._is_message_due = not self._is_message_due
        if not self._is_message_due:
            self._due = _LENGTH
            if piece:
                self._inbox.append(piece)
            return
        self._due = int.from_bytes(piece, "little")
        if self._due > self.max_bytes:
            self.end(f"A message of {self._due} bytes was announced; at most {self.max_bytes} are taken.")

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
