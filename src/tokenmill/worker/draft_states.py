"""A layer beside the target as a drafter: one of the target's own (models/mtp.py) or an EAGLE-3 head
(models/eagle3.py). At each position it is given a state that the target had there and the token that follows.

What a step computes, prompts too, the layer computes right after it, since states are gone with the next one. So KV
that it misses, as after a hit in KV from a store, can never be computed: that sequence has no drafts. Where drafts do
not pay (draft_length.py) all sequences that there are become such, and nothing is computed until there is a new one
that is to be tried. While it drafts the layer is given its own states; its KV of these positions is written again when
the target has computed them.

A step is followed by one thread, that which computes it, in the order of the plans.

    T tokens  D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from ..core.block import KVGroup
from ..core.speculation import SpeculationConfig
from ..core.step import Drafts
from ..models.decoder import AuxHiddenStates
from ..ops.api import Array, Ops, StepBatch, StepLimits
from ..ops.forward import ForwardOps
from ..ops.kv_pool import KVPool
from .draft_loop import DraftLoop
from .draft_runs import DraftRun, DraftRunner
from .draft_sequences import DraftSequences, spare_blocks
from .model_drafter import AuxRows, ComputedStep

JoinStates = Callable[[ForwardOps, Sequence[Array]], Array]

_JOINED = 256
"""Tokens whose states are joined in a call."""


class StateModel(Protocol):
    """Such a layer with what is before and behind it. width: of a state. vocab_size: tokens that it knows. forward: see
    MtpModel."""

    @property
    def width(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_group(self) -> KVGroup: ...

    @property
    def num_bytes(self) -> int: ...

    def forward(self, ops: ForwardOps, kv: Any, batch: Any, states: np.ndarray, made: np.ndarray) -> Array: ...


class StateDrafter:
    """model         the layer
    aux           the target's states, of which it is given
    join          what this makes of those of a token; None: the only one
    pool          of as many blocks as the target's group has, and spare ones for each sequence of a step
    limits        of state_limits
    source        the drafter's name
    num_tables    block tables of a sequence, of which the first is that of the target's group
    """

    def __init__(
        self,
        ops: Ops,
        model: StateModel,
        aux: AuxHiddenStates,
        pool: KVPool,
        limits: StepLimits,
        speculation: SpeculationConfig,
        *,
        source: str,
        num_tables: int,
        join: JoinStates | None = None,
    ) -> None:
        self.aux = aux
        self.late_s = 0.0
        self.weights_bytes = model.num_bytes
        self._limits = limits
        self._most_drafts = speculation.num_speculative_tokens
        self.kv = DraftSequences(
            pool, limits, self._most_drafts, num_tables=num_tables, vocab_size=model.vocab_size, ahead=1
        )
        self._given_TD, self._made_TD = (np.zeros((limits.max_tokens, model.width), np.float32) for _ in "gm")
        self._program = ops.compile(
            lambda recorder, batch: model.forward(recorder, pool.kv, batch, self._given_TD, self._made_TD), limits
        )
        self._loop = DraftLoop(source, speculation, model.vocab_size)
        self._runner = DraftRunner(self._program, self.kv, self._loop)
        self._joining = None if join is None else Joining(ops, join, aux, model.width)

    @property
    def scratch_bytes(self) -> int | None:
        known = [self._program.scratch_bytes, 0 if self._joining is None else self._joining.scratch_bytes]
        if None in known:
            return None
        return sum(filter(None, known)) + self._given_TD.nbytes + self._made_TD.nbytes + self.aux.num_bytes

    def propose(self, step: ComputedStep) -> dict[int, Drafts]:
        if not self._runner.begin(step):
            self.kv.lose_all()
        if not self.kv.num_sequences:
            return {}
        runs, states = self._runs(step)
        if not runs:
            return {}
        parts = [np.concatenate(each) for each in zip(*states, strict=True)]
        self._given_TD[: len(parts[0])] = parts[0] if self._joining is None else self._joining.join(parts)
        return self._runner.draft(runs, sum([run.most > 0 for run in runs]), self._give, self._note)

    def _runs(self, step: ComputedStep) -> tuple[list[DraftRun], list[tuple[np.ndarray, ...]]]:
        """What is to be computed of the step's positions, and the target's states there; those that draft, first."""
        parts: dict[int, list[AuxRows]] = {}
        for each in step.aux:
            parts.setdefault(each.row, []).append(each)
        found: list[tuple[DraftRun, tuple[np.ndarray, ...]]] = []
        num_drafting = 0
        for row, pieces in parts.items():
            known, drawn = self.kv.get(step.plan.rows[row].seq), step.drawn[row]
            if known is None:
                continue
            self.kv.advance(known)
            begin, start = pieces[0].start, known.num_valid
            end = min(begin + sum([len(piece.states[0]) for piece in pieces]), known.num_inputs)
            if not begin <= start < end:
                continue
            run = DraftRun(row, known, 0, start, end)
            rests = not (known.rest.note_step(bool(step.plan.rows[row].drafts)) or self._loop.is_tried)
            if drawn and end == known.num_inputs and not rests and num_drafting < self._limits.max_logit_rows:
                run.most = max(0, min(self._most_drafts, self.kv.max_tokens - known.num_tokens))
                num_drafting += run.most > 0
            here = slice(start - begin, end - begin)
            states = zip(*[piece.states for piece in pieces], strict=True)
            found.append((run, tuple([np.concatenate(each)[here] for each in states])))
        found.sort(key=lambda each: each[0].most == 0)
        return [run for run, _ in found], [states for _, states in found]

    def _give(self, runs: list[DraftRun]) -> None:
        """In a first call, the target's states have been put there."""
        if runs[0].tokens:
            self._given_TD[: len(runs)] = self._made_TD[[run.last for run in runs]]

    def _note(self, runs: list[DraftRun]) -> None:
        for run in runs:
            if not run.tokens:
                self.kv.note(run.seq, run.start, run.end)


class Joining:
    """What makes one state of those of several layers of the target. It is computed of tokens that the drafter takes in
    alone, beside its own steps."""

    def __init__(self, ops: Ops, join: JoinStates, aux: AuxHiddenStates, width: int) -> None:
        parts = self._parts = tuple(np.zeros((_JOINED, array.shape[1]), np.float32) for array in aux.arrays)
        joined_TD = self._joined_TD = np.zeros((_JOINED, width), np.float32)

        def forward(recorder: ForwardOps, batch: Any) -> Array:
            x_TD = join(recorder, [recorder.load_rows(part, batch.tokens_T) for part in parts])
            recorder.store_rows(x_TD, joined_TD)
            return recorder.gather_rows(x_TD, batch.logit_rows_L)

        self._program = ops.compile(forward, StepLimits(_JOINED, 1, 1, 0))

    @property
    def scratch_bytes(self) -> int | None:
        known = self._program.scratch_bytes
        return None if known is None else known + self._joined_TD.nbytes + sum(part.nbytes for part in self._parts)

    def join(self, states: Sequence[np.ndarray]) -> np.ndarray:
        """float32 [T, D] of an array of each layer."""
        joined = []
        for begin in range(0, len(states[0]), _JOINED):
            num_tokens = min(_JOINED, len(states[0]) - begin)
            for part, each in zip(self._parts, states, strict=True):
                part[:num_tokens] = each[begin : begin + num_tokens]
            places_T, ends = np.arange(num_tokens, dtype=np.int32), np.array([0, num_tokens], np.int32)
            tables = np.zeros((1, 1), np.int32)
            self._program(StepBatch(np.zeros_like(places_T), places_T, ends, ends[1:], tables, places_T[:0]))
            joined.append(self._joined_TD[:num_tokens].copy())
        return np.concatenate(joined)


def state_limits(target: StepLimits, block_size: int, most_drafts: int) -> StepLimits:
    """Of the steps of such a layer: all that the target computes, with spare blocks in each table."""
    return replace(target, max_blocks_per_seq=target.max_blocks_per_seq + spare_blocks(most_drafts, block_size))
