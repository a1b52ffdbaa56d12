"""Orders of service: pure functions from a sequence to its rank. A lower rank comes first.

    rank       who is served next: by priority, then by `due`, so that short prompts pass long ones and none waits for
               ever
    seniority  who keeps its blocks: by priority, then by arrival. The last one is preempted first

Both are fixed when a sequence arrives and depend on arrival and token counts alone. "Now" is a count of work, not of
seconds: it needs no measurement, means the same on every machine, and a replay sees it too.
"""

from __future__ import annotations

from ..core.sequence import Sequence

Rank = tuple[int, int, int]

PATIENCE = 64
"""A prompt lets shorter ones pass that arrive while so many times its own work is done."""


def due(work_done: int, num_tokens: int) -> int:
    """When a prompt of which `num_tokens` are to be computed should be served, on the clock that showed `work_done`
    as it arrived. One that is shorter by d tokens goes first unless it comes PATIENCE * d units of work later."""
    return work_done + PATIENCE * num_tokens


def step_work(num_tokens: int, max_num_batched_tokens: int) -> int:
    """By how much a step moves that clock: its tokens, and for the step itself as much as an eighth of a full one, so
    that waiting counts where seats or blocks are what is waited for, too."""
    return num_tokens + max_num_batched_tokens // 8


def rank(seq: Sequence) -> Rank:
    """Numbers are unique, so that no two ranks are equal."""
    return (seq.request.priority, seq.due, seq.number)


def seniority(seq: Sequence) -> tuple[int, int]:
    return (seq.request.priority, seq.number)
