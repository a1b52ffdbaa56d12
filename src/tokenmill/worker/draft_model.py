"""A draft model: a smaller model beside the target that draws what may come next (speculative decoding, Leviathan et
al., arXiv 2211.17192). It goes by the target's own tokens and blocks (draft_sequences.py), as far as that is likely to
pay (draft_length.py).

KV that it misses (of a prompt, from elsewhere, or of the last draft that was accepted) is computed before its next
draft, at most CATCH_UP tokens a step. A sequence that still misses some has no drafts.

A step is followed by one thread, that which computes it, in the order of the plans.

    S sequences  T tokens  L rows of logits
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.speculation import DRAFT_MODEL
from ..core.step import Drafts, StepPlan
from ..models.loader import Model
from ..ops.api import Ops, StepBatch, StepLimits
from ..ops.draws import Draws, Scores
from ..ops.kv_pool import KVPool
from .draft_length import DraftLength, Rest
from .draft_sequences import DraftSequence, DraftSequences, how_they_draw
from .memory import step_limits
from .model_drafter import ComputedStep

CATCH_UP = 128
"""Tokens a step that the drafter computes behind the target, all sequences together: it must not hold up the rest."""

MOST_SEQUENCES = 64
"""That are drafted for in a step: no step verifies drafts of more."""

LONGEST_REST, LONGEST_OF_ALL = 32, 128
"""Steps until a sequence that rests is tried again, and all, at most. For all it costs a prompt."""


@dataclass(slots=True, eq=False)
class _Run:
    """A sequence's part in the drafting after a step. most: tokens to draft at most. [start, end): positions to be
    computed next. Drafted tokens lie behind the sequence's own."""

    row: int
    seq: DraftSequence
    most: int
    start: int
    end: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def take(self, token: int, chance: float) -> None:
        """Draft what was drawn."""
        self.tokens.append(token)
        self.chances.append(chance)
        self.start, self.end = self.end, self.end + 1
        if len(self.tokens) < self.most:
            self.seq.inputs[self.start] = token


class DraftModel:
    """model         the drafter, with one KV group
    pool          of as many blocks as the target's group has, and spare ones for each sequence of a call
    num_tables    block tables of a sequence, of which the first is that of the target's group
    target_vocab  ids below this may be drafted
    most_drafts   tokens of a proposal
    p_min         nor is a token drafted that is right with a lower probability, where those before it are
    is_adaptive   False: most_drafts are drafted, whatever they cost
    """

    def __init__(
        self,
        ops: Ops,
        model: Model,
        pool: KVPool,
        limits: StepLimits,
        *,
        num_tables: int,
        target_vocab: int,
        most_drafts: int,
        p_min: float = 0.0,
        is_adaptive: bool = True,
    ) -> None:
        self.pool = pool
        self.aux = None
        self.weights_bytes = model.num_bytes
        self._limits = limits
        self._block_size = block_size = pool.group.block_size
        self._vocab_size = min(target_vocab, model.config.vocab_size)
        num_spare = spare_blocks(most_drafts, block_size)
        max_blocks = limits.max_blocks_per_seq - num_spare
        self._sequences = DraftSequences(
            pool,
            pool.num_blocks - limits.max_seqs * num_spare,
            max_blocks,
            num_spare=num_spare,
            num_tables=num_tables,
            vocab_size=self._vocab_size,
        )
        self._max_tokens = min(max_blocks * block_size, model.config.max_context)
        self._most_drafts = most_drafts
        self._p_min = p_min
        self._is_adaptive = is_adaptive
        self._length = DraftLength()
        self._rest = Rest()
        self._program = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)
        self._drawn = np.zeros(limits.max_logit_rows, np.int32)

    @property
    def kv_bytes(self) -> int:
        return self.pool.num_blocks * self.pool.group.bytes_per_block

    @property
    def scratch_bytes(self) -> int | None:
        return self._program.scratch_bytes

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        self._sequences.forget_blocks(blocks)

    def propose(self, step: ComputedStep) -> dict[int, Drafts]:
        plan, drawn = step.plan, step.drawn
        self._sequences.follow(plan, drawn)
        num_drafts = sum([len(row.drafts) for row in plan.rows])
        if plan.rows and plan.num_tokens == len(plan.rows) + num_drafts:
            self._length.note_step(len(plan.rows), num_drafts, step.duration_s)
        is_resting = not self._rest.note_step(num_drafts > 0)
        going, num_drafting = ([], 0) if is_resting else self._runs(plan, drawn)
        drafting, costs = going[:num_drafting], self._length.costs(num_drafting)
        while going:
            going = [
                run
                for run, (token, chance) in zip(going, self._call(going, num_drafting), strict=False)
                if token < self._vocab_size and chance >= self._p_min and self._take(run, token, chance, costs)
            ]
            num_drafting = len(going)
        for run in drafting:
            run.seq.rest.note_proposal(LONGEST_REST)
        if drafting:
            self._rest.note_proposal(LONGEST_OF_ALL)
        return {run.row: Drafts(tuple(run.tokens), DRAFT_MODEL, tuple(run.chances)) for run in drafting if run.tokens}

    def _runs(self, plan: StepPlan, drawn: Sequence[tuple[int, ...]]) -> tuple[list[_Run], int]:
        """Those that draft, in the order of the plan, and how many; then one that only catches up, if there is one and
        room for it."""
        size, room = self._block_size, self._limits.max_tokens
        runs: list[_Run] = []
        late: _Run | None = None
        for row, tokens in enumerate(drawn):
            known = self._sequences.get(plan.rows[row].seq) if tokens else None
            if known is None or known.num_tokens > self._max_tokens:
                continue
            if not known.rest.note_step(bool(plan.rows[row].drafts)):
                continue
            self._sequences.advance(known)
            num_new = known.num_tokens - known.num_valid
            most = min(self._most_drafts, self._max_tokens - known.num_tokens)
            run = _Run(row, known, most, known.num_valid, known.num_tokens)
            if most > 0 and num_new <= room and len(runs) < self._limits.max_logit_rows:
                runs.append(run)
                room -= num_new
            elif late is None and num_new > size:
                late = run
        num_drafting = len(runs)
        if late is not None and room > 0:
            late.end = min(late.end, late.start + room)
            runs.append(late)
        self._sequences.lend_spares([run.seq for run in runs])
        return runs, num_drafting

    def _take(self, run: _Run, token: int, chance: float, costs: Sequence[float]) -> bool:
        """Whether the next token is to be drafted, too."""
        run.take(token, chance)
        if len(run.tokens) >= run.most or not self._is_adaptive:
            return len(run.tokens) < run.most
        return self._length.is_worth_more(costs, run.chances, run.most)

    def _call(self, runs: list[_Run], num_drafting: int) -> list[tuple[int, float]]:
        """Compute the inputs of all runs; what the first ones draw, and how sure the drafter is of them: the
        probability of what it takes for the most likely token, which is the one drawn where a request is greedy."""
        began_s = time.perf_counter()
        ends_S1 = np.cumsum([0, *(run.end - run.start for run in runs)], dtype=np.int32)
        starts_S = np.array([run.start for run in runs], np.int32)
        counts_S = np.diff(ends_S1)
        context_lens_S = np.array([run.end for run in runs], np.int32)
        width = -(-int(context_lens_S.max()) // self._block_size)
        batch = StepBatch(
            tokens_T=np.concatenate([run.seq.inputs[run.start : run.end] for run in runs]),
            positions_T=np.arange(ends_S1[-1], dtype=np.int32) + np.repeat(starts_S - ends_S1[:-1], counts_S),
            row_starts_S1=ends_S1,
            context_lens_S=context_lens_S,
            block_tables_SB=np.array([run.seq.table[:width] for run in runs]),
            logit_rows_L=ends_S1[1 : num_drafting + 1] - np.int32(1),
        )
        drafting = runs[:num_drafting]
        slots_L = np.arange(num_drafting, dtype=np.int32)
        scores = Scores.of(np.ones(num_drafting, np.int32))
        how = how_they_draw([run.seq for run in drafting], [run.end for run in drafting])
        draws = Draws(how, slots_L, np.empty(num_drafting, np.int32), self._drawn, scores=scores)
        self._program(batch, draws if drafting else None)
        for run in runs:
            self._sequences.note(run.seq, run.start, run.end)
        chances = np.exp(scores.top_logprobs_Ln.ravel()).tolist()
        if ends_S1[-1] <= 2 * num_drafting:
            self._length.note_call(num_drafting, time.perf_counter() - began_s, chances)
        return list(zip(draws.tokens_L.tolist(), chances, strict=True))


def spare_blocks(most_drafts: int, block_size: int) -> int:
    """Behind the blocks of a sequence, for what is drafted there."""
    return -(-most_drafts // block_size)


def drafter_limits(model: Model, target: StepLimits, block_size: int, most_drafts: int) -> StepLimits:
    """Of the steps of a drafter beside a target with such limits: tables have room for spare blocks, too."""
    limits = step_limits(
        model.config,
        max_model_len=target.max_blocks_per_seq * block_size,
        max_num_batched_tokens=MOST_SEQUENCES + CATCH_UP,
        max_num_seqs=min(target.max_seqs, MOST_SEQUENCES),
        block_size=block_size,
    )
    max_blocks = limits.max_blocks_per_seq + spare_blocks(most_drafts, block_size)
    return replace(limits, max_seqs=limits.max_logit_rows + 1, max_blocks_per_seq=max_blocks)
