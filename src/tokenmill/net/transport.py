"""The link between two processes of one machine: a Unix socket in a private folder, each message behind its length.

One link lives as long as one engine process: the front end listens for one engine, the engine connects, and when either
end is gone the other's `receive` raises EOFError, after all that had arrived. A new engine gets a new link. Peer death
is the kernel's news: it closes a dead process's socket, and no heartbeat is needed. (A peer that lives but does not
move is another matter: see `pulse`.)

    length, 4 bytes, lowest first | message | length | message | ...

The socket is driven by the event loop's reader callback, and a message is written at once by whoever sends it: one
system call each way, and no thread between. Queues are bounded: an end reads at most `_INBOX` messages ahead, and then
the socket's own buffer pushes back until the sender waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import cast

from ..core.ports import FromEngine, ToEngine
from .codec import decode, encode

_INBOX = 1024
_READ_BYTES = 1 << 16
_RETRY_S = 0.02
_LENGTH = 4
_MAX_PATH = 100


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """A path for a socket in a new folder that only this user can enter; the folder goes when the context ends."""
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="tokenmill-", dir=base if len(base) < _MAX_PATH - 40 else "/tmp")
    try:
        yield f"{folder}/link"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


class SocketFrontEnd:
    """The front end's end: listens at `address` (see `private_address`) until an engine has connected."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pipe = Pipe()
        self._listener: socket.socket | None = None
        self._is_open = False

    def open(self) -> None:
        """Listen, so that an engine can connect; needs a running loop. `send` and `receive` do it by themselves."""
        if not self._is_open:
            self._is_open = True
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self._address)
            self._listener.listen(1)
            self._listener.setblocking(False)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """What was sent arrives; the socket and its file go."""
        self._is_open = True
        self._stop_listening()
        self._pipe.end()

    async def send(self, message: ToEngine) -> None:
        """Raises EOFError when the engine is gone. Waits while nobody has connected."""
        self.open()
        await self._pipe.send(encode(message))

    async def receive(self) -> FromEngine:
        self.open()
        return cast(FromEngine, decode(await self._pipe.receive()))

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError):
            self._pipe.connect(self._listener.accept()[0])
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            _remove(self._address)


class SocketEngineEnd:
    """The engine's end: connects to `address`, and gives up with EOFError when nobody listens there in time."""

    def __init__(self, address: str, *, connect_timeout_s: float = 10.0) -> None:
        self._address = address
        self._pipe = Pipe()
        self._time_left_s = connect_timeout_s
        self._is_open = False

    def open(self) -> None:
        """Connect; needs a running loop. `send` and `receive` do it by themselves."""
        if not self._is_open:
            self._is_open = True
            self._try()

    def close(self) -> None:
        """What was sent arrives."""
        self._is_open = True
        self._time_left_s = 0.0
        self._pipe.end()

    async def send(self, message: FromEngine) -> None:
        """Raises EOFError when the front end is gone. Waits while it has fallen far behind."""
        self.open()
        await self._pipe.send(encode(message))

    async def receive(self) -> ToEngine:
        self.open()
        return cast(ToEngine, decode(await self._pipe.receive()))

    def _try(self) -> None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(self._address)
        except OSError:
            end.close()
            self._time_left_s -= _RETRY_S
            if self._time_left_s > 0:
                asyncio.get_running_loop().call_later(_RETRY_S, self._try)
            else:
                self._pipe.end()
        else:
            self._pipe.connect(end)


def _remove(address: str) -> None:
    """The socket's file, and its folder if that was all in it."""
    with contextlib.suppress(OSError):
        os.unlink(address)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(address))
