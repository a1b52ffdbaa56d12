"""How models draft that compute beside the target: token after token, all sequences of a step together, as far as that
is likely to pay (draft_length.py).

What is computed for a token is the drafter's own affair.

    L draws
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ..core.speculation import SpeculationConfig
from ..core.step import Drafts
from ..ops.draws import Draws, Scores
from .draft_draws import HowItDraws, how_they_draw
from .draft_length import DraftLength, Rest
from .model_drafter import ComputedStep


class Drafted(Protocol):
    """A sequence that is drafted for."""

    @property
    def how(self) -> HowItDraws: ...

    @property
    def rest(self) -> Rest: ...


class Run(Protocol):
    """A sequence's part in the drafting after a step.

    row       of the plan
    most      tokens to draft at most
    position  in the sequence, of the token that is drafted next
    """

    row: int
    most: int
    tokens: list[int]
    chances: list[float]

    @property
    def seq(self) -> Drafted: ...

    @property
    def position(self) -> int: ...

    def take(self, token: int, chance: float) -> None:
        """Draft what was drawn."""
        ...


R = TypeVar("R", bound=Run)


class DraftLoop:
    """source: the drafter's name. vocab_size: ids below this may be drafted."""

    def __init__(self, source: str, speculation: SpeculationConfig, vocab_size: int) -> None:
        self._source = source
        self._speculation = speculation
        self._vocab_size = vocab_size
        self._length = DraftLength()
        self._step_s = self._began_s = self._ended_s = 0.0

    def begin(self, step: ComputedStep) -> bool:
        """Take in a step; whether the drafter is to compute something behind it, by what it has saved and cost."""
        rows, began_s = step.plan.rows, time.perf_counter()
        num_drafts = sum([len(row.drafts) for row in rows])
        waited_s = began_s - step.duration_s - self._ended_s  # between the steps, longer where there was nothing to do
        self._step_s, self._began_s, self._ended_s = step.duration_s, began_s, began_s
        self._length.note_share(step.duration_s)
        if rows and step.plan.num_tokens == len(rows) + num_drafts:
            seconds = step.duration_s + (waited_s if 0 < waited_s < step.duration_s else 0.0)
            self._length.note_step(len(rows), num_drafts, sum(map(len, step.drawn)), seconds)
        return self._length.pays or not self._speculation.adaptive

    @property
    def is_tried(self) -> bool:
        """Whether the drafter has cost more than it has saved, and is only to show if that changes."""
        return self._length.balance_s < 0

    def draft(
        self, runs: list[R], num_drafting: int, compute: Callable[[list[R], Draws | None], int]
    ) -> dict[int, Drafts]:
        """What may follow the first runs, by row; of the others something is computed and no more. compute: what the
        next token of each run is drawn from, and these draws; it gives the number of tokens that it took in."""
        if not runs:
            return {}
        drafting, costs = runs[:num_drafting], self._length.costs(num_drafting)
        while runs:
            drawn = self._draw(runs, num_drafting, compute)
            runs = [
                run
                for run, (token, chance) in zip(runs, drawn, strict=False)
                if 0 <= token < self._vocab_size
                and chance >= self._speculation.p_min
                and self._take(run, token, chance, costs)
            ]
            num_drafting = len(runs)
        for run in drafting:
            run.seq.rest.note_proposal()
        self._ended_s = time.perf_counter()
        self._length.note_spent(self._ended_s - self._began_s, self._step_s, is_try=bool(drafting))
        return {run.row: Drafts(tuple(run.tokens), self._source, tuple(run.chances)) for run in drafting if run.tokens}

    def _take(self, run: Run, token: int, chance: float, costs: Sequence[float]) -> bool:
        """Whether the next token is to be drafted, too."""
        run.take(token, chance)
        if len(run.tokens) >= run.most or not self._speculation.adaptive:
            return len(run.tokens) < run.most
        return self._length.is_worth_more(costs, run.chances, run.most)

    def _draw(
        self, runs: list[R], num_drafting: int, compute: Callable[[list[R], Draws | None], int]
    ) -> list[tuple[int, float]]:
        """What the first runs draw, and how sure the drafter is of them: the probability of what it takes for the most
        likely token, which is the one drawn where a request is greedy."""
        began_s, drafting = time.perf_counter(), runs[:num_drafting]
        how = how_they_draw([run.seq.how for run in drafting], [run.position for run in drafting])
        slots_L, scores = np.arange(num_drafting, dtype=np.int32), Scores.of(np.ones(num_drafting, np.int32))
        tokens_L, kept = np.zeros((2, num_drafting), np.int32)
        draws = Draws(how, slots_L, tokens_L, kept, scores=scores)
        num_tokens = compute(runs, draws if drafting else None)
        chances = np.exp(scores.top_logprobs_Ln.ravel()).tolist()
        if num_tokens <= 2 * num_drafting:
            self._length.note_call(num_drafting, time.perf_counter() - began_s, chances)
        return list(zip(draws.tokens_L.tolist(), chances, strict=True))
