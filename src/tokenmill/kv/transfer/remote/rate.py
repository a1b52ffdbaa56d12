"""What loading from a tier takes, as measured: what engines decide by whether they fetch or compute."""

from __future__ import annotations

_NEW = 0.2
_LEAST_BYTES = 256 * 1024


class Rate:
    """Averages in which what is new counts a fifth.

    latency_s  that a call takes as such; 0: not measured yet
    bytes_s    after that
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.bytes_s = 0.0

    def note_latency(self, seconds: float) -> None:
        self.latency_s = _mix(self.latency_s, seconds)

    def note_bytes(self, num_bytes: int, seconds: float) -> None:
        """Of a load; small ones tell of latency alone."""
        if num_bytes >= _LEAST_BYTES:
            self.bytes_s = _mix(self.bytes_s, num_bytes / max(seconds - self.latency_s, 1e-6, 0.1 * seconds))


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else (1 - _NEW) * old + _NEW * new
