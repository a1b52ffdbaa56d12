"""Runs one step plan: state, arrays, the model's program, tokens. Synchronous and single-threaded by contract.

Order within a step, which later steps and other rows rely on:

    1  forget released sequences, take introductions and table deltas, of all rows
    2  for each piece (nearly always one): arrays -> logits -> tokens and logprobs
    3  remember what was drawn, for rows of later steps that name this one

It decides nothing: what runs, and where its KV lies, is in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ..core.step import RowResult, StepPlan, StepResult, TokenLogprob
from ..ops.api import Ops, Program, StepLimits
from .adapters import Adapters
from .batch import Part, Slots, build_batch, part_of_row, pieces
from .sampler import Sampler


class Runner:
    """`program`: the model's compiled forward."""

    def __init__(
        self,
        ops: Ops,
        program: Program,
        limits: StepLimits,
        *,
        vocab_size: int,
        block_size: int,
        num_blocks: int,
        num_tables: int = 1,
        adapters: Adapters | None = None,
    ) -> None:
        self._program = program
        self._adapters = adapters
        self._adapter_of: dict[int, int] = {}  # by slot, of sequences that have one: where its changes lie
        self._limits = limits
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._slots = Slots(limits.max_seqs, limits.max_blocks_per_seq, num_blocks, num_tables)
        self._sampler = Sampler(ops, vocab_size, limits.max_seqs)
        self._scores: dict[int, _PromptScores] = {}  # by slot, of sequences that want prompt logprobs

    def run(self, plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        results: list[_Collected | None] = [None] * len(plan.rows)
        for piece in pieces(self._take(plan), self._limits.max_logit_rows):
            self._run_piece(plan.step, piece, results)
        rows = tuple(
            RowResult(row.seq) if got is None else RowResult(row.seq, got.tokens, got.logprobs, tuple(got.scores))
            for row, got in zip(plan.rows, results, strict=True)
        )
        return StepResult(plan.step, rows, time.perf_counter() - began_s)

    def _take(self, plan: StepPlan) -> list[Part]:
        """Bring the per-sequence state up to this plan; the plan's rows as parts."""
        slots = self._slots
        for seq in plan.released:
            slots.release(seq)
        parts = []
        for index, row in enumerate(plan.rows):
            num_prompt = 0
            if row.intro is not None:
                slot = slots.introduce(row.seq)
                self._sampler.introduce(slot, row.intro)
                self._scores.pop(slot, None)
                self._introduce_adapter(slot, row.intro.adapter)
                if row.intro.sampling.prompt_logprobs is not None:
                    self._scores[slot] = _PromptScores(row.intro.prompt_tokens, row.intro.sampling.prompt_logprobs)
            else:
                slot = slots[row.seq]
            if row.blocks:
                slots.append_blocks(slot, row.blocks)
            if row.score:
                num_prompt = len(self._scores[slot].prompt_tokens)
            parts.append(part_of_row(index, row, slot, num_prompt))
        return parts

    def _introduce_adapter(self, slot: int, digest: str) -> None:
        self._adapter_of.pop(slot, None)
        if digest:
            assert self._adapters is not None, "a request names an adapter where none can be loaded"
            self._adapter_of[slot] = self._adapters.slot_of(digest)

    def _adapter_of_part(self, part: Part) -> int:
        return self._adapter_of.get(part.slot, 0)

    def _run_piece(self, step: int, piece: list[Part], results: list[_Collected | None]) -> None:
        if self._adapter_of:
            piece = sorted(piece, key=self._adapter_of_part)  # rows that share an adapter side by side
        batch = build_batch(piece, self._slots, self._block_size, self._limits)
        if self._adapter_of:
            adapters_S = [self._adapter_of_part(part) for part in piece]
            batch.adapters_T = np.repeat(np.array(adapters_S, np.int32), np.diff(batch.row_starts_S1))
        if not len(batch.tokens_T):
            return
        assert batch.tokens_T.max() < self._vocab_size, f"a token id beyond the vocabulary of {self._vocab_size}"
        logits_LV = self._program(batch)
        num_scored = sum(part.num_scored for part in piece)
        if num_scored:
            self._score(logits_LV[:num_scored], piece, results)
        if num_scored < len(logits_LV):
            self._sample(logits_LV[num_scored:], step, [part for part in piece if part.sample], results)

    def _score(self, logits_LV: np.ndarray, piece: Sequence[Part], results: list[_Collected | None]) -> None:
        """Logprobs of the known token after each scored position."""
        known: list[int] = []
        num_top: list[int] = []
        scored = [part for part in piece if part.num_scored]
        for part in scored:
            scores = self._scores[part.slot]
            known.extend(scores.prompt_tokens[part.start + 1 : part.start + 1 + part.num_scored])
            num_top.extend([scores.num_top] * part.num_scored)
        entries = iter(self._sampler.score(logits_LV, np.arange(len(known)), np.array(known, np.int32), num_top))
        for part in scored:
            _of_row(results, part.row).scores.extend(islice(entries, part.num_scored))

    def _sample(self, logits_LV: np.ndarray, step: int, sampled: list[Part], results: list[_Collected | None]) -> None:
        slots, count = self._slots, len(sampled)
        slots_L = np.fromiter((part.slot for part in sampled), np.int32, count)
        positions_L = np.fromiter((part.start + part.num_tokens for part in sampled), np.int32, count)
        tokens_L = self._sampler.draw(logits_LV, slots_L, positions_L)
        slots.drawn_token[slots_L] = tokens_L
        slots.drawn_step[slots_L] = step
        logprobs = self._sampler.logprobs(logits_LV, slots_L, tokens_L)
        for index, (part, token) in enumerate(zip(sampled, tokens_L.tolist(), strict=True)):
            result = _of_row(results, part.row)
            result.tokens = (token,)
            if index in logprobs:
                result.logprobs = (logprobs[index],)


@dataclass(frozen=True, slots=True)
class _PromptScores:
    prompt_tokens: tuple[int, ...]
    num_top: int


@dataclass(slots=True)
class _Collected:
    """What one row has given so far; a row cut into pieces gives its scores bit by bit."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: list[TokenLogprob] = field(default_factory=list)


def _of_row(results: list[_Collected | None], row: int) -> _Collected:
    result = results[row]
    if result is None:
        result = results[row] = _Collected()
    return result
