"""The sequences that a model with KV drafts for: what they are, and how far the drafter has computed KV of them.

The drafter's KV lies in a pool of its own that has a block for each block of the target's group of layers that see
everything, and goes by the same block tables: sharing, preemption and release follow by themselves. Nobody but this
file knows which blocks have it. At each position the drafter takes in one token, which may be that `ahead` of the
position: KV there is a function of this token and all before it, bit for bit, so several sequences may write the same
block. For each block it is kept

    inputs_BP   the tokens taken in at its positions, where the drafter has written KV; NONE behind them
    chain_B     a hash of all tokens before these

so a sequence has the drafter's KV as far as these agree with what it is, whoever wrote it, and whatever became of the
block meanwhile. What is drafted may lie behind a sequence's last block: in spare blocks, which are not kept.

    B blocks  P positions of a block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.step import Introduction, StepPlan
from ..ops.api import StepLimits
from ..ops.kv_pool import KVPool
from .draft_draws import HowItDraws
from .draft_length import Rest

NONE = -1


@dataclass(slots=True, eq=False)
class DraftSequence:
    """What is known of a sequence.

    tokens      its first num_tokens are the prompt and what was drawn
    inputs      what the drafter takes in at each position: a view of `tokens`, whose first num_inputs are known
    table       its first num_blocks are blocks of the target's group, with spare ones behind them
    num_valid   leading positions where the drafter has KV
    chain       of the tokens before the input of the first position of the block of position num_valid
    """

    tokens: np.ndarray
    num_tokens: int
    ahead: int
    how: HowItDraws
    table: np.ndarray
    chain: int
    num_blocks: int = 0
    num_valid: int = 0
    rest: Rest = field(default_factory=Rest)

    @property
    def inputs(self) -> np.ndarray:
        return self.tokens[self.ahead :]

    @property
    def num_inputs(self) -> int:
        return self.num_tokens - self.ahead


class DraftSequences:
    """pool          of as many blocks as the target's group has, and spare ones for each sequence of a step
    limits        of the drafter's steps, whose tables have room for spare blocks, too
    most_drafts   tokens drafted behind a sequence's own
    num_tables    block tables of a sequence, of which the first is that of the target's group
    vocab_size    sequences with tokens that are not below this are not followed
    ahead         how far the token that is taken in at a position is from there
    """

    def __init__(
        self,
        pool: KVPool,
        limits: StepLimits,
        most_drafts: int,
        *,
        num_tables: int,
        vocab_size: int,
        ahead: int = 0,
    ) -> None:
        self.pool = pool
        self.block_size = pool.group.block_size
        self._num_spare = spare_blocks(most_drafts, self.block_size)
        self._max_blocks = limits.max_blocks_per_seq
        self.max_tokens = (self._max_blocks - self._num_spare) * self.block_size
        self._num_blocks = num_blocks = pool.num_blocks - limits.max_seqs * self._num_spare
        self._num_tables = num_tables
        self._vocab_size = vocab_size
        self._ahead = ahead
        self._inputs_BP = np.full((num_blocks, self.block_size), NONE, np.int32)
        self._chain_B = np.zeros(num_blocks, np.int64)
        self._sequences: dict[int, DraftSequence] = {}

    @property
    def num_bytes(self) -> int:
        """Of the pool."""
        return self.pool.num_blocks * self.pool.group.bytes_per_block

    @property
    def num_sequences(self) -> int:
        """That are followed."""
        return len(self._sequences)

    def get(self, number: int) -> DraftSequence | None:
        """None where it is not followed: it cannot be drafted for."""
        return self._sequences.get(number)

    def lose_all(self) -> None:
        """Follow no sequence that there is now any more."""
        self._sequences.clear()

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Let the memory of these blocks go, which no sequence has."""
        ids = list(blocks)
        self._inputs_BP[ids] = NONE
        self.pool.give_back(ids)

    # ---- what a sequence is ----

    def follow(self, plan: StepPlan, drawn: Sequence[tuple[int, ...]]) -> None:
        """Take in a step that has not failed, in order. drawn: the tokens that each of its rows has drawn."""
        for seq in plan.released:
            self._sequences.pop(seq, None)
        for row, tokens in zip(plan.rows, drawn, strict=True):
            if row.intro is not None:
                self._introduce(row.seq, row.intro)
            known = self._sequences.get(row.seq)
            if known is None:
                continue
            if row.blocks:
                num_new = len(row.blocks) // self._num_tables
                end = known.num_blocks + num_new
                known.table[known.num_blocks : end] = row.blocks[:num_new]
                known.num_blocks = end
            if tokens and not self._append(known, row.start + row.num_tokens - len(row.drafts), tokens):
                del self._sequences[row.seq]

    def _introduce(self, number: int, intro: Introduction) -> None:
        self._sequences.pop(number, None)
        tokens = (*intro.prompt_tokens, *intro.output_tokens)
        if intro.embeds or max(tokens) >= self._vocab_size:
            return
        kept = np.empty(max(len(tokens), self.max_tokens), np.int32)
        kept[: len(tokens)] = tokens
        self._sequences[number] = DraftSequence(
            kept,
            len(tokens),
            self._ahead,
            HowItDraws.of(intro),
            np.zeros(self._max_blocks, np.int32),
            _chained(0, kept[: self._ahead]),
        )

    def _append(self, known: DraftSequence, end: int, tokens: tuple[int, ...]) -> bool:
        """False where they cannot be followed: one was not drawn or is not in the drafter's vocabulary, or a step has
        failed before."""
        num_tokens = end + len(tokens)
        is_known = end == known.num_tokens and num_tokens <= len(known.tokens)
        if not (is_known and min(tokens) >= 0 and max(tokens) < self._vocab_size):
            return False
        known.tokens[end:num_tokens] = tokens
        known.num_tokens = num_tokens
        return True

    # ---- how far there is KV ----

    def advance(self, known: DraftSequence) -> None:
        """Find how far its blocks have the drafter's KV; the last known input is always computed. Where inputs are
        ahead, the last position of a shared block may have taken in another token than what follows here: nobody can
        compute it again, and it counts for little."""
        size, last, inputs = self.block_size, known.num_inputs - 1, known.inputs
        while known.num_valid < last and (index := known.num_valid // size) < known.num_blocks:
            block, begin = known.table[index], index * size
            if self._chain_B[block] != known.chain:
                return
            here = inputs[begin : min(begin + size, last)]
            is_other = self._inputs_BP[block, : len(here)] != here
            if self._ahead and self._inputs_BP[block, -1] != NONE:
                is_other[size - self._ahead :] = False
            num_equal = int(is_other.argmax()) if is_other.any() else len(here)
            self._reach(known, max(begin + num_equal, known.num_valid))
            if num_equal < size:
                return

    def note(self, known: DraftSequence, start: int, end: int) -> None:
        """Positions [start, end) have been computed: what it is, or what was drafted, which `tokens` then has behind
        what is known."""
        size, inputs = self.block_size, known.inputs
        end = min(end, known.num_blocks * size)
        for position in (start, *range(start - start % size + size, end, size)) if start < end else ():
            index, at = divmod(position, size)
            block, here = known.table[index], inputs[position : min(end, (index + 1) * size)]
            if not at:
                self._chain_B[block] = self._chain_before(known, index)
            self._inputs_BP[block, at : at + len(here)] = here
            self._inputs_BP[block, at + len(here) :] = NONE
            if position < known.num_inputs:
                self._reach(known, min(position + len(here), known.num_inputs))

    def _reach(self, known: DraftSequence, num_valid: int) -> None:
        """It has the drafter's KV so far."""
        known.chain = self._chain_before(known, num_valid // self.block_size)
        known.num_valid = num_valid

    def _chain_before(self, known: DraftSequence, index: int) -> int:
        """A block that is not before that of position num_valid."""
        size, chain, inputs = self.block_size, known.chain, known.inputs
        for each in range(known.num_valid // size, index):
            chain = _chained(chain, inputs[each * size : (each + 1) * size])
        return chain

    def lend_spares(self, sequences: Sequence[DraftSequence]) -> None:
        """Put spare blocks behind those that each has, until the next call."""
        for first, known in enumerate(sequences):
            begin = self._num_blocks + first * self._num_spare
            known.table[known.num_blocks :][: self._num_spare] = np.arange(begin, begin + self._num_spare)


def spare_blocks(most_drafts: int, block_size: int) -> int:
    """Behind the blocks of a sequence, for what is drafted there."""
    return -(-most_drafts // block_size)


def _chained(chain: int, tokens: np.ndarray) -> int:
    return hash((chain, tokens.tobytes()))
