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

import numpy as np

from ..core.errors import EngineFailed
from ..core.step import PlanRow
from ..ops.api import StepBatch, StepLimits


@dataclass(slots=True)
class RowPart:
    """A run of one plan row's tokens within one micro-batch.

    row         index of the row in the plan
    tokens      input ids, drafts last; with `from_step`, those behind the token drawn for the slot in that step
    num_scored  leading positions whose logits score the next prompt token
    num_draws   last positions whose logits draw a token: one, and one for each draft
    """

    row: int
    slot: int
    start: int
    num_tokens: int
    tokens: tuple[int, ...]
    from_step: int
    num_scored: int
    num_draws: int


class Slots:
    """Sequence numbers -> small indices into growing arrays. One thread uses it.

    num_blocks    blocks in the largest pool
    num_used      blocks of that pool up to the highest id there has been
    num_tables    block tables of a sequence: one for each KV group
    block_tables  [slot, table, block]
    """

    def __init__(self, num_slots: int, max_blocks_per_seq: int, num_blocks: int, num_tables: int = 1) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self.num_tables = num_tables
        self.block_tables = np.zeros((num_slots, num_tables, max_blocks_per_seq), np.int32)
        self.num_held = np.zeros(num_slots, np.int32)
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
        """As many ids for each table, one table after the other."""
        highest = max(blocks)
        assert min(blocks) >= 0 and highest < self.num_blocks, (blocks, self.num_blocks)
        self.num_used = max(self.num_used, highest + 1)
        held = int(self.num_held[slot])
        end = held + len(blocks) // self.num_tables
        assert end <= self.block_tables.shape[2], (end, self.block_tables.shape)
        self.block_tables[slot, :, held:end] = np.reshape(blocks, (self.num_tables, -1))
        self.num_held[slot] = end

    def _grow(self) -> None:
        count = len(self)
        self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
        self.num_held = np.concatenate([self.num_held, np.zeros_like(self.num_held)])
        self.drawn_step = np.concatenate([self.drawn_step, np.full_like(self.drawn_step, -1)])
        self._free.extend(range(2 * count - 1, count - 1, -1))


def part_of_row(index: int, row: PlanRow, slot: int, num_prompt: int) -> RowPart:
    """The whole row as one part. `num_prompt` matters only to rows that score."""
    if row.intro is not None and row.intro.embeds:
        raise EngineFailed("This worker computes prompts of token ids only, without embeddings.")
    num_scored = max(0, min(row.num_tokens, num_prompt - 1 - row.start)) if row.score else 0
    num_draws = 1 + len(row.drafts) if row.sample else 0
    tokens = row.tokens + row.drafts
    return RowPart(index, slot, row.start, row.num_tokens, tokens, row.from_step, num_scored, num_draws)


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
    """The micro-batch as arrays. Asserts that it fits the limits and that every token has a KV slot."""
    num_parts = len(micro_batch)
    slots_S = np.fromiter((part.slot for part in micro_batch), np.int32, num_parts)
    starts_S = np.fromiter((part.start for part in micro_batch), np.int32, num_parts)
    counts_S = np.fromiter((part.num_tokens for part in micro_batch), np.int32, num_parts)
    row_starts_S1 = np.zeros(num_parts + 1, np.int32)
    np.cumsum(counts_S, out=row_starts_S1[1:])
    num_tokens = int(row_starts_S1[-1])
    assert num_tokens <= limits.max_tokens and num_parts <= limits.max_seqs, (num_tokens, num_parts, limits)

    context_lens_S = starts_S + counts_S
    if num_tokens == num_parts:
        positions_T = starts_S
    else:
        positions_T = runs(starts_S, counts_S)
    return StepBatch(
        tokens_T=_tokens(micro_batch, slots_S, row_starts_S1, slots),
        positions_T=positions_T,
        row_starts_S1=row_starts_S1,
        context_lens_S=context_lens_S,
        block_tables_SB=block_tables(slots, slots_S, context_lens_S, block_size),
        logit_rows_L=_logit_rows(micro_batch, row_starts_S1),
    )


def runs(starts_S: np.ndarray, counts_S: np.ndarray) -> np.ndarray:
    """Whole numbers from each start on, as many as its count, one run after the other: int32."""
    ends_S = np.cumsum(counts_S, dtype=np.int32)
    return np.arange(counts_S.sum(), dtype=np.int32) + np.repeat(starts_S - ends_S + counts_S, counts_S)


def block_tables(slots: Slots, slots_S: np.ndarray, context_lens_S: np.ndarray, block_size: int) -> np.ndarray:
    """The tables of these slots, as wide as the longest: all rows of the first one, then of the next. Asserts
    that each sequence holds its context."""
    num_held_S = slots.num_held[slots_S]
    assert (context_lens_S <= num_held_S * block_size).all(), "a row reaches beyond its block table"
    widest = int(num_held_S.max(initial=0))
    if slots.num_tables == 1:
        return slots.block_tables[slots_S, 0, :widest]
    return np.concatenate([slots.block_tables[slots_S, table, :widest] for table in range(slots.num_tables)])


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


def _tokens(micro_batch: Sequence[RowPart], slots_S: np.ndarray, row_starts_S1: np.ndarray, slots: Slots) -> np.ndarray:
    """Given tokens where a part has them; elsewhere the slot of the drawn one, as StepBatch writes it."""
    flat: list[int] = []
    drawn: list[int] = []
    for index, part in enumerate(micro_batch):
        if part.from_step >= 0:
            drawn.append(index)
            flat.append(0)
        flat.extend(part.tokens)
    tokens_T = np.array(flat, np.int32)
    if drawn:
        from_slots = slots_S[drawn]
        expected = [micro_batch[index].from_step for index in drawn]
        assert (slots.drawn_step[from_slots] == expected).all(), "a row's input was not drawn in the step it names"
        tokens_T[row_starts_S1[drawn]] = ~from_slots
    return tokens_T


def _logit_rows(micro_batch: Sequence[RowPart], row_starts_S1: np.ndarray) -> np.ndarray:
    """All scored positions, part by part, then all sampled ones: each kind is one contiguous range of the logits."""
    num_draws_S = np.fromiter((part.num_draws for part in micro_batch), np.int32, len(micro_batch))
    drawing_L = runs(row_starts_S1[1:] - num_draws_S, num_draws_S)
    scored = [
        first + offset
        for part, first in zip(micro_batch, row_starts_S1.tolist(), strict=False)
        for offset in range(part.num_scored)
    ]
    return np.concatenate([np.array(scored, np.int32), drawing_L]) if scored else drawing_L
