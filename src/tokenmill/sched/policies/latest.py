"""Preempts the most junior sequence: of the lowest priority the last to arrive, as in vLLM. It usually loses the least
work, and sequences that came first end first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.policy import Running


@dataclass(frozen=True, slots=True)
class Latest:
    def victim(self, running: Sequence[Running], asking: int) -> int:
        return len(running) - 1
