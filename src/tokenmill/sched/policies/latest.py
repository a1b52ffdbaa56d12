"""The most junior sequence gives way: of the lowest priority the last to arrive, as in vLLM. It has, as a rule, the
least to lose, and whoever came first ends first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.policy import Running


@dataclass(frozen=True, slots=True)
class Latest:
    def victim(self, running: Sequence[Running], asking: int) -> int:
        return len(running) - 1
