"""Runs one step plan: state, arrays, the model's program, tokens. In three parts, so that two threads can share them:

    prepare   plan -> arrays, and the work that is to be done. Forget released sequences, take introductions and table
              deltas of all rows, cut the rows into micro-batches (nearly always one). A token still to be drawn is
              named by the slot it will lie in.
    work      arrays -> tokens and logprobs: a single call of the program where that is all there is to do, else
              `compute`, which goes micro-batch by micro-batch
    collect   tokens and logprobs -> results, row by row

A row with drafts draws at once what as many steps would draw one after the other, each draw as if the drafts before it
had been drawn. Collecting takes those behind drafts that are what was drawn in their places, so a draft decides how
many tokens a row gives and never which. Nothing is planned on top of such a row before its end, and what its other
draws have left behind is never read: their KV and their places in the history are written again by later rows. A state
is left behind each draft, and collecting puts that behind the last one taken where the next row goes on from it.

Steps are prepared in order by one thread and their work is done in order by one thread, the same or another: a step may
be prepared while earlier ones compute. It decides nothing: what runs, and where its KV lies, is in the plan.

    L rows of logits   V vocabulary
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np

from ..core.step import Drafts, RowResult, StepPlan, StepResult, TokenLogprob
from ..ops.api import Draws, Ops, Program, StepBatch, StepLimits
from ..ops.draws import MASK_LATE, MASK_WAIT_S, NOT_FINITE
from .adapters import Adapters
from .batch import RowPart, Slots, block_tables, build_batch, micro_batches, one_more_on, one_on, part_of_row, room
from .drafters import Drafters
from .grammars import Constrained, Grammars
from .model_drafter import AuxRows, ComputedStep, ModelDrafter
from .sampler import Drawing, Sampler, told

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MicroBatch:
    """A call of the model: what goes in, and what has come out.

    rows      index in the plan of each sequence's row
    sampled   the same of each draw, in the order of `draws`; those of one row are side by side
    scored    index in the plan of each row that scores, and how many positions
    known     of every scored position: the token that follows
    num_top   and how many alternatives to report
    """

    batch: StepBatch
    drawing: Drawing
    draws: Draws
    call: Callable[[], np.ndarray]
    rows: Sequence[int]
    sampled: Sequence[int]
    scored: Sequence[tuple[int, int]] = ()
    known: Sequence[int] = ()
    num_top: Sequence[int] = ()
    scores: Sequence[TokenLogprob] = ()


@dataclass(slots=True)
class PreparedStep:
    """A prepared step.

    is_carried  every row goes one token on from a row of the step before
    ends      if all rows draw one token, in one micro-batch: where each one's context ends, in that order. The next
              step may simply carry them on
    room      tokens that each of them can take at least before its block table must grow
    outgrown  drawn tokens of earlier steps, to be carried over before it computes
    work      what computes it
    has_drafts  some row draws more than one token
    state_blocks  by row: where the states behind its drafts are left
    proposed  by row, what a draft model or its grammar proposes to follow its tokens
    late_s    seconds that a draft model took for tokens of earlier steps
    """

    plan: StepPlan
    micro_batches: list[MicroBatch]
    is_carried: bool = False
    ends: list[int] | None = None
    room: int = 0
    outgrown: np.ndarray | None = None
    work: Callable[[], Any] = lambda: None
    has_drafts: bool = False
    state_blocks: dict[int, range] = field(default_factory=dict)
    proposed: dict[int, Drafts] = field(default_factory=dict)
    late_s: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether one call of the model draws and scores nothing."""
        return len(self.micro_batches) == 1 and not self.micro_batches[0].known


class Runner:
    """`program`: the model's compiled forward. draft_model: None where no model drafts."""

    def __init__(
        self,
        ops: Ops,
        program: Program,
        limits: StepLimits,
        *,
        vocab_size: int,
        block_size: int,
        slots: Slots,
        adapters: Adapters | None = None,
        grammars: Grammars | None = None,
        draft_model: ModelDrafter | None = None,
        drafters: Drafters | None = None,
    ) -> None:
        self._program = program
        self._draft_model = draft_model
        self._drafters = drafters
        self._grammars = grammars
        self._adapters = adapters
        self._adapter_of: dict[int, int] = {}  # by slot, of sequences that have one: where its changes lie
        self._limits = limits
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._slots = slots
        max_context = limits.max_blocks_per_seq * block_size
        self._sampler = Sampler(ops, vocab_size, limits.max_seqs, max_context, grammars)
        self._drawn = np.zeros(len(self._slots), np.int32)
        self._scores: dict[int, _PromptScores] = {}  # by slot, of sequences that want prompt logprobs
        self._latest: PreparedStep | None = None

    @property
    def num_used_blocks(self) -> int:
        """Of the largest pool, up to the highest id there has been; any thread may ask."""
        return self._slots.num_used

    def hand_over(self) -> None:
        """What a prepared step may take as late as at its draws."""
        self._sampler.hand_over_masks()

    def forget_tenants(self, tenants: Sequence[str]) -> None:
        """They are deleted: nothing of what they were told outlives this."""
        if self._drafters is not None:
            self._drafters.forget_tenants(tenants)

    def give_up(self, plan: StepPlan) -> None:
        """A step has failed: no token comes from it, for which a later one would wait."""
        for row in plan.rows:
            if row.seq in self._slots:
                self._sampler.give_up(self._slots[row.seq])

    # ---- prepare ----

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Raises what is wrong with the plan."""
        latest, self._latest = self._latest, None
        for seq in plan.released:
            slot = self._slots.release(seq)
            self._adapter_of.pop(slot, None)
            self._sampler.release(slot)
            if self._drafters is not None:
                self._drafters.release(seq)
        step = self._carry_on(latest, plan)
        if step is None:
            if latest is not None and latest.is_carried:
                self._slots.drawn_step[latest.micro_batches[0].draws.slots_L] = latest.plan.step
            step = self._prepare_anew(plan)
        self._latest = step
        is_call = step.outgrown is None and self._draft_model is None and step.is_plain
        step.work = step.micro_batches[0].call if is_call else partial(self.compute, step)
        return step

    def _carry_on(self, before: PreparedStep | None, plan: StepPlan) -> PreparedStep | None:
        """The plan's step if every row goes one token on from a row of the step before; most arrays are that step's."""
        if before is None or before.ends is None or len(plan.rows) != len(before.ends):
            return None
        (micro_batch,) = before.micro_batches
        number, has_grown = before.plan.step, False
        for index, end in zip(micro_batch.sampled, before.ends, strict=True):
            row = plan.rows[index]
            if row.start != end or row.from_step != number or row.seq != before.plan.rows[index].seq or row.drafts:
                return None
            has_grown = has_grown or bool(row.blocks)
        slots_S = micro_batch.draws.slots_L
        if has_grown:
            for row in plan.rows:
                if row.blocks:
                    self._slots.append_blocks(self._slots[row.seq], row.blocks)
        batch = one_on(micro_batch.batch, slots_S) if not before.is_carried else one_more_on(micro_batch.batch)
        ends, left = [end + 1 for end in before.ends], before.room - 1
        if has_grown:
            slots = slots_S.tolist()
            batch.block_tables_SB = block_tables(self._slots, slots, ends, self._block_size)
            left = room(self._slots, slots, ends, self._block_size)
        assert left >= 0, "a row reaches beyond its block table"
        sampled = micro_batch.sampled
        carried = self._bind(batch, micro_batch.drawing.advanced(), slots_S, sampled, sampled)
        return PreparedStep(plan, [carried], True, ends, left)

    def _prepare_anew(self, plan: StepPlan) -> PreparedStep:
        parts, state_blocks = self._take(plan)
        outgrown = None
        if len(self._slots) > len(self._drawn):
            outgrown, self._drawn = self._drawn, np.zeros(len(self._slots), np.int32)
        cut = [
            self._prepare_micro_batch(plan.step, micro_batch)
            for micro_batch in micro_batches(parts, self._limits.max_logit_rows)
            if micro_batch
        ]
        has_drafts = any(part.num_draws > 1 for part in parts)
        step = PreparedStep(plan, cut, outgrown=outgrown, has_drafts=has_drafts, state_blocks=state_blocks)
        if len(cut) == 1 and all(part.num_draws == 1 and not part.num_scored for part in parts):
            step.ends = cut[0].batch.context_lens_S.tolist()
            step.room = room(self._slots, cut[0].draws.slots_L.tolist(), step.ends, self._block_size)
        return step

    def _take(self, plan: StepPlan) -> tuple[list[RowPart], dict[int, range]]:
        """Bring the per-sequence state up to this plan; the plan's rows as parts, and PreparedStep.state_blocks."""
        slots = self._slots
        parts: list[RowPart] = []
        state_blocks = self._state_blocks(plan)
        for index, row in enumerate(plan.rows):
            num_prompt = 0
            if row.intro is not None:
                slot = slots.introduce(row.seq)
                self._sampler.introduce(slot, row.intro)
                self._scores.pop(slot, None)
                self._introduce_adapter(slot, row.intro.adapter)
                if self._drafters is not None:
                    self._drafters.introduce(plan.step, row.seq, row.intro)
                if row.intro.sampling.prompt_logprobs is not None:
                    self._scores[slot] = _PromptScores(row.intro.prompt_tokens, row.intro.sampling.prompt_logprobs)
            else:
                slot = slots[row.seq]
            if row.blocks:
                slots.append_blocks(slot, row.blocks)
            if row.score:
                num_prompt = len(self._scores[slot].prompt_tokens)
                slots.fill(slot, row.start // self._block_size)
            parts.append(part_of_row(index, row, slot, num_prompt, state_blocks.get(index, ())))
        return parts, state_blocks

    def _state_blocks(self, plan: StepPlan) -> dict[int, range]:
        """See PreparedStep."""
        if self._slots.draft_states is None:
            return {}
        blocks: dict[int, range] = {}
        first = self._slots.draft_states.first
        for index, row in enumerate(plan.rows):
            if row.drafts:
                blocks[index] = range(first, first := first + len(row.drafts))
        return blocks

    def _introduce_adapter(self, slot: int, digest: str) -> None:
        self._adapter_of.pop(slot, None)
        if digest:
            assert self._adapters is not None, "a request names an adapter where none can be loaded"
            self._adapter_of[slot] = self._adapters.slot_of(digest)

    def _adapter_of_part(self, part: RowPart) -> int:
        return self._adapter_of.get(part.slot, 0)

    def _prepare_micro_batch(self, step: int, parts: list[RowPart]) -> MicroBatch:
        if self._adapter_of:
            parts = sorted(parts, key=self._adapter_of_part)  # rows that share an adapter side by side
        batch = build_batch(parts, self._slots, self._block_size, self._limits)
        if self._adapter_of:
            adapters_S = [self._adapter_of_part(part) for part in parts]
            batch.adapters_T = np.repeat(np.array(adapters_S, np.int32), np.diff(batch.row_starts_S1))
        assert batch.tokens_T.max() < self._vocab_size, f"a token id beyond the vocabulary of {self._vocab_size}"
        micro_batch = self._prepare_draws(step, batch, parts)
        scored = [part for part in parts if part.num_scored]
        if scored:
            known: list[int] = []
            num_top: list[int] = []
            for part in scored:
                scores = self._scores[part.slot]
                known.extend(scores.prompt_tokens[part.start + 1 : part.start + 1 + part.num_scored])
                num_top.extend([scores.num_top] * part.num_scored)
            micro_batch.scored = [(part.row, part.num_scored) for part in scored]
            micro_batch.known, micro_batch.num_top = known, num_top
        return micro_batch

    def _prepare_draws(self, step: int, batch: StepBatch, parts: list[RowPart]) -> MicroBatch:
        slots, positions, sampled = list[int](), list[int](), list[int]()
        drafts: dict[int, tuple[int, ...]] = {}
        for part in parts:
            num_draws, end = part.num_draws, part.start + part.num_tokens
            if num_draws:
                self._slots.drawn_step[part.slot] = step if num_draws == 1 else -1
                if num_draws > 1:
                    drafts[len(sampled)] = part.tokens[1 - num_draws :]
                slots += [part.slot] * num_draws
                positions += range(end - num_draws + 1, end + 1)
                sampled += [part.row] * num_draws
        slots_L, positions_L = np.array(slots, np.int32), np.array(positions, np.int32)
        rows = [part.row for part in parts]
        return self._bind(batch, self._sampler.prepare(slots_L, positions_L, drafts), slots_L, rows, sampled)

    def _bind(
        self, batch: StepBatch, drawing: Drawing, slots_L: np.ndarray, rows: Sequence[int], sampled: Sequence[int]
    ) -> MicroBatch:
        draws = drawing.draws(slots_L, self._drawn)
        return MicroBatch(batch, drawing, draws, self._program.bind(batch, draws), rows, sampled)

    # ---- compute ----

    def compute(self, step: PreparedStep) -> None:
        began_s, aux = time.perf_counter(), None if self._draft_model is None else self._draft_model.aux
        aux_rows: list[Iterator[AuxRows]] = []
        if step.outgrown is not None:
            for micro_batch in step.micro_batches:
                micro_batch.draws.drawn[: len(step.outgrown)] = step.outgrown
        for micro_batch in step.micro_batches:
            logits_LV = micro_batch.call()
            if aux is not None:
                is_last, num_tokens = micro_batch is step.micro_batches[-1], len(micro_batch.batch.tokens_T)
                arrays = aux.arrays if is_last else tuple([array[:num_tokens].copy() for array in aux.arrays])
                aux_rows.append(_aux_rows(arrays, micro_batch))
            if micro_batch.known:
                known = np.array(micro_batch.known, np.int32)
                micro_batch.scores = self._sampler.score(logits_LV, np.arange(len(known)), known, micro_batch.num_top)
        if self._draft_model is not None:
            self._propose(step, self._draft_model, time.perf_counter() - began_s, chain.from_iterable(aux_rows))

    def _propose(
        self, step: PreparedStep, draft_model: ModelDrafter, step_s: float, aux_rows: Iterable[AuxRows]
    ) -> None:
        """What the step has drawn stands, whatever becomes of drafts."""
        taken: list[tuple[int, ...]] = [()] * len(step.plan.rows)
        for micro_batch in step.micro_batches:
            drawn = self._drawn_tokens(micro_batch)
            for row, draws in _taken(step, micro_batch, drawn):
                taken[row] = tuple(drawn[index] for index in draws)
        try:
            step.proposed = draft_model.propose(ComputedStep(step.plan, taken, step_s, aux_rows))
            step.late_s = draft_model.late_s
        except Exception:
            log.exception("The draft model has failed. It drafts no more until the server is started again.")
            self._draft_model = None

    # ---- collect ----

    def collect(self, step: PreparedStep, duration_s: float) -> StepResult:
        """Of a step whose work has been done, in that time."""
        if step.state_blocks:
            self._restore_states(step)
        rows = self._results(step)
        if self._drafters is not None:
            rows = self._drafters.propose(step.plan.step, rows)
        return StepResult(step.plan.step, rows, duration_s, step.late_s)

    def _restore_states(self, step: PreparedStep) -> None:
        """Of rows whose last drafts are not taken: the state behind the last draft that is, in the place of what came
        after it."""
        assert self._slots.draft_states is not None
        pool, table = self._slots.draft_states.pool, self._slots.draft_states.table
        for micro_batch in step.micro_batches:
            for row, taken in _taken(step, micro_batch, self._drawn_tokens(micro_batch)):
                planned, num_accepted = step.plan.rows[row], len(taken) - 1
                if num_accepted < len(planned.drafts):
                    position = planned.start + planned.num_tokens - 1 - len(planned.drafts) + num_accepted
                    block = self._slots.block_tables[self._slots[planned.seq], table, position // self._block_size]
                    pool.copy(step.state_blocks[row][num_accepted], int(block))

    def _results(self, step: PreparedStep) -> tuple[RowResult, ...]:
        constrained = self._follow_grammars(step)
        is_more = constrained or step.proposed
        if step.is_plain and step.micro_batches[0].draws.scores is None and not is_more:
            return self._plain_rows(step)
        tokens: dict[int, tuple[int, ...]] = {}
        failed: dict[int, RowResult] = {}
        for row, (one, _) in constrained.items():
            if one.error or one.lacks_mask:
                seq = step.plan.rows[row].seq
                failed[row] = RowResult(seq, error=one.error, is_invalid=one.is_invalid, lacks_mask=one.lacks_mask)
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        scores: dict[int, tuple[TokenLogprob, ...]] = {}
        for micro_batch in step.micro_batches:
            drawn, drawn_scores = self._drawn_tokens(micro_batch), told(micro_batch.draws)
            for row, taken in _taken(step, micro_batch, drawn):
                tokens[row] = tuple(drawn[index] for index in taken)
                logprobs[row] = tuple(drawn_scores[index] for index in taken if index in drawn_scores)
                if tokens[row][0] < 0:
                    failed.setdefault(row, _failed(step.plan.rows[row].seq, tokens[row][0]))
            entries = iter(micro_batch.scores)
            for row, count in micro_batch.scored:
                scored = tuple(islice(entries, count))
                scores[row] = scores.get(row, ()) + scored
                if any(entry.rank == 0 for entry in scored):
                    failed[row] = _failed(step.plan.rows[row].seq, NOT_FINITE)
        rows = [
            RowResult(row.seq, tokens.get(index, ()), logprobs.get(index, ()), scores.get(index, ()))
            if index not in failed
            else failed[index]
            for index, row in enumerate(step.plan.rows)
        ]
        for row, (one, spent_s) in constrained.items():
            rows[row] = rows[row]._replace(spent_s=spent_s, slow_s=one.slow_s)
        for row, drafts in step.proposed.items():
            rows[row] = rows[row]._replace(drafts=drafts)
        return tuple(rows)

    def _follow_grammars(self, step: PreparedStep) -> dict[int, tuple[Constrained, float]]:
        """Have the masks of the tokens to come made, and propose those that must come. By row: those whose masks took
        long, or that were drawn without one, each with the processor time that it has not been charged for."""
        told: dict[int, tuple[Constrained, float]] = {}
        followed: list[tuple[Constrained, Sequence[int]]] = []
        for micro_batch in step.micro_batches:
            constrained = micro_batch.drawing.constrained
            if constrained is None:
                continue
            drawn = micro_batch.draws.tokens_L.tolist()
            for row, taken in _taken(step, micro_batch, drawn):
                one = constrained[taken[0]]
                if one is not None:
                    tokens = [drawn[index] for index in taken]
                    followed.append((one, tokens))
                    if (forced := one.follow_up(tokens)) is not None:
                        step.proposed[row] = forced
                    spent_s = one.charge()
                    if spent_s or one.error or one.lacks_mask:
                        told[row] = one, spent_s
        if followed:
            assert self._grammars is not None
            self._grammars.advance(followed)
        return told

    def _plain_rows(self, step: PreparedStep) -> tuple[RowResult, ...]:
        """Of a step that gives tokens and nothing else."""
        rows, (micro_batch,) = step.plan.rows, step.micro_batches
        tokens: list[tuple[int, ...]] = [()] * len(rows)
        drawn = self._drawn_tokens(micro_batch)
        if step.has_drafts:
            for row, taken in _taken(step, micro_batch, drawn):
                tokens[row] = tuple(drawn[taken[0] : taken[-1] + 1])
        else:
            for index, token in zip(micro_batch.sampled, drawn, strict=True):
                tokens[index] = (token,)
        results = [RowResult(row.seq, drawn) for row, drawn in zip(rows, tokens, strict=True)]
        if (NOT_FINITE,) in tokens or (MASK_LATE,) in tokens:
            results = [_failed(row.seq, *row.tokens) if row.tokens and row.tokens[0] < 0 else row for row in results]
        return tuple(results)

    def _drawn_tokens(self, micro_batch: MicroBatch) -> list[int]:
        """NOT_FINITE or MASK_LATE where none was drawn."""
        drawn: list[int] = micro_batch.draws.tokens_L.tolist()
        assert not drawn or MASK_LATE <= min(drawn) <= max(drawn) < self._vocab_size, (min(drawn), max(drawn))
        return drawn


def _taken(step: PreparedStep, micro_batch: MicroBatch, drawn: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    """Of each row that draws, its index in the plan and those of its draws that its sequence takes: the first, and each
    behind drafts that are what was drawn in their places. One that gave no token ends them, unless it is the first: in
    the next step it will be."""
    if not step.has_drafts:
        yield from zip(micro_batch.sampled, [(index,) for index in range(len(drawn))], strict=True)
        return
    rows, first = step.plan.rows, 0
    while first < len(drawn):
        row = micro_batch.sampled[first]
        drafts, masks, end = rows[row].drafts, micro_batch.drawing.drafts.get(first), first + 1
        next_row = end + len(drafts)
        for draft in drafts if masks is None else drafts[: masks.known]:
            if drawn[end - 1] != draft or drawn[end] < 0:
                break
            end += 1
        yield row, range(first, end)
        first = next_row


def _aux_rows(arrays: Sequence[np.ndarray], micro_batch: MicroBatch) -> Iterator[AuxRows]:
    ends_S1, positions_T = micro_batch.batch.row_starts_S1.tolist(), micro_batch.batch.positions_T
    for row, (begin, end) in zip(micro_batch.rows, pairwise(ends_S1), strict=True):
        yield AuxRows(row, int(positions_T[begin]), tuple([array[begin:end] for array in arrays]))


def _failed(seq: int, token: int) -> RowResult:
    """Of a row that drew no token: `token` says why."""
    if token == NOT_FINITE:
        return RowResult(seq, is_corrupted=True)
    return RowResult(seq, error=f"The tokens that may come next were not known after {MASK_WAIT_S:g} s. Try again.")


@dataclass(frozen=True, slots=True)
class _PromptScores:
    prompt_tokens: tuple[int, ...]
    num_top: int
