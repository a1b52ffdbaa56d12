"""The two orders of sequences. Numbers are unique, so that no two are equal in either.

rank       who is served next: by priority, then as the order of service says (`due`), then by arrival
seniority  who keeps its blocks: by priority, then by arrival
"""

from __future__ import annotations

from ..core.sequence import Sequence

Rank = tuple[int, float, int]


def rank(seq: Sequence) -> Rank:
    return (seq.request.priority, seq.due, seq.number)


def seniority(seq: Sequence) -> tuple[int, int]:
    return (seq.request.priority, seq.number)
