"""How many tokens of a step: what a sequence wants, what fits a given time by the cost model, or the budget, and what
idle work may have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from ..core.cost import Costs, Work
from ..core.sequence import Sequence
from .policies import pace

_LEAST_SHARE = 0.01
"""Of a full step: what one step more costs at least, whatever few steps say."""


def num_wanted(seq: Sequence) -> int:
    """Tokens that may be planned now. None when the draws in flight make the end certain."""
    return each_wanted((seq,))[0]


def each_wanted(sequences: Iterable[Sequence]) -> list[int]:
    """num_wanted of each, without a call for each."""
    wanted = []
    for seq in sequences:
        num_pending = seq.num_pending
        num_tokens = len(seq.tokens) + num_pending
        wanted.append(0 if num_pending and num_tokens >= seq.max_len else num_tokens - seq.num_planned)
    return wanted


def decode_work(sequences: Iterable[Sequence]) -> Work:
    """Of one token of each."""
    num_rows = num_positions = 0
    for seq in sequences:
        num_rows += 1
        num_positions += seq.num_planned
    return Work(num_rows, num_rows, num_positions, num_positions)


def with_prefill(work: Work, num_tokens: int, start: int) -> Work:
    """And of so many tokens of a prompt from `start`."""
    num_positions = num_tokens * start + num_tokens * (num_tokens - 1) // 2
    return Work(
        work.num_rows + 1,
        work.num_tokens + num_tokens,
        work.num_positions + num_positions,
        work.num_context + start,
    )


def tokens_within(limit_s: float, costs: Costs, work: Work, start: int, most: int) -> int:
    """Tokens of a prompt, from position `start`, that a step has time for beside `work`: at most `most`, 0 where it is
    too long without them."""
    if costs.predict(with_prefill(work, most, start)) <= limit_s:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if costs.predict(with_prefill(work, middle, start)) <= limit_s:
            low = middle
        else:
            high = middle
    return low


def tokens_at_loss(loss: float, costs: Costs, work: Work, start: int, most: int) -> tuple[int, float]:
    """(the fewest tokens of prompts, from position `start`, that a step beside `work` takes at no more than `loss`
    above what each costs in one of `most`; how many tokens of the latter cost as much as one step more)."""
    step_s = costs.weights_s(work.num_tokens + most)
    again_s = step_s + costs.row_s + costs.context_s * (start + most / 2)  # steps begin half of `most` later on average
    fixed_s = again_s + costs.predict(work) - costs.weights_s(work.num_tokens)
    token_s = costs.predict(with_prefill(work, most, start)) / most
    num_tokens = math.ceil(fixed_s / (loss * token_s + fixed_s / most))
    return min(most, num_tokens), min(most, max(_LEAST_SHARE * most, again_s / token_s))


def rows_within(limit_s: float, costs: Costs, work: Work, sequences: Iterable[Sequence]) -> list[Sequence]:
    """The first sequences of which one token each keeps the step, beside `work`, within `limit_s`."""
    chosen: list[Sequence] = []
    left_s = limit_s - costs.predict(work)
    nothing_s = costs.predict(Work(0, 0, 0))
    for seq in sequences:
        left_s -= costs.predict(Work(1, 1, seq.num_planned, seq.num_planned)) - nothing_s
        if left_s < 0:
            break
        chosen.append(seq)
    return chosen


def chunk_size(start: int, num_left: int, budget: int, aim: int, block_size: int, first: bool) -> int:
    """Tokens of a prefill from position `start` with `num_left` tokens to go, under `budget`.

    A chunk that does not reach the end keeps to `aim` too, and stops at a block border, so that the next one, and
    sequences with the same prefix, go on from a published block. Where no border is in reach, only the first prefill of
    a step takes the rest of the budget (it must progress); others wait, rather than compute what a leader is about to
    publish.
    """
    if num_left <= budget:
        return num_left
    border = (start + min(aim, budget)) // block_size * block_size
    if border > start:
        return border - start
    return budget if first else 0


# What idle work may have of a step.
#
#     alone   nobody else is there: steps are sized to STEP_S, since whoever comes waits for those in flight
#     beside  others draw: idle rows are added while the step stays within the targets of all of them, or, where some
#             have none, while it takes at most SHARE longer on average
#
# Rows of idle work come in turn, those first that had none for longest.


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
    """What is asked of the engine (`port.SchedulerPort`)."""

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
