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
from dataclasses import replace

from ..core.speculation import DRAFT_MODEL, MOST_DRAFTS, SpeculationConfig
from ..core.step import Drafts, StepPlan
from ..models.config import ModelConfig
from ..models.loader import Model
from ..ops.api import Ops, StepLimits
from ..ops.kv_pool import KVPool
from .draft_loop import DraftLoop
from .draft_runs import DraftRun, DraftRunner
from .draft_sequences import DraftSequences, spare_blocks
from .memory import step_limits
from .model_drafter import ComputedStep

CATCH_UP = 128
"""Tokens a step that the drafter computes behind the target, all sequences together: it must not hold up the rest."""

_USUAL = 2
"""Tokens of a sequence that are computed before its next draft, at most, where the one before it was verified: what was
drawn, and the last draft."""


class DraftModel:
    """model         the drafter, with one KV group
    pool          of as many blocks as the target's group has, and spare ones for each sequence of a call
    num_tables    block tables of a sequence, of which the first is that of the target's group
    target_vocab  ids below this may be drafted
    """

    def __init__(
        self,
        ops: Ops,
        model: Model,
        pool: KVPool,
        limits: StepLimits,
        speculation: SpeculationConfig,
        *,
        num_tables: int,
        target_vocab: int,
    ) -> None:
        self.aux = None
        self.late_s = self._began_s = 0.0
        self.weights_bytes = model.num_bytes
        self._limits = limits
        self._most_drafts = speculation.num_speculative_tokens
        vocab_size = min(target_vocab, model.config.vocab_size)
        self.kv = DraftSequences(pool, limits, self._most_drafts, num_tables=num_tables, vocab_size=vocab_size)
        self._max_tokens = min(self.kv.max_tokens, model.config.max_context)
        self._program = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)
        self._runner = DraftRunner(self._program, self.kv, DraftLoop(DRAFT_MODEL, speculation, vocab_size))

    @property
    def scratch_bytes(self) -> int | None:
        return self._program.scratch_bytes

    def propose(self, step: ComputedStep) -> dict[int, Drafts]:
        self.late_s = 0.0
        if not self._runner.begin(step):
            return {}
        runs, num_drafting = self._runs(step.plan, step.drawn)
        return self._runner.draft(runs, num_drafting, self._begin, self._note)

    def _begin(self, runs: list[DraftRun]) -> None:
        self._began_s = time.perf_counter()

    def _note(self, runs: list[DraftRun]) -> None:
        num_tokens, num_usual = sum([run.end - run.start for run in runs]), _USUAL * len(runs)
        if num_tokens > num_usual:
            self.late_s += (time.perf_counter() - self._began_s) * (1 - num_usual / num_tokens)
        for run in runs:
            self.kv.note(run.seq, run.start, run.end)

    def _runs(self, plan: StepPlan, drawn: Sequence[tuple[int, ...]]) -> tuple[list[DraftRun], int]:
        """Those that draft, in the order of the plan, and how many; then one that only catches up, if there is one and
        room for it."""
        size, room = self.kv.block_size, self._limits.max_tokens
        runs: list[DraftRun] = []
        late: DraftRun | None = None
        for row, tokens in enumerate(drawn):
            known = self.kv.get(plan.rows[row].seq) if tokens else None
            if known is None or known.num_tokens > self._max_tokens:
                continue
            if not known.rest.note_step(bool(plan.rows[row].drafts)):
                continue
            self.kv.advance(known)
            num_new = known.num_tokens - known.num_valid
            most = min(self._most_drafts, self._max_tokens - known.num_tokens)
            run = DraftRun(row, known, most, known.num_valid, known.num_tokens)
            if most > 0 and num_new <= room and len(runs) < self._limits.max_logit_rows:
                runs.append(run)
                room -= num_new
            elif late is None and num_new > size:
                late = run
        num_drafting = len(runs)
        if late is not None and room > 0:
            late.end = min(late.end, late.start + room)
            runs.append(late)
        return runs, num_drafting


def drafter_limits(model: ModelConfig, target: StepLimits, block_size: int, most_drafts: int) -> StepLimits:
    """Of the steps of a drafter beside a target with such limits: tables have room for spare blocks, too."""
    limits = step_limits(
        model,
        max_model_len=target.max_blocks_per_seq * block_size,
        max_num_batched_tokens=MOST_DRAFTS + CATCH_UP,
        max_num_seqs=min(target.max_seqs, MOST_DRAFTS),
        block_size=block_size,
    )
    max_blocks = limits.max_blocks_per_seq + spare_blocks(most_drafts, block_size)
    return replace(limits, max_seqs=limits.max_logit_rows + 1, max_blocks_per_seq=max_blocks)
