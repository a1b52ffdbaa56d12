"""Which of several upstreams of one model gets a call: who has much of its prompt, and few calls open. Pure.

    score = share of the prompt that is cached there - (calls open there - mean) / max(1, mean)

among those that may be asked (vLLM's production stack weighs so). Where nobody has anything, the one with fewest calls
open wins.
"""

from __future__ import annotations

from collections.abc import Sequence


def best(num_open: Sequence[int], num_calls: Sequence[int], shares: Sequence[float]) -> int | None:
    """The place of the one that is to be asked; None where there is none. num_open, num_calls: of each, open now and
    given ever; shares: of the prompt that is cached there, 0 to 1."""
    if not num_open:
        return None
    mean = sum(num_open) / len(num_open)

    def worth(place: int) -> tuple[float, int, int, int]:
        score = shares[place] - (num_open[place] - mean) / max(1.0, mean)
        return -score, num_open[place], num_calls[place], place

    return min(range(len(num_open)), key=worth)
