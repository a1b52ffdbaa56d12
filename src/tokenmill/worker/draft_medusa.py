"""Medusa heads as a drafter (models/medusa.py): they are given the state of the target of which a sequence's last token
was drawn, and each guesses a token further than the one before. They keep nothing, so there is nothing to catch up
with, and any sequence may be drafted for after any step.

A head's guess does not depend on what the others guess, but only as many are computed as are likely to pay.

A step is followed by one thread, that which computes it, in the order of the plans.

    S sequences  D width
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..core.speculation import MEDUSA, MOST_DRAFTS, SpeculationConfig
from ..core.step import Drafts
from ..models.decoder import AuxHiddenStates
from ..models.medusa import MedusaHeads
from ..ops.api import Draws, Ops, Program, StepBatch, StepLimits
from .draft_draws import HowItDraws
from .draft_length import Rest
from .draft_loop import DraftLoop
from .model_drafter import ComputedStep


@dataclass(slots=True, eq=False)
class _Sequence:
    how: HowItDraws
    rest: Rest = field(default_factory=Rest)


@dataclass(slots=True, eq=False)
class _Run:
    """See draft_loop.Run. place: the row of the last call that is its own."""

    row: int
    seq: _Sequence
    most: int
    position: int
    place: int
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def take(self, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.chances.append(chance)
        self.position += 1


class MedusaDrafter:
    """aux           the target's states behind its final norm
    max_seqs      that a step of the target may have
    """

    def __init__(
        self,
        ops: Ops,
        model: MedusaHeads,
        aux: AuxHiddenStates,
        max_seqs: int,
        speculation: SpeculationConfig,
    ) -> None:
        self.aux = aux
        self.late_s = 0.0
        self.kv = None
        self.weights_bytes = model.num_bytes
        most_runs = min(max_seqs, MOST_DRAFTS)
        self._states_SD = np.zeros((most_runs, model.width), np.float32)
        limits = StepLimits(most_runs, 1, 1, most_runs)
        self._programs: list[Program] = [
            ops.compile(partial(head.forward, states_SD=self._states_SD), limits)
            for head in model.heads[: speculation.num_speculative_tokens]
        ]
        self._loop = DraftLoop(MEDUSA, speculation, model.vocab_size)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def scratch_bytes(self) -> int | None:
        num_bytes = self._states_SD.nbytes + self.aux.num_bytes
        for program in self._programs:
            if program.scratch_bytes is None:
                return None
            num_bytes += program.scratch_bytes
        return num_bytes

    def propose(self, step: ComputedStep) -> dict[int, Drafts]:
        for number in step.plan.released:
            self._sequences.pop(number, None)
        for row in step.plan.rows:
            if row.intro is not None:
                self._sequences[row.seq] = _Sequence(HowItDraws.of(row.intro))
        if not self._loop.begin(step):
            return {}
        runs = self._runs(step)
        return self._loop.draft(runs, len(runs), self._compute)

    def _runs(self, step: ComputedStep) -> list[_Run]:
        """With the states that they go by in their places."""
        runs: list[_Run] = []
        for piece in step.aux:
            row, drawn = step.plan.rows[piece.row], step.drawn[piece.row]
            known = self._sequences.get(row.seq)
            if known is None or not drawn or drawn[0] < 0:
                continue
            position = row.start + row.num_tokens - len(row.drafts) + len(drawn)
            at = position - 2 - piece.start  # of the token before the last one that was drawn
            if not 0 <= at < len(piece.states[0]):
                continue  # in another piece of this row
            if not known.rest.note_step(bool(row.drafts)) or len(runs) == len(self._states_SD):
                continue
            self._states_SD[len(runs)] = piece.states[0][at]
            runs.append(_Run(piece.row, known, len(self._programs), position, len(runs)))
        return runs

    def _compute(self, runs: list[_Run], draws: Draws | None) -> int:
        """Have the next head guess."""
        num_seqs = len(runs)
        self._states_SD[:num_seqs] = self._states_SD[[run.place for run in runs]]
        for place, run in enumerate(runs):
            run.place = place
        zeros_S, ends = np.zeros(num_seqs, np.int32), np.array([0, num_seqs], np.int32)
        tables = np.zeros((1, 1), np.int32)
        batch = StepBatch(zeros_S, zeros_S, ends, ends[1:], tables, np.arange(num_seqs, dtype=np.int32))
        self._programs[len(runs[0].tokens)](batch, draws)
        return num_seqs
