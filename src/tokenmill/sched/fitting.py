"""How many tokens: what a sequence wants, and what fits a given time, by the cost model, or budget. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..core.cost import Costs, Work
from ..core.sequence import Sequence

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
