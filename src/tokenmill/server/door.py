"""What the connections of one server share: places, the pot of memory for heads, and the time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol

from ..core.masking import Mask
from .bounds import HttpBounds
from .peers import Peers

_MANY = 64
_MAX_TICK_S = 1.0
_TICKS = 8  # of the shortest bound


class Checked(Protocol):
    """A connection, as the door knows it."""

    def give_way(self) -> None: ...

    def check(self, now: float) -> None: ...


class Door:
    """Make it inside a running loop; `open` starts the clock that `close` stops. mask: of what the access log shows.

    note_refused  called with the status of a request that was refused before the application saw it
    on_shrunk     called when far fewer connections are left than there were: memory may be given back
    """

    def __init__(
        self,
        bounds: HttpBounds,
        mask: Mask,
        *,
        root_path: str = "",
        tls: ssl.SSLContext | None = None,
        note_refused: Callable[[int], None] = lambda status: None,
        on_shrunk: Callable[[], None] = lambda: None,
    ) -> None:
        self.bounds = bounds
        self.mask = mask
        self.root_path = root_path
        self.tls = tls
        self.peers = Peers(bounds.max_connections, bounds.max_heads_bytes)
        self.note_refused = note_refused
        self._on_shrunk = on_shrunk
        self._num_peak = 0
        self._connections: dict[Checked, None] = {}
        times = (bounds.head_s, bounds.idle_s, bounds.body_s, bounds.write_s, bounds.linger_s)
        self._tick_s = min(_MAX_TICK_S, min(times) / _TICKS)
        self._timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._tick()

    def close(self) -> None:
        """Stop the clock, and end what is open."""
        for connection in list(self._connections):
            connection.give_way()
        if self._timer is not None:
            self._timer.cancel()

    def enter(self, connection: Checked, address: str) -> bool:
        """A new connection. False: there is no place for it."""
        if not self.peers.enter(address):
            return False
        self.peers.waits(address, connection)
        self._connections[connection] = None
        self._num_peak = max(self._num_peak, len(self._connections))
        return True

    def leave(self, connection: Checked, address: str) -> None:
        self.peers.leave(address, connection)
        del self._connections[connection]

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections):
            connection.check(now)
        if self._num_peak >= _MANY and len(self._connections) <= self._num_peak // 2:
            self._num_peak = len(self._connections)
            self._on_shrunk()
        self._timer = loop.call_later(self._tick_s, self._tick)
