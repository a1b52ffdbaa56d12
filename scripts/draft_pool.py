"""A pool of n-grams that the model itself drew behind wrong drafts, as Lookahead decoding has it (arXiv 2402.02057),
without rows of its own for making them or with such rows. Part of `draft_study.py`.

A step computes the token that is known last and k drafts behind it, one after the other. What it draws behind the first
wrong draft is no token of the answer, but what the model says to other tokens before; each such draw goes into the pool
with the tokens before it. Rows that are only there to draw have what the step before drew in their places (Jacobi
decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draft_answers import Answer
from tokenmill.core.speculation import NGRAM, SUFFIX, SpeculationConfig
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.hub import resolve_model
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.drafts import Wanted
from tokenmill.ops.native.drafter import NativeDrafter
from tokenmill.ops.select import select_ops

_BLOCK, _MAX_LEN, _CHUNK = 16, 4096, 512
_CONTEXT = 4
"""Tokens before a draw that are kept with it."""
_MOST_KEPT = 1024
"""Draws in the pool, the latest ones."""


class Greedy:
    """The model, for one sequence: what it draws behind each of some tokens."""

    def __init__(self, name: str) -> None:
        ops = select_ops("native")
        model = load_model(open_checkpoint(resolve_model(name).path), ops, max_model_len=_MAX_LEN, block_size=_BLOCK)
        self._table = np.arange(_MAX_LEN // _BLOCK, dtype=np.int32)[None]
        pool = ops.new_pool(model.kv_group, self._table.size)
        limits = StepLimits(_CHUNK, 1, self._table.size, 64)
        self._program = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)

    def compute(self, tokens: Sequence[int], start: int, num_draws: int = 0) -> list[int]:
        """At positions from `start` on; of the last rows, what is drawn."""
        for first in range(0, len(tokens), _CHUNK):
            part = tokens[first : first + _CHUNK]
            end = start + first + len(part)
            batch = StepBatch(
                tokens_T=np.array(part, np.int32),
                positions_T=np.arange(start + first, end, dtype=np.int32),
                row_starts_S1=np.array([0, len(part)], np.int32),
                context_lens_S=np.array([end], np.int32),
                block_tables_SB=np.ascontiguousarray(self._table[:, : -(-end // _BLOCK)]),
                logit_rows_L=np.arange(len(part) - min(num_draws, len(part)), len(part), dtype=np.int32),
            )
            logits_LV = self._program(batch)
        drawn: list[int] = logits_LV.argmax(axis=1).tolist() if num_draws else []
        return drawn


class Drafting:
    """Of one answer. other: drafts first; None: nobody does. has_pool: what is missing to k drafts comes from the pool.
    fills: and behind that, rows are computed that are only there to draw."""

    def __init__(self, other: NativeDrafter | None, seq: int, k: int, has_pool: bool, fills: bool) -> None:
        self._other, self._seq, self._k, self._has_pool, self._fills = other, seq, k, has_pool, fills
        self._contexts = np.empty((0, _CONTEXT), np.int64)  # of each draw that was kept
        self._draws = np.empty(0, np.int64)
        self._line: list[int] = []  # what the last step drew behind what is known

    def drafts(self, known: Sequence[int], new: Sequence[int]) -> list[int]:
        found: list[int] = []
        if self._other is not None:
            (proposed,) = self._other.propose([Wanted(self._seq, new, self._k)])
            found += proposed.tokens if proposed is not None else ()
        while self._has_pool and len(found) < self._k and (token := self._next([*known, *found])) is not None:
            found.append(token)
        if self._fills:
            found += self._line[len(found) :]
            found += [known[-1]] * (self._k - len(found))
        return found[: self._k]

    def _next(self, tokens: Sequence[int]) -> int | None:
        """What was drawn the last time behind the longest end of these; None: nothing was."""
        equal = self._contexts == _context(tokens)
        lengths = np.logical_and.accumulate(equal[:, ::-1], axis=1).sum(axis=1)
        longest = lengths.max(initial=0)
        return int(self._draws[np.flatnonzero(lengths == longest)[-1]]) if longest else None

    def note(self, known: Sequence[int], drafts: Sequence[int], drawn: Sequence[int], num_right: int) -> None:
        self._line = list(drawn[num_right + 1 :])
        for row in range(num_right + 1, len(drawn)):
            context = _context([*known, *drafts[:row]])
            self._contexts = np.concatenate([self._contexts, [context]])[-_MOST_KEPT:]
            self._draws = np.append(self._draws, drawn[row])[-_MOST_KEPT:]


def _context(tokens: Sequence[int]) -> list[int]:
    return [*[-1] * _CONTEXT, *tokens[-_CONTEXT:]][-_CONTEXT:]


def run(model: Greedy, each: Answer, drafting: Drafting, costs: Sequence[float]) -> tuple[int, int, float]:
    """Tokens, steps, and what the steps take. The model has computed all of the prompt."""
    at, num_steps, cost, new = 1, 0, 0.0, each.prompt + each.answer[:1]
    while at < len(each.answer):
        known = each.prompt + each.answer[:at]
        drafts = drafting.drafts(known, new)
        drawn = model.compute([known[-1], *drafts], len(known) - 1, 1 + len(drafts))
        wrong = [place for place, (draft, token) in enumerate(zip(drafts, drawn, strict=False)) if draft != token]
        num_right = wrong[0] if wrong else len(drafts)
        new = each.answer[at : at + num_right + 1]
        assert drawn[: len(new)] == new, "the model draws another answer than was recorded"
        drafting.note(known, drafts, drawn, num_right)
        at, num_steps, cost = at + len(new), num_steps + 1, cost + costs[1 + len(drafts)]
    return len(each.answer) - 1, num_steps, cost


_NGRAM, _SHORT = SpeculationConfig(methods=(NGRAM,)), SpeculationConfig(methods=(NGRAM,), prompt_lookup_min=1)
_SUFFIX = SpeculationConfig(methods=(SUFFIX,))
WAYS: dict[str, tuple[SpeculationConfig | None, bool, bool]] = {
    "ngram": (_NGRAM, False, False),
    "ngram of 1 to 5 tokens": (_SHORT, False, False),
    "suffix": (_SUFFIX, False, False),
    "pool, rows to fill it": (None, True, True),
    "ngram, then pool": (_NGRAM, True, False),
    "suffix, then pool": (_SUFFIX, True, False),
    "suffix, then pool, rows to fill it": (_SUFFIX, True, True),
}
"""Who drafts first, whether the pool does behind it, and whether there are rows only to draw."""


def compare(
    model: Greedy, answers: Sequence[Answer], vocab_size: int, k: int, costs: Sequence[float]
) -> dict[str, tuple[float, float]]:
    """By way, tokens a step and tokens a second, as a multiple of those without drafts; at most k drafts a step."""
    drafters = {way: NativeDrafter(config, vocab_size) for way, (config, *_) in WAYS.items() if config is not None}
    sums = {way: np.zeros(3) for way in WAYS}
    for seq, each in enumerate(answers):
        model.compute(each.prompt, 0)
        for way, (_, has_pool, fills) in WAYS.items():
            drafter = drafters.get(way)
            if drafter is not None:
                drafter.begin(seq, "", len(each.prompt), len(each.prompt))
            sums[way] += run(model, each, Drafting(drafter, seq, k, has_pool, fills), costs)
            if drafter is not None:
                drafter.end(seq)
    for drafter in drafters.values():
        drafter.close()
    return {way: (tokens / steps, tokens / cost) for way, (tokens, steps, cost) in sums.items()}
