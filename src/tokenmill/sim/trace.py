"""What a simulated service tells whoever draws what happened: steps and transfers, with their virtual times."""

from __future__ import annotations

from typing import Protocol

from ..core.cost import Work


class Trace(Protocol):
    def step(self, worker: str, work: Work, begin_s: float, end_s: float) -> None:
        """A worker computes from begin_s to end_s; told when that is known, in the order of each worker's steps."""
        ...

    def carried(self, source: str, destination: str, num_bytes: int, begin_s: float, end_s: float) -> None:
        """KV has come from worker to worker."""
        ...
