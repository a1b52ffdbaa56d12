"""One line on a terminal while a simulation is under way: how far virtual time has come, and how fast it passes."""

from __future__ import annotations

import time

from rich.console import Console

from ...bench.load.player import Progress
from ...bench.load.show import Status

PAUSE_S = 0.2


class Bar(Status):
    """Rewritten in place at most every PAUSE_S of real time."""

    def __init__(self, console: Console, num_requests: int) -> None:
        super().__init__(console, num_requests)
        self._shown_s = 0.0
        self._began_s = time.perf_counter()

    def expect(self, num_requests: int, label: str = "") -> None:
        """A further run begins."""
        self.label, self._num_requests, self._began_s = label, num_requests, time.perf_counter()

    def observe(self, progress: Progress) -> None:
        now_s = time.perf_counter()
        if self._live is None or now_s < self._shown_s + PAUSE_S:
            return
        self._shown_s = now_s
        text = line_of(progress, self._num_requests, now_s - self._began_s)
        self._show(self.label + text)


def line_of(progress: Progress, num_requests: int, took_s: float) -> str:
    """took_s: of real time since the run began."""
    per_s = 1.0 / max(1e-3, took_s)
    minutes, seconds = divmod(int(progress.elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    share = progress.num_ended / max(1, num_requests)
    return (
        f"simulated {hours}:{minutes:02}:{seconds:02}  {progress.num_ended:,}/{num_requests:,} requests ({share:.0%})"
        f"  {progress.num_in_flight:,} in flight  {progress.num_failed:,} failed"
        f"  {(progress.num_tokens + progress.num_ended) * per_s:,.0f} events/s  {progress.elapsed_s * per_s:,.1f}x"
    )
