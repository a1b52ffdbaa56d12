"""The clock of work: "now" as a count of computed tokens instead of seconds.

It needs no measurement, means the same on every machine, and is the same in a replay. The engine orders its queue by
it, and the front end predicts that order.
"""

from __future__ import annotations

PATIENCE = 64
"""A prompt lets shorter ones pass that arrive while so many times its own work is done."""


def due(work_done: int, num_tokens: int, patience: int = PATIENCE) -> int:
    """When a prompt of which `num_tokens` are to be computed should be served, on the clock that showed `work_done`
    as it arrived. One that is shorter by d tokens goes first unless it comes `patience` * d units of work later."""
    return work_done + patience * num_tokens


_LEAD_S = 0.006
_LEAD_SHARE = 0.25
_LEAD_MOST_S = 0.015


def lead_s(step_s: float) -> float:
    """How long before the end of a step that takes so long the next one is planned, at the latest, where requests come
    and go: what arrives later waits for the end of that one too."""
    return max(min(_LEAD_SHARE * step_s, _LEAD_MOST_S), min(_LEAD_S, step_s / 2))


def step_work(num_tokens: int, max_num_batched_tokens: int) -> int:
    """By how much a step moves that clock: its tokens, and for the step itself as much as an eighth of a full one, so
    that waiting counts where seats or blocks are what is waited for, too."""
    return num_tokens + max_num_batched_tokens // 8
