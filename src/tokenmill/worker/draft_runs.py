"""How models draft that compute beside the target: token after token, all sequences of a step together.

What a model is given at a position is its own affair (draft_model.py: tokens; draft_mtp.py: states of the target, too).

    S sequences  T tokens  L rows of logits
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.step import Drafts
from ..ops.api import Program, StepBatch, StepLimits
from ..ops.draws import Draws, Scores
from .draft_length import DraftLength, Rest
from .draft_sequences import DraftSequence, DraftSequences, how_they_draw
from .model_drafter import ComputedStep

LONGEST_REST, LONGEST_OF_ALL = 32, 128
"""Steps until a sequence that rests is tried again, and all, at most. For all it may cost a prompt."""


@dataclass(slots=True, eq=False)
class DraftRun:
    """A sequence's part in the drafting after a step. most: tokens to draft at most. [start, end): positions to be
    computed next. last: the row of the last call with the last one. Drafted tokens lie behind the sequence's own."""

    row: int
    seq: DraftSequence
    most: int
    start: int
    end: int
    last: int = 0
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def take(self, token: int, chance: float) -> None:
        """Draft what was drawn."""
        self.tokens.append(token)
        self.chances.append(chance)
        self.start, self.end = self.end, self.end + 1
        if len(self.tokens) < self.most:
            self.seq.inputs[self.start] = token


class DraftRunner:
    """program       of a model that is given tokens by the drafter's blocks
    vocab_size    ids below this may be drafted
    p_min         no token is drafted that is right with a lower probability, where those before it are
    source        the drafter's name
    is_adaptive   False: as many are drafted as may be, whatever they cost
    """

    def __init__(
        self,
        program: Program,
        sequences: DraftSequences,
        limits: StepLimits,
        *,
        vocab_size: int,
        p_min: float,
        source: str,
        is_adaptive: bool,
    ) -> None:
        self._program = program
        self._sequences = sequences
        self._vocab_size = vocab_size
        self._p_min = p_min
        self._source = source
        self._is_adaptive = is_adaptive
        self._length = DraftLength()
        self._rest = Rest()
        self._drawn = np.zeros(limits.max_logit_rows, np.int32)

    def begin(self, step: ComputedStep) -> bool:
        """Take in a step; whether tokens are to be drafted after it."""
        plan = step.plan
        self._sequences.follow(plan, step.drawn)
        num_drafts = sum([len(row.drafts) for row in plan.rows])
        if plan.rows and plan.num_tokens == len(plan.rows) + num_drafts:
            self._length.note_step(len(plan.rows), num_drafts, step.duration_s)
        return self._rest.note_step(num_drafts > 0)

    def draft(
        self,
        runs: list[DraftRun],
        num_drafting: int,
        prepare: Callable[[list[DraftRun]], None],
        end: Callable[[list[DraftRun]], None],
    ) -> dict[int, Drafts]:
        """What may follow the first runs, by row; of the others positions are computed and no more. prepare, end: what
        is done before and after each call of the program."""
        drafting, costs = runs[:num_drafting], self._length.costs(num_drafting)
        self._sequences.lend_spares([run.seq for run in runs])
        while runs:
            prepare(runs)
            drawn = self._call(runs, num_drafting)
            end(runs)
            runs = [
                run
                for run, (token, chance) in zip(runs, drawn, strict=False)
                if token < self._vocab_size and chance >= self._p_min and self._take(run, token, chance, costs)
            ]
            num_drafting = len(runs)
        for run in drafting:
            run.seq.rest.note_proposal(LONGEST_REST)
        if drafting:
            self._rest.note_proposal(LONGEST_OF_ALL)
        return {run.row: Drafts(tuple(run.tokens), self._source, tuple(run.chances)) for run in drafting if run.tokens}

    def _take(self, run: DraftRun, token: int, chance: float, costs: Sequence[float]) -> bool:
        """Whether the next token is to be drafted, too."""
        run.take(token, chance)
        if len(run.tokens) >= run.most or not self._is_adaptive:
            return len(run.tokens) < run.most
        return self._length.is_worth_more(costs, run.chances, run.most)

    def _call(self, runs: list[DraftRun], num_drafting: int) -> list[tuple[int, float]]:
        """Compute the inputs of all runs; what the first ones draw, and how sure the drafter is of them: the
        probability of what it takes for the most likely token, which is the one drawn where a request is greedy."""
        began_s = time.perf_counter()
        ends_S1 = np.cumsum([0, *(run.end - run.start for run in runs)], dtype=np.int32)
        starts_S = np.array([run.start for run in runs], np.int32)
        counts_S = np.diff(ends_S1)
        context_lens_S = np.array([run.end for run in runs], np.int32)
        width = -(-int(context_lens_S.max()) // self._sequences.block_size)
        batch = StepBatch(
            tokens_T=np.concatenate([run.seq.inputs[run.start : run.end] for run in runs]),
            positions_T=np.arange(ends_S1[-1], dtype=np.int32) + np.repeat(starts_S - ends_S1[:-1], counts_S),
            row_starts_S1=ends_S1,
            context_lens_S=context_lens_S,
            block_tables_SB=np.array([run.seq.table[:width] for run in runs]),
            logit_rows_L=ends_S1[1 : num_drafting + 1] - np.int32(1),
        )
        for run, last in zip(runs, (ends_S1[1:] - 1).tolist(), strict=True):
            run.last = last
        drafting = runs[:num_drafting]
        slots_L = np.arange(num_drafting, dtype=np.int32)
        scores = Scores.of(np.ones(num_drafting, np.int32))
        how = how_they_draw([run.seq for run in drafting], [run.end + run.seq.ahead for run in drafting])
        draws = Draws(how, slots_L, np.empty(num_drafting, np.int32), self._drawn, scores=scores)
        self._program(batch, draws if drafting else None)
        chances = np.exp(scores.top_logprobs_Ln.ravel()).tolist()
        if ends_S1[-1] <= 2 * num_drafting:
            self._length.note_call(num_drafting, time.perf_counter() - began_s, chances)
        return list(zip(draws.tokens_L.tolist(), chances, strict=True))
