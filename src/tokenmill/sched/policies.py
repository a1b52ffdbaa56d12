"""Orders of service: pure functions from a sequence to its rank. A lower rank is served earlier and preempted later."""

from __future__ import annotations

from ..core.sequence import Sequence

Rank = tuple[int, int]


def rank(seq: Sequence) -> Rank:
    """By priority (lower first), then by arrival. Numbers are unique, so that no two ranks are equal."""
    return (seq.request.priority, seq.number)
