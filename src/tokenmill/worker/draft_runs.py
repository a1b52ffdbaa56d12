"""How models with KV draft (draft_loop.py): what they compute for a token, by the drafter's blocks.

What a model is given at a position is its own affair (draft_model.py: tokens; draft_states.py: states, too).

    S sequences  T tokens  L rows of logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..core.step import Drafts
from ..ops.api import Draws, Program, StepBatch
from .draft_loop import DraftLoop
from .draft_sequences import DraftSequence, DraftSequences
from .model_drafter import ComputedStep


@dataclass(slots=True, eq=False)
class DraftRun:
    """See draft_loop.Run. [start, end): positions to be computed next. last: the row of the last call with the last
    one. Drafted tokens lie behind the sequence's own."""

    row: int
    seq: DraftSequence
    most: int
    start: int
    end: int
    last: int = 0
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        return self.end + self.seq.ahead

    def take(self, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.chances.append(chance)
        self.start, self.end = self.end, self.end + 1
        if len(self.tokens) < self.most:
            self.seq.inputs[self.start] = token


class DraftRunner:
    """program: of a model that is given tokens by the drafter's blocks."""

    def __init__(self, program: Program, sequences: DraftSequences, loop: DraftLoop) -> None:
        self._program = program
        self._sequences = sequences
        self._loop = loop

    def begin(self, step: ComputedStep) -> bool:
        """Take in a step; whether tokens are to be drafted after it."""
        self._sequences.follow(step.plan, step.drawn)
        return self._loop.begin(step)

    def draft(
        self,
        runs: list[DraftRun],
        num_drafting: int,
        prepare: Callable[[list[DraftRun]], None],
        end: Callable[[list[DraftRun]], None],
    ) -> dict[int, Drafts]:
        """What may follow the first runs, by row; of the others positions are computed and no more. prepare, end: what
        is done before and after each call of the program."""

        def compute(runs: list[DraftRun], draws: Draws | None) -> int:
            prepare(runs)
            num_tokens = self._call(runs, draws)
            end(runs)
            return num_tokens

        self._sequences.lend_spares([run.seq for run in runs])
        return self._loop.draft(runs, num_drafting, compute)

    def _call(self, runs: list[DraftRun], draws: Draws | None) -> int:
        """Compute the inputs of all runs; their number."""
        ends_S1 = np.cumsum([0, *(run.end - run.start for run in runs)], dtype=np.int32)
        starts_S = np.array([run.start for run in runs], np.int32)
        counts_S = np.diff(ends_S1)
        context_lens_S = np.array([run.end for run in runs], np.int32)
        width = -(-int(context_lens_S.max()) // self._sequences.block_size)
        num_drafting = 0 if draws is None else len(draws.tokens_L)
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
        self._program(batch, draws)
        return int(ends_S1[-1])
