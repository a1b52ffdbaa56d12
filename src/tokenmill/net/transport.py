"""The link between two processes of one machine: a ZeroMQ PAIR socket on a Unix socket in a private folder.

One link lives as long as one engine process: the front end binds, the engine connects, and when either end is gone the
other's `receive` raises EOFError, after all that had arrived. A new engine gets a new link. Peer death is the kernel's
news: it closes a dead process's socket, ZeroMQ's monitor says so, and no heartbeat is needed. (A peer that lives but
does not move is another matter: `/health` watches the steps.)

The sockets are driven from the event loop's reader callback rather than through zmq.asyncio, which costs a future and
a poll for every message. ZeroMQ's descriptor is edge-triggered: it must be drained, and looked at again after every
send; `_pump` does both. Queues are bounded: an end reads at most `_INBOX` messages ahead and then ZeroMQ's own high
water marks push back until the sender waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..core.ports import FromEngine, ToEngine
from .codec import decode, encode

_HIGH_WATER = 1024
_INBOX = 256
_LINGER_MS = 500
_MAX_PATH = 100


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """An ipc:// address in a new folder that only this user can enter; the folder goes when the context ends."""
    base = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="tokenmill-", dir=base if len(base) < _MAX_PATH - 40 else "/tmp")
    try:
        yield f"ipc://{folder}/link"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _option(socket: zmq.Socket[bytes], option: int) -> int:
    return cast(int, socket.get(option))


class _Pipe:
    """What both ends share: bytes in, bytes out, and the news that the peer has gone. One reader at a time."""

    def __init__(self, address: str, *, binds: bool, connect_timeout_s: float) -> None:
        assert address.startswith("ipc://"), address
        self._address = address
        self._binds = binds
        self._connect_timeout_s = connect_timeout_s
        self._inbox: deque[bytes] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._connected = False
        self._gone = False
        self._open = False

    def open(self) -> None:
        """Bind or connect; needs a running loop. `send` and `receive` do it by themselves."""
        if self._open or self._gone:
            return
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, _HIGH_WATER)
        self._socket.set(zmq.RCVHWM, _HIGH_WATER)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._fds = (_option(self._socket, zmq.FD), _option(self._monitor, zmq.FD))
        self._loop.add_reader(self._fds[0], self._pump)
        self._loop.add_reader(self._fds[1], self._read_monitor)
        if self._binds:
            self._socket.bind(self._address)
        else:
            self._socket.connect(self._address)
            self._deadline = self._loop.call_later(self._connect_timeout_s, self._give_up)
        # Both descriptors are edge-triggered: what happened before the readers were added is looked at now.
        self._loop.call_soon(self._read_monitor)

    def close(self) -> None:
        """Send what is queued (for at most half a second), free the socket and remove its file."""
        self._gone = True
        self._wake()
        if not self._open:
            return
        self._open = False
        for fd in self._fds:
            self._loop.remove_reader(fd)
        if not self._binds:
            self._deadline.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._context.term()
        path = self._address.removeprefix("ipc://")
        # The binding end usually removes its file; after a kill -9 the other end does.
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))

    async def send(self, data: bytes) -> None:
        self.open()
        while not self._gone:
            try:
                self._socket.send(data, zmq.NOBLOCK)
            except zmq.Again:
                self._writable = self._loop.create_future()
                self._pump()
                await self._writable
            else:
                self._pump()
                return
        raise EOFError("The other end of the link is gone.")

    async def receive(self) -> bytes:
        self.open()
        while True:
            data = self.receive_nowait()
            if data is not None:
                return data
            assert self._arrived is None, "two readers on one link"
            self._arrived = self._loop.create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None

    def receive_nowait(self) -> bytes | None:
        """Raises EOFError once the peer is gone and everything that had arrived is taken."""
        self.open()
        if not self._inbox:
            self._pump()
        if self._inbox:
            return self._inbox.popleft()
        if self._gone:
            raise EOFError("The other end of the link is gone.")
        return None

    def _pump(self) -> None:
        """Move what has arrived into the inbox, and wake whom it concerns."""
        if not self._open:
            return
        events = _option(self._socket, zmq.EVENTS)
        while events & zmq.POLLIN and len(self._inbox) < _INBOX:
            self._inbox.append(self._socket.recv(zmq.NOBLOCK))
            events = _option(self._socket, zmq.EVENTS)
        if self._inbox and self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if events & zmq.POLLOUT and self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    def _read_monitor(self) -> None:
        while self._open and _option(self._monitor, zmq.EVENTS) & zmq.POLLIN:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._pump()
            elif self._connected:
                self._pump()
                self._gone = True
                self._wake()

    def _give_up(self) -> None:
        if not self._connected:
            self._gone = True
            self._wake()

    def _wake(self) -> None:
        for waiter in (self._arrived, self._writable):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


class ZmqFrontEnd:
    """The front end's end: binds `address` (see `private_address`)."""

    def __init__(self, address: str) -> None:
        self._pipe = _Pipe(address, binds=True, connect_timeout_s=0.0)

    def open(self) -> None:
        """Bind, so that an engine can connect; needs a running loop. `send` and `receive` do it by themselves."""
        self._pipe.open()

    def close(self) -> None:
        self._pipe.close()

    async def send(self, message: ToEngine) -> None:
        """Raises EOFError when the engine is gone. Waits while nobody has connected."""
        await self._pipe.send(encode(message))

    async def receive(self) -> FromEngine:
        return cast(FromEngine, decode(await self._pipe.receive()))


class ZmqEngineEnd:
    """The engine's end: connects to `address`, and gives up with EOFError when nobody is there in time."""

    def __init__(self, address: str, *, connect_timeout_s: float = 10.0) -> None:
        self._pipe = _Pipe(address, binds=False, connect_timeout_s=connect_timeout_s)

    def open(self) -> None:
        """Connect; needs a running loop. `send` and `receive` do it by themselves."""
        self._pipe.open()

    def close(self) -> None:
        self._pipe.close()

    async def send(self, message: FromEngine) -> None:
        """Raises EOFError when the front end is gone. Waits while it has fallen far behind."""
        await self._pipe.send(encode(message))

    async def receive(self) -> ToEngine:
        return cast(ToEngine, decode(await self._pipe.receive()))

    def receive_nowait(self) -> ToEngine | None:
        data = self._pipe.receive_nowait()
        return None if data is None else cast(ToEngine, decode(data))
