"""The link between two processes of one machine: a Unix socket in a private folder.

A link lives as long as one engine process. The front end listens for one engine, the engine connects, and when either
end is gone, the other's `receive` raises EOFError after everything that had arrived. A new engine gets a new link. The
kernel closes a dead process's socket, so no heartbeat is needed to detect its death. (A peer that lives but makes no
progress is detected by `child_process`.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

from ..core.events import FromEngine, ToEngine
from ..core.ports import Clock
from .framing import Pipe
from .link import EngineLink, FrontLink

_RETRY_S = 0.02
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


class UnixFrontEnd:
    """The front end's end: listens at `address` (see `private_address`) until an engine has connected."""

    def __init__(self, address: str, clock: Clock) -> None:
        self._address = address
        self._pipe = Pipe()
        self._link = FrontLink(self._pipe, clock)
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
        self._link.close()

    async def send(self, message: ToEngine) -> None:
        """Raises EOFError when the engine is gone. Waits while nobody has connected."""
        self.open()
        await self._link.send(message)

    async def receive(self) -> FromEngine:
        self.open()
        return await self._link.receive()

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


class UnixEngineEnd:
    """The engine's end: connects to `address`, and gives up with EOFError when nobody listens there in time."""

    def __init__(self, address: str, clock: Clock, *, connect_timeout_s: float = 10.0) -> None:
        self._address = address
        self._pipe = Pipe()
        self._link = EngineLink(self._pipe, clock)
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
        self._link.close()

    async def send(self, message: FromEngine) -> None:
        """Raises EOFError when the front end is gone. Waits while it has fallen far behind."""
        self.open()
        await self._link.send(message)

    async def receive(self) -> ToEngine:
        self.open()
        return await self._link.receive()

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
