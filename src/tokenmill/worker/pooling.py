"""Runs steps of a model that gives vectors: hidden states to one vector for each sequence.

Which states are wanted follows from how a sequence is pooled: the last token's, the first's, or all. A mean is one sum
that takes the tokens in their order, in float64, so that no chunk or batch changes a bit of it. An encoder's rows are
whole sequences; each gets blocks for the length of the step. What a model scores with runs on what was pooled.

    T tokens  L rows that are wanted  D values of a vector
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..core.request import PoolingParams
from ..core.step import PlanRow, RowResult, StepPlan, StepResult
from ..models.vectors import VectorModel
from ..ops.api import Program, StepBatch, StepLimits
from .batch import RowPart, Slots, build_batch


@dataclass(slots=True)
class _Pooled:
    """What a sequence has given so far. how: "last", "cls" or "mean". `state`: the vector, or of a mean the sum."""

    params: PoolingParams
    how: str
    num_tokens: int
    state: np.ndarray | None = None


@dataclass(slots=True)
class PoolingStep:
    """A prepared step. `pooled`: what each row's sequence gathers."""

    plan: StepPlan
    parts: list[RowPart]
    pooled: list[_Pooled]
    call: Callable[[], np.ndarray] | None = None
    work: Callable[[], Any] = lambda: None


class PoolingRunner:
    """As runner.Runner, for `model`; `program` is its compiled forward, `head` what turns pooled states [S, D] into
    scores [S, N] where it has one."""

    def __init__(
        self,
        model: VectorModel,
        program: Program,
        limits: StepLimits,
        *,
        block_size: int,
        num_blocks: int,
        head: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self._program = program
        self._head = head
        self._head_pools = model.head_pools
        self._keeps_kv = model.keeps_kv
        self._limits = limits
        self._vocab_size = model.config.vocab_size
        self._num_places = model.num_places
        self._num_types = model.num_types
        self._block_size = block_size
        self._slots = Slots(limits.max_seqs, limits.max_blocks_per_seq, num_blocks)
        self._pooled: dict[int, _Pooled] = {}  # by slot

    @property
    def num_used_blocks(self) -> int:
        """As runner.Runner's."""
        return self._slots.num_used

    def give_up(self, plan: StepPlan) -> None:
        """No step waits for another."""

    def hand_over(self) -> None:
        """Nothing is drawn."""

    def prepare(self, plan: StepPlan) -> PoolingStep:
        for seq in plan.released:
            self._slots.release(seq)
        parts = [self._take(index, row) for index, row in enumerate(self._with_blocks(plan))]
        step = PoolingStep(plan, parts, [self._pooled[part.slot] for part in parts])
        if parts:
            batch = build_batch(parts, self._slots, self._block_size, self._limits)
            assert batch.tokens_T.max() < self._vocab_size, f"a token id beyond the vocabulary of {self._vocab_size}"
            if self._num_places:
                batch.places_T = self._places(parts, batch)
            step.call = self._program.bind(batch)
            step.work = partial(self.compute, step)
        return step

    def compute(self, step: PoolingStep) -> None:
        assert step.call is not None
        states_LD = step.call()
        at = 0
        rows = list(zip(step.parts, step.pooled, strict=True))
        for part, pooled in rows:
            self._pool(pooled, states_LD[at : at + part.num_scored])
            at += part.num_scored
        for part, pooled in rows:
            if part.num_draws:
                pooled.state = states_LD[at].copy()
                at += 1
        self._end([pooled for row, pooled in zip(step.plan.rows, step.pooled, strict=True) if row.sample])

    def collect(self, step: PoolingStep, duration_s: float) -> StepResult:
        rows = tuple(self._result(row, pooled) for row, pooled in zip(step.plan.rows, step.pooled, strict=True))
        return StepResult(step.plan.step, rows, duration_s)

    def _with_blocks(self, plan: StepPlan) -> Iterator[tuple[PlanRow, tuple[int, ...]]]:
        """Each row with the blocks it adds: those of the plan, or where the model keeps no KV, ones of this step."""
        next_block = 0
        for row in plan.rows:
            if self._keeps_kv:
                yield row, row.blocks
                continue
            num_blocks = -(-row.num_tokens // self._block_size)
            yield row, tuple(range(next_block, next_block + num_blocks))
            next_block += num_blocks

    def _take(self, index: int, row_blocks: tuple[PlanRow, tuple[int, ...]]) -> RowPart:
        """Bring the sequence's state up to its row; which of the row's states are wanted."""
        row, blocks = row_blocks
        if row.intro is not None:
            assert row.intro.pooling is not None, f"sequence {row.seq} wants tokens of a model that gives vectors"
            slot = self._slots.introduce(row.seq)
            how = self._head_pools if row.intro.pooling.how == "score" else row.intro.pooling.how
            self._pooled[slot] = _Pooled(row.intro.pooling, how, len(row.intro.prompt_tokens))
        else:
            slot = self._slots[row.seq]
        if blocks:
            self._slots.append_blocks(slot, blocks)
        how = self._pooled[slot].how
        leading = row.num_tokens if how == "mean" else int(how == "cls" and row.start == 0)
        num_last = int(row.sample and how == "last")
        return RowPart(index, slot, row.start, row.num_tokens, row.tokens, -1, leading, num_last)

    def _places(self, parts: list[RowPart], batch: StepBatch) -> np.ndarray:
        """Positions, where the table has them; those of a pair's second text in the second part of the table."""
        places_T = batch.positions_T.copy() if self._num_places > 1 else np.zeros_like(batch.positions_T)
        for part, first in zip(parts, batch.row_starts_S1.tolist(), strict=False):
            second_from = self._pooled[part.slot].params.second_from
            if second_from and self._num_types > 1:
                places_T[first + second_from : first + part.num_tokens] += self._num_places
        return places_T

    def _end(self, ended: list[_Pooled]) -> None:
        """Sequences that have given all their states: sums become means, and pooled states scores."""
        states = []
        for pooled in ended:
            assert pooled.state is not None, "a sequence has no state to pool"
            if pooled.how == "mean":
                pooled.state = pooled.state / pooled.num_tokens
            states.append(pooled.state)
        if self._head is not None and states:
            scores = self._head(np.stack(states).astype(np.float32))
            for pooled, values in zip(ended, scores, strict=True):
                pooled.state = values.copy()

    @staticmethod
    def _pool(pooled: _Pooled, states: np.ndarray) -> None:
        if not len(states):
            return
        if pooled.how != "mean":
            pooled.state = states[0].copy()
            return
        if pooled.state is None:
            pooled.state = np.zeros(states.shape[1], np.float64)
        for state_D in states:
            pooled.state += state_D

    @staticmethod
    def _result(row: PlanRow, pooled: _Pooled) -> RowResult:
        if not row.sample:
            return RowResult(row.seq)
        assert pooled.state is not None, f"sequence {row.seq} has no state to pool"
        if not np.isfinite(pooled.state).all():
            return RowResult(row.seq, is_corrupted=True)
        return RowResult(row.seq, vector=finish(pooled.state, pooled.params).tobytes())


def finish(state_D: np.ndarray, params: PoolingParams) -> np.ndarray:
    """The vector of a pooled state, float32: cut, then scaled or mapped."""
    values_D = state_D[: params.dimensions or None].astype(np.float64)
    if params.activation == "unit":
        length = math.sqrt(math.fsum((values_D * values_D).tolist()))
        values_D = values_D / length if length else values_D
    elif params.activation == "sigmoid":
        with np.errstate(over="ignore"):  # exp may be inf, whose reciprocal is the right 0
            values_D = 1 / (1 + np.exp(-values_D))
    return values_D.astype(np.float32)
