"""Orders of service: pure functions from a sequence to its rank. A lower rank comes first.

    rank       who is served next: by priority, then by `due`, so that short prompts pass long ones and none waits for
               ever
    seniority  who keeps its blocks: by priority, then by arrival. The last one is preempted first

Both are fixed when a sequence arrives and depend on arrival and token counts alone: "now" is a count of work
(core.work), not of seconds.
"""

from __future__ import annotations

from ..core.sequence import Sequence

Rank = tuple[int, int, int]


def rank(seq: Sequence) -> Rank:
    """Numbers are unique, so that no two ranks are equal."""
    return (seq.request.priority, seq.due, seq.number)


def seniority(seq: Sequence) -> tuple[int, int]:
    return (seq.request.priority, seq.number)
