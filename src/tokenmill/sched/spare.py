"""What idle work may have of a step. Pure.

    alone   nobody else is there: steps are sized to STEP_S, since whoever comes waits for those in flight
    beside  others draw: idle rows are added while the step stays within the targets of all of them, or, where some have
            none, while it takes at most SHARE longer on average

Rows of idle work come in turn, those first that had none for longest.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from ..core.cost import Costs, Work
from ..core.sequence import Sequence
from .fitting import decode_work, num_wanted, rows_within, tokens_within
from .policies import pace

STEP_S = 0.02
"""A step of idle work takes so long, and one of others no longer for its sake."""

UNMEASURED_CHUNK = 256
"""Prompt tokens in a step of idle work as long as nothing is known of what steps cost."""

SHARE = 0.1
EVERY = 4
"""One in so many steps of others has idle rows, and then as many as these steps may have together: larger chunks cost
less."""
SURE = 16
"""One in so many steps has an idle row in any case, or a block of an idle prompt."""
BLOCK = 16


class Clocked(Protocol):
    """What is asked of the ledger (`ledger.Ledger`)."""

    @property
    def step_number(self) -> int: ...

    @property
    def costs(self) -> Costs: ...

    def begins_s(self) -> float: ...


class Filling(NamedTuple):
    """drawing     idle sequences that get a row of one token
    prefilling  those of which prompts get up to `num_tokens` together
    may_admit   whether a waiting one may begin in what they leave
    """

    drawing: List[Sequence] = ()
    prefilling: List[Sequence] = ()
    num_tokens: int = 0
    may_admit: bool = False


NOTHING = Filling()


def alone(running: list[Sequence], budget: int, costs: Costs) -> tuple[list[Sequence], int]:
    """(who of the running gets a row, tokens of the step) while there is only idle work. `budget`: of any step."""
    drawing = [seq for seq in running if num_wanted(seq) == 1]
    if not costs.is_known:
        return running, min(budget, UNMEASURED_CHUNK + len(drawing))
    start = max((seq.num_planned for seq in running if num_wanted(seq) > 1), default=0)
    work = decode_work(drawing)
    if drawing and costs.predict(work) > STEP_S:
        drawing.sort(key=_turn)
        chosen = {seq.number for seq in rows_within(STEP_S, costs, Work(0, 0, 0), drawing)} or {drawing[0].number}
        return [seq for seq in running if seq.number in chosen or num_wanted(seq) != 1], len(chosen)
    most = tokens_within(STEP_S, costs, work, start, budget - len(drawing))
    if not drawing:
        most = max(most, min(BLOCK, budget))
    return running, len(drawing) + most


def beside(others: List[Sequence], idle: List[Sequence], clocked: Clocked) -> Filling:
    """What idle work gets in a step in which `others` draw one token each."""
    costs = clocked.costs
    if not costs.is_known or not others:
        return NOTHING
    limit_s = None
    if all(seq.request.terms.tpot_s for seq in others):
        limit_s = pace.allowed_s(others, clocked.begins_s())
    if limit_s is None and clocked.step_number % EVERY:
        return NOTHING
    is_sure = not clocked.step_number % SURE
    work = decode_work(others)
    own_s = costs.predict(work)
    if limit_s is None:
        limit_s = own_s * (1 + EVERY * SHARE)
    limit_s = max(min(limit_s, STEP_S), own_s)
    drawing = sorted((seq for seq in idle if num_wanted(seq) == 1), key=_turn)
    prefilling = sorted((seq for seq in idle if num_wanted(seq) > 1), key=_turn)
    chosen = rows_within(limit_s, costs, work, drawing)
    if is_sure and not chosen:
        chosen = drawing[:1]
    work = decode_work([*others, *chosen])
    start = prefilling[0].num_planned if prefilling else 0
    num_tokens = tokens_within(limit_s, costs, work, start, BLOCK * EVERY)
    if num_tokens < BLOCK // 2:
        num_tokens = BLOCK if is_sure else 0
    return Filling(chosen, prefilling[:1], num_tokens, not prefilling and len(chosen) == len(drawing))


def _turn(seq: Sequence) -> tuple[int, int]:
    return (seq.last_step, seq.number)
