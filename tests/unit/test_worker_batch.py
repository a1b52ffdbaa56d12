"""From plan rows to arrays: slots, micro-batches, positions, tokens, logit rows."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.core.embeds import Embeds
from tokenmill.core.errors import EngineFailed
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction, PlanRow
from tokenmill.ops.api import StepLimits
from tokenmill.worker.batch import Slots, build_batch, micro_batches, part_of_row

LIMITS = StepLimits(max_tokens=64, max_seqs=4, max_blocks_per_seq=8, max_logit_rows=8)


def _slots(*blocks: tuple[int, ...]) -> Slots:
    """Sequences 100, 101, ... holding these blocks."""
    slots = Slots(num_slots=2, max_blocks_per_seq=8, num_blocks=50)
    for index, ids in enumerate(blocks):
        slots.append_blocks(slots.introduce(100 + index), ids)
    return slots


def test_rows_become_arrays():
    """A chunk, a drawn token and a scored row side by side, each checked against the row geometry of core/step.py."""
    slots = _slots((4, 9), (7,), (3, 1, 2))
    slots.drawn_step[slots[101]] = 5
    rows = [
        PlanRow(100, 4, (11, 12, 13), sample=True),
        PlanRow(101, 2, (), from_step=5, sample=True),
        PlanRow(102, 8, (21, 22), score=True),
    ]
    parts = [part_of_row(i, row, slots[row.seq], num_prompt=20) for i, row in enumerate(rows)]
    batch = build_batch(parts, slots, 4, LIMITS)
    assert batch.tokens_T.tolist() == [11, 12, 13, ~slots[101], 21, 22]
    assert batch.positions_T.tolist() == [4, 5, 6, 2, 8, 9]
    assert batch.row_starts_S1.tolist() == [0, 3, 4, 6]
    assert batch.context_lens_S.tolist() == [7, 3, 10]
    assert batch.block_tables_SB.tolist() == [[4, 9, 0], [7, 0, 0], [3, 1, 2]]
    assert batch.logit_rows_L.tolist() == [4, 5, 2, 3], "scored positions first, then sampled ones"
    given = (getattr(batch, name) for name in batch.__slots__)
    for array in (array for array in given if array is not None):
        assert array.dtype == np.int32 and array.flags.c_contiguous


def test_scores_stop_at_the_end_of_the_prompt():
    """The last prompt token has no known successor, and rows of resumed output score nothing beyond it."""
    row = PlanRow(1, 6, (1, 2, 3, 4), score=True, sample=True)
    assert part_of_row(0, row, 0, num_prompt=10).num_scored == 3
    assert part_of_row(0, row, 0, num_prompt=8).num_scored == 1
    assert part_of_row(0, row, 0, num_prompt=6).num_scored == 0
    assert part_of_row(0, row, 0, num_prompt=30).num_scored == 4


@pytest.mark.parametrize("limit", [3, 4, 7, 8, 100])
def test_micro_batches_keep_order_and_lose_nothing(limit):
    """Whatever the limit, the rows of the micro-batches concatenate to the plan's, in order, each within the limit."""
    rows = [
        PlanRow(0, 3, tuple(range(9)), score=True),
        PlanRow(1, 0, (50, 51), sample=True),
        PlanRow(2, 5, tuple(range(20, 31)), score=True, sample=True, drafts=(40,)),
        PlanRow(3, 9, (), from_step=1, sample=True, drafts=(30, 31)),
        PlanRow(4, 0, (70, 71, 72)),
    ]
    parts = [part_of_row(i, row, i, num_prompt=16) for i, row in enumerate(rows)]
    cut = list(micro_batches(parts, limit))
    assert all(sum(p.num_scored + p.num_draws for p in piece) <= limit for piece in cut)
    flat = [part for piece in cut for part in piece]
    assert [p.row for p in flat] == sorted(p.row for p in flat)
    for index, (row, whole) in enumerate(zip(rows, parts, strict=True)):
        mine = [p for p in flat if p.row == index]
        assert sum(p.num_scored for p in mine) == whole.num_scored
        assert [p.num_draws for p in mine] == [0] * (len(mine) - 1) + [row.sample + len(row.drafts)]
        position = row.start
        for part in mine:
            assert part.start == position and part.num_tokens > 0
            position += part.num_tokens
            if part is not mine[-1]:
                assert part.num_scored == part.num_tokens
        if row.from_step < 0:
            assert sum((p.tokens for p in mine), ()) == row.tokens + row.drafts
    if limit == 100:
        assert cut == [parts]


def test_slots_are_reused_and_grow():
    """Releasing frees a slot; more sequences than slots grow the arrays and keep what they hold."""
    slots = _slots((1, 2), (3,))
    first = slots[100]
    slots.append_blocks(slots.introduce(102), (4,))
    assert len(slots) == 4 and slots.block_tables[first, 0, :2].tolist() == [1, 2]
    slots.release(100)
    slots.release(100)
    assert slots.introduce(103) == first and slots.num_held[first] == 0


def test_reintroduction_forgets():
    """A sequence introduced again starts with an empty table and no drawn token."""
    slots = _slots((1, 2))
    slots.drawn_step[slots[100]] = 9
    slot = slots.introduce(100)
    assert slots.num_held[slot] == 0 and slots.drawn_step[slot] == -1


def test_broken_plans_are_caught():
    """A draw that is not there, blocks beyond the pool and rows beyond their table assert."""
    slots = _slots((1,))
    slot = slots[100]
    with pytest.raises(AssertionError, match="not drawn in the step it names"):
        build_batch([part_of_row(0, PlanRow(100, 2, (), from_step=4), slot, 0)], slots, 4, LIMITS)
    with pytest.raises(AssertionError, match="beyond its block table"):
        build_batch([part_of_row(0, PlanRow(100, 4, (1,)), slot, 0)], slots, 4, LIMITS)
    with pytest.raises(AssertionError):
        slots.append_blocks(slot, (50,))
    with pytest.raises(AssertionError):
        slots.append_blocks(slot, tuple(range(8)))
    with pytest.raises(KeyError):
        slots[999]


def test_drafts_are_inputs_that_draw() -> None:
    """Behind a known token and behind one that is still to be drawn: each draft has a position, and logits to draw by,
    beside a row that has none."""
    slots = _slots((4, 9), (7,), (3,))
    slots.drawn_step[slots[101]] = 5
    rows = [
        PlanRow(100, 4, (11,), sample=True, drafts=(12, 13)),
        PlanRow(101, 1, (), from_step=5, sample=True, drafts=(21,)),
        PlanRow(102, 2, (31,), sample=True),
    ]
    batch = build_batch([part_of_row(i, row, slots[row.seq], 0) for i, row in enumerate(rows)], slots, 4, LIMITS)
    assert batch.tokens_T.tolist() == [11, 12, 13, ~slots[101], 21, 31]
    assert batch.positions_T.tolist() == [4, 5, 6, 1, 2, 2]
    assert batch.row_starts_S1.tolist() == [0, 3, 5, 6] and batch.context_lens_S.tolist() == [7, 3, 3]
    assert batch.logit_rows_L.tolist() == [0, 1, 2, 3, 4, 5]


def test_embeds_are_refused() -> None:
    """A worker that cannot compute them says so, instead of leaving them out."""
    intro = Introduction((1, 2), (), SamplingParams(), 0, 0, (), embeds=(Embeds(1, 1, b"digest"),))
    with pytest.raises(EngineFailed, match="without embeddings"):
        part_of_row(0, PlanRow(1, 0, (1, 2), intro=intro), 0, num_prompt=2)
