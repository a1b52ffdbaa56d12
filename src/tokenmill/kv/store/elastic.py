"""How much memory a KV store may take now: all that it was given, unless the machine is short of memory. Then it gives
memory up at once, and takes it again piece by piece after some quiet."""

from __future__ import annotations

from ...node.machine import MemoryState
from ...node.pressure import Pressure

QUIET_S = 30.0
PIECES = 16


class Elastic:
    """most_bytes, least_bytes: of the store. `available_bytes`: when it started. num_bytes: that it may take."""

    def __init__(self, most_bytes: int, least_bytes: int, available_bytes: int) -> None:
        self.num_bytes = most_bytes
        self.num_shrunk = self.num_grown = 0
        self._most_bytes = most_bytes
        self._least_bytes = min(least_bytes, most_bytes)
        self._pressure = Pressure(available_bytes)
        self._restless_s = 0.0

    def look(self, state: MemoryState, taken_bytes: int, now: float) -> int:
        """What the store may take from now on. taken_bytes: what it takes."""
        verdict = self._pressure.look(state, now)
        piece = -(-self._most_bytes // PIECES)
        if not verdict.is_quiet:
            self._restless_s = now
        if verdict.is_short:
            less = min(self.num_bytes, taken_bytes) - max(verdict.lacking_bytes, piece)
            less = max(less, self._least_bytes)
            self.num_shrunk += less < self.num_bytes
            self.num_bytes = min(less, self.num_bytes)
        elif self.num_bytes < self._most_bytes and now - self._restless_s >= QUIET_S:
            self.num_bytes = min(self.num_bytes + piece, self._most_bytes)
            self.num_grown += 1
        return self.num_bytes
