"""First come, first served: the order of arrival, whatever the request. It treats calls alike and its waits are the
most even, but a short prompt waits for all long ones before it. The default of vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.policy import Waiting


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    summary: str = "first to come"
    num_refreshed: int = 0
    patience: int = 0

    def due(self, waiting: Waiting) -> int:
        """As it arrived: those that came while no step was planned are served by number."""
        return waiting.arrived
