"""From plan rows to arrays: block tables, and the micro-batches a step is run in.

A worker keeps, per sequence, its block table and in which step a token was last drawn for it, in arrays indexed by
slot; a plan only sends what is new. The drawn token itself may not exist yet when the arrays are made: they name its
slot. A step is usually one micro-batch. It is cut into several if it wants logits of more rows than the logits buffer
holds (prompt logprobs). Micro-batches run in row order, so whatever a row reads of an earlier row's KV is written.

    S parts of a micro-batch   T tokens   L logit rows   B blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from ..core.block import NO_BLOCK
from ..core.errors import EngineFailed
from ..core.step import PlanRow
from ..ops.api import StepBatch, StepLimits
from ..ops.kv_pool import KVPool


@dataclass(slots=True)
class RowPart:
    """A run of one plan row's tokens within one micro-batch.

    row         index of the row in the plan
    tokens      input ids, drafts last; with `from_step`, those behind the token drawn for the slot in that step
    num_scored  leading positions whose logits score the next prompt token
    num_draws   last positions whose logits draw a token: one, and one for each draft
    state_blocks  of a model with states, blocks for those behind all positions that draw but the last
    """

    row: int
    slot: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    from_step: int
    num_scored: int
    num_draws: int
    state_blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DraftStates:
    """Where a model with states keeps those behind the drafts of a step.

    pool   of the group of states
    table  the group's place among a sequence's tables
    first  of the pool's blocks, those from here on are for this
    """

    pool: KVPool
    table: int
    first: int


class Slots:
    """Sequence numbers -> small indices into growing arrays. One thread uses it.

    num_blocks    blocks in the largest pool
    num_used      blocks of that pool up to the highest id there has been
    num_tables    block tables of a sequence: one for each KV group
    block_tables  [slot, table, block]
    draft_states  None: nothing is drafted, or no layer keeps a state
    """

    def __init__(
        self,
        num_slots: int,
        max_blocks_per_seq: int,
        num_blocks: int,
        num_tables: int = 1,
        draft_states: DraftStates | None = None,
    ) -> None:
        self.draft_states = draft_states
        self.num_blocks = num_blocks
        self.num_used = 0
        self.num_tables = num_tables
        self.block_tables = np.zeros((num_slots, num_tables, max_blocks_per_seq), np.int32)
        self.num_held = [0] * num_slots
        self.drawn_step = np.full(num_slots, -1, np.int64)
        self._slot_of: dict[int, int] = {}
        self._free = list(range(num_slots))[::-1]

    def __len__(self) -> int:
        return len(self.num_held)

    def __contains__(self, seq: int) -> bool:
        return seq in self._slot_of

    def __getitem__(self, seq: int) -> int:
        return self._slot_of[seq]

    def release(self, seq: int) -> int:
        """Forget a sequence; the slot it had. Unknown numbers are fine (it may never have run here) and give -1."""
        slot = self._slot_of.pop(seq, -1)
        if slot >= 0:
            self._free.append(slot)
        return slot

    def introduce(self, seq: int) -> int:
        """A fresh slot for `seq`, whatever was known of it before."""
        self.release(seq)
        if not self._free:
            self._grow()
        slot = self._slot_of[seq] = self._free.pop()
        self.num_held[slot] = 0
        self.drawn_step[slot] = -1
        return slot

    def append_blocks(self, slot: int, blocks: Sequence[int]) -> None:
        """As many ids for each table, one table after the other. NO_BLOCK: see BlockTable."""
        highest = max(blocks)
        assert min(blocks) >= NO_BLOCK and highest < self.num_blocks, (blocks, self.num_blocks)
        self.num_used = max(self.num_used, highest + 1)
        held = self.num_held[slot]
        end = held + len(blocks) // self.num_tables
        assert end <= self.block_tables.shape[2], (end, self.block_tables.shape)
        self.block_tables[slot, :, held:end] = np.reshape(blocks, (self.num_tables, -1))
        self.num_held[slot] = end

    def fill(self, slot: int, first: int) -> None:
        """States of blocks from `first` on may be left behind any position, since a row is cut: where none stays they
        are in the place of the last block."""
        table_TB = self.block_tables[slot, :, first : self.num_held[slot]]
        np.copyto(table_TB, table_TB[:, -1:], where=table_TB == NO_BLOCK)

    def _grow(self) -> None:
        count = len(self)
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        self.num_held += [0] * count
        self.drawn_step = np.concatenate([self.drawn_step, np.full_like(self.drawn_step, -1)])
        self._free.extend(range(2 * count - 1, count - 1, -1))


def part_of_row(index: int, row: PlanRow, slot: int, num_prompt: int, state_blocks: Sequence[int] = ()) -> RowPart:
    """The whole row as one part. `num_prompt` matters only to rows that score."""
    if row.intro is not None and row.intro.embeds:
        raise EngineFailed("This worker computes prompts of token ids only, without embeddings.")
    num_scored = max(0, min(row.num_tokens, num_prompt - 1 - row.start)) if row.score else 0
    num_draws = 1 + len(row.drafts) if row.sample else 0
    tokens = row.tokens + row.drafts
    return RowPart(index, slot, row.start, row.num_tokens, tokens, row.from_step, num_scored, num_draws, state_blocks)


def micro_batches(parts: list[RowPart], max_logit_rows: int) -> Iterator[list[RowPart]]:
    """Cut a step so that no micro-batch wants more than `max_logit_rows` rows of logits. Only scored runs are cut:
    there is room for all draws of a row."""
    if sum([part.num_scored + part.num_draws for part in parts]) <= max_logit_rows:
        yield parts
        return
    micro_batch: list[RowPart] = []
    room = max_logit_rows
    for part in parts:
        assert part.num_draws <= max_logit_rows, (part, max_logit_rows)
        while part.num_scored + part.num_draws > room:
            count = min(room, part.num_scored, part.num_tokens - 1)
            if count:
                head, part = _cut(part, count)
                micro_batch.append(head)
            yield micro_batch
            micro_batch, room = [], max_logit_rows
        micro_batch.append(part)
        room -= part.num_scored + part.num_draws
    if micro_batch:
        yield micro_batch


def _cut(part: RowPart, count: int) -> tuple[RowPart, RowPart]:
    """The first `count` tokens, all of them scored, and the rest."""
    assert part.from_step < 0, part
    head = replace(part, num_tokens=count, tokens=part.tokens[:count], num_scored=count, num_draws=0)
    rest = replace(
        part,
        start=part.start + count,
        num_tokens=part.num_tokens - count,
        tokens=part.tokens[count:],
        num_scored=part.num_scored - count,
    )
    return head, rest


def build_batch(micro_batch: Sequence[RowPart], slots: Slots, block_size: int, limits: StepLimits) -> StepBatch:
    """The micro-batch as arrays: the slot of a token that is drawn as StepBatch writes it; of logits, all scored
    positions, part by part, then all drawing ones, each kind side by side. Asserts that it fits the limits and that
    every token has a KV slot. In one pass over lists: right after a step, code is in no cache, and little of it is what
    is fast."""
    tokens, positions, row_starts, ends = list[int](), list[int](), [0], list[int]()
    scored, drawing, kept = list[int](), list[int](), list[tuple[int, Sequence[int]]]()
    part_slots = [part.slot for part in micro_batch]
    for _, slot, start, num_tokens, given, from_step, num_scored, num_draws, states in map(_fields, micro_batch):
        first = len(tokens)
        if from_step >= 0:
            assert slots.drawn_step[slot] == from_step, "a row's input was not drawn in the step it names"
            tokens.append(~slot)
        tokens += given
        positions += range(start, start + num_tokens)
        last = len(tokens)
        assert last == len(positions), (slot, last, len(positions))
        row_starts.append(last)
        ends.append(start + num_tokens)
        if num_scored:
            scored += range(first, first + num_scored)
        drawing += range(last - num_draws, last)
        if states:
            kept.append((last - num_draws, states))
    assert len(tokens) <= limits.max_tokens and len(ends) <= limits.max_seqs, (len(tokens), len(ends), limits)
    return StepBatch(
        tokens_T=np.array(tokens, np.int32),
        positions_T=np.array(positions, np.int32),
        row_starts_S1=np.array(row_starts, np.int32),
        context_lens_S=np.array(ends, np.int32),
        block_tables_SB=block_tables(slots, part_slots, ends, block_size),
        logit_rows_L=np.array(scored + drawing, np.int32),
        state_blocks_T=_state_blocks(len(tokens), kept) if kept else None,
    )


def _state_blocks(num_tokens: int, kept: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
    """See StepBatch. kept: first tokens of runs, and the block of each of a run."""
    state_blocks_T = np.full(num_tokens, NO_BLOCK, np.int32)
    for first, blocks in kept:
        state_blocks_T[first : first + len(blocks)] = blocks
    return state_blocks_T


_fields = attrgetter(*RowPart.__slots__)


def room(slots: Slots, of_slots: Sequence[int], ends: Sequence[int], block_size: int) -> int:
    """Tokens that each of these slots can take at least, behind where its context ends, before its table must grow."""
    held = slots.num_held
    return min([held[slot] * block_size - end for slot, end in zip(of_slots, ends, strict=True)])


def block_tables(slots: Slots, of_slots: Sequence[int], ends: Sequence[int], block_size: int) -> np.ndarray:
    """The tables of these slots, as wide as the longest: all rows of the first one, then of the next. Asserts that each
    sequence holds its context."""
    assert room(slots, of_slots, ends, block_size) >= 0, "a row reaches beyond its block table"
    held = slots.num_held
    widest = max([held[slot] for slot in of_slots])
    if slots.num_tables == 1:
        return slots.block_tables[of_slots, 0, :widest]
    return np.concatenate([slots.block_tables[of_slots, table, :widest] for table in range(slots.num_tables)])


def one_on(batch: StepBatch, slots_S: np.ndarray) -> StepBatch:
    """The batch in which each sequence of `batch` takes the token it has just drawn. Block tables are as they were."""
    row_starts_S1 = np.arange(len(slots_S) + 1, dtype=np.int32)
    adapters_T = batch.adapters_T
    return StepBatch(
        tokens_T=~slots_S,
        positions_T=batch.context_lens_S,
        row_starts_S1=row_starts_S1,
        context_lens_S=batch.context_lens_S + 1,
        block_tables_SB=batch.block_tables_SB,
        logit_rows_L=row_starts_S1[:-1],
        adapters_T=None if adapters_T is None else adapters_T[batch.row_starts_S1[:-1]],
    )


def one_more_on(batch: StepBatch) -> StepBatch:
    """The same of a batch made by `one_on`: all but the positions stays."""
    return StepBatch(
        tokens_T=batch.tokens_T,
        positions_T=batch.context_lens_S,
        row_starts_S1=batch.row_starts_S1,
        context_lens_S=batch.context_lens_S + 1,
        block_tables_SB=batch.block_tables_SB,
        logit_rows_L=batch.logit_rows_L,
        adapters_T=batch.adapters_T,
    )
