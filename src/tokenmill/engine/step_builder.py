"""Builds a step: carries out the scheduler's decisions at once, and collects the rows of the step."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace

from ..core.cost import Costs
from ..core.sequence import Sequence, wants_scores
from ..core.speculation import PREDICTION, draft_scope
from ..core.step import Introduction, PlanRow, plan_row
from ..kv.blocks.groups import Match
from ..kv.blocks.manager import BlockManager
from ..kv.connector.scheduler.transfers import Transfers
from ..sched.admission import blocks_for
from ..sched.steps import Step
from .speculation import Candidate
from .state import EngineState


class StepBuilder:
    """sched.port.SchedulerPort over the state of one engine. `now` is when the step in the making is planned."""

    def __init__(self, state: EngineState, transfers: Transfers) -> None:
        self._state = state
        self._transfers = transfers
        self._block_size = state.config.block_size
        self._keeps_kv = state.config.keeps_kv
        self._has_windows = state.blocks.has_windows
        self.step = Step(0)
        self.now = 0.0

    def take_step(self) -> Step:
        """The step composed; the next one begins."""
        step, self.step = self.step, Step(self.step.number + 1)
        return step

    def skip(self, num_steps: int) -> None:
        """So many steps were composed elsewhere, the one in the making first (`sim.fast_forward`)."""
        self.step = Step(self.step.number + num_steps)

    @property
    def step_number(self) -> int:
        return self.step.number

    @property
    def costs(self) -> Costs:
        return self._state.costs.costs

    @property
    def num_targeted(self) -> int:
        return self._state.num_targeted

    def begins_s(self) -> float:
        state, costs = self._state, self._state.costs.costs
        expected_s = sum(costs.predict(step.work) for step in state.in_flight)
        return max(self.now, state.last_commit_s + expected_s)

    @property
    def no_match(self) -> Match:
        return self._state.blocks.no_match

    def num_available_blocks(self, matched: Match) -> list[int]:
        return self._state.blocks.num_available(matched)

    def num_extendable(self, matched: Match) -> int:
        return self._state.blocks.num_extendable(matched)

    def find_match(self, seq: Sequence) -> Match:
        return self._state.find_match(seq)

    def reconsider(self, seq: Sequence) -> None:
        if seq.request.terms.ttft_s or self._state.policies.order.num_refreshed:
            self._state.reconsider(seq, self.now)

    @property
    def num_loading(self) -> int:
        return len(self._state.loading)

    def fetch(self, seq: Sequence, matched: Match) -> bool:
        if not self._transfers.fetch(seq, matched, (*self._state.in_flight, self.step), self.now):
            return False
        self._state.encoder.take(seq, self._recent())
        self._note_first(seq)
        return True

    def admit(self, seq: Sequence) -> None:
        self._state.admit(seq)
        self._state.encoder.take(seq, ())  # its first row is in this step, which is void if an earlier one fails
        self._note_first(seq)

    def can_encode(self, seq: Sequence) -> bool:
        return self._state.encoder.can_take(seq, self._recent())

    def _recent(self) -> Iterator[list[tuple[BlockManager, int]]]:
        """What steps that may fail published, the one in the making included."""
        return (step.published for step in (*self._state.in_flight, self.step))

    def _note_first(self, seq: Sequence) -> None:
        """It has left the queue."""
        if seq.num_cached < 0:
            seq.num_cached = 0
            seq.first_scheduled_s = self.now
            counters = self._state.counters
            counters.prompt_tokens += seq.num_prompt
            counters.prefix_queries += len(seq.tokens)
            if self._state.has_store:
                counters.external_queries += len(seq.tokens)

    def adopt(self, seq: Sequence, matched: Match) -> None:
        if not matched.num_blocks:
            self._state.blocks.note_shared(seq.tables, matched)
            return
        self._state.blocks.adopt(seq.tables, matched, seq.last_step)
        self._state.begin_after(seq, matched.num_blocks * self._block_size)

    def preempt(self, seq: Sequence) -> None:
        assert seq.rows_in_flight == 0, f"sequence {seq.number} has a row in flight"
        self._state.counters.num_preemptions += 1
        self.step.preempted.append((seq.number, seq.num_computed))
        self._state.send_back(seq)

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        step, tables, size = self.step, seq.tables, self._block_size
        start = seq.num_planned
        end = start + num_tokens
        num_blocks = len(tables[0].ids)
        if end > num_blocks * size and self._keeps_kv:
            num_blocks = blocks_for(end, size)
            self._state.blocks.extend(tables, num_blocks - len(tables[0].ids))
        num_known = len(seq.tokens)
        is_drawing = end == num_known + seq.num_pending
        blocks = _unsent(seq) if num_blocks > seq.num_sent else ()
        if start >= num_known:
            row = plan_row((seq.number, start, (), seq.last_step, blocks, None, is_drawing, False, ()))
        else:
            row = self._row_of_known(seq, start, end, blocks, is_drawing)
        seq.num_planned = end
        seq.num_pending += is_drawing
        seq.num_sent = num_blocks
        seq.last_step = step.number
        seq.rows_in_flight += 1
        step.rows.append(row)
        step.sequences.append(seq)
        step.ends.append(end)
        step.num_context += start
        if num_tokens > 1:
            step.num_more_tokens += num_tokens - 1
            step.num_more_positions += (num_tokens - 1) * start + num_tokens * (num_tokens - 1) // 2
        num_full = (end if end < num_known else num_known) // size
        if num_full > tables[-1].num_published:
            self._state.publish(seq, num_full, step, start // size)
        if self._has_windows:
            self._state.blocks.slide(tables, end, step.number)

    def add_decodes(self, sequences: Many[Sequence]) -> None:
        """As `add_row` of each, at half the price."""
        step, size, number = self.step, self._block_size, self.step.number
        add_row, add_sequence, add_end = step.rows.append, step.sequences.append, step.ends.append
        for seq in sequences:
            start, num_known, tables = seq.num_planned, len(seq.tokens), seq.tables
            if start < num_known or seq.num_sent != len(tables[0].ids) or self._has_windows:
                self.add_row(seq, 1)
                continue
            end, num_pending = start + 1, seq.num_pending
            is_drawing = end == num_known + num_pending
            add_row(plan_row((seq.number, start, (), seq.last_step, (), None, is_drawing, False, ())))
            add_sequence(seq)
            add_end(end)
            seq.num_planned = end
            seq.num_pending = num_pending + is_drawing
            seq.last_step = number
            seq.rows_in_flight += 1
            step.num_context += start
            num_full = num_known // size
            if num_full > tables[-1].num_published:
                self._state.publish(seq, num_full, step)

    def add_drafts(self, most: int) -> None:
        speculation, step, size = self._state.speculation, self.step, self._block_size
        if speculation is None:
            return
        places, candidates = list[int](), list[Candidate]()
        num_spare = self._state.blocks.num_spare(len(step.sequences)) if speculation.proposed else 0
        for index, seq in enumerate(step.sequences if speculation.proposed else ()):
            end, proposal = step.ends[index], speculation.proposed.get(seq.number)
            if proposal is not None and step.rows[index].sample:
                room = len(seq.tables[0].ids) * size - end
                if room < min(size, len(proposal.drafts.tokens)) and num_spare > 0 and seq.request.terms.kv_share >= 1:
                    num_spare -= 1
                    room += size
                room = min(room, seq.max_len - end - 1)
                if room > 0:
                    places.append(index)
                    candidates.append(Candidate(seq.number, proposal, room, end, seq.request.terms))
        speculation.proposed.clear()
        numbers = speculation.choose(candidates, step.work, self.costs, min(most, self._state.config.most_drafts))
        for index, candidate, num_drafts in zip(places, candidates, numbers, strict=True):
            if num_drafts:
                seq = step.sequences[index]
                blocks = self._extend(seq, step.rows[index].blocks, candidate.end + num_drafts)
                drafts = candidate.proposal.drafts.tokens[:num_drafts]
                step.rows[index] = step.rows[index]._replace(blocks=blocks, drafts=drafts)
                seq.num_pending -= 1
                seq.is_predicted = candidate.proposal.drafts.source == PREDICTION
                step.num_drafts += num_drafts
                step.num_more_tokens += num_drafts
                step.num_more_positions += num_drafts * candidate.end + num_drafts * (num_drafts - 1) // 2

    def _extend(self, seq: Sequence, blocks: tuple[int, ...], end: int) -> tuple[int, ...]:
        """Have tables reach so far. blocks: what the row in the making tells of them; what it is to tell."""
        tables = seq.tables
        more = blocks_for(end, self._block_size) - len(tables[0].ids)
        if more <= 0:
            return blocks
        self._state.blocks.extend(tables, more, all_states=True)
        seq.num_sent = len(tables[0].ids)
        num_told, told = len(blocks) // len(tables), list[int]()
        for index, table in enumerate(
            tables
        ):  # not what is in the table by now: the row itself is hidden from the next
            told += [*blocks[index * num_told : (index + 1) * num_told], *table.ids[-more:]]
        return tuple(told)

    def _begin(self, seq: Sequence) -> Introduction:
        encoder = self._state.encoder
        self.step.published += encoder.begin(seq)
        introduction = _introduce(seq, encoder.blocks_of(seq))
        speculation, request = self._state.config.speculation, seq.request
        if speculation is None:
            return introduction
        corpora = speculation.corpora_for(request.terms.tenant)
        return replace(introduction, draft_scope=draft_scope(request.terms.tenant, request.cache_salt), corpora=corpora)

    def _row_of_known(self, seq: Sequence, start: int, end: int, blocks: tuple[int, ...], is_drawing: bool) -> PlanRow:
        self._state.counters.prompt_tokens_computed += max(0, min(end, seq.num_prompt) - start)
        self._state.service.note_prompt(seq, start, end)
        return PlanRow(
            seq=seq.number,
            start=start,
            tokens=tuple(seq.tokens[start:end]),
            blocks=blocks,
            intro=None if seq.num_sent else self._begin(seq),
            sample=is_drawing,
            score=start < seq.num_prompt - 1 and wants_scores(seq),
        )


def _unsent(seq: Sequence) -> tuple[int, ...]:
    """Table entries that the worker does not know of, group after group."""
    return tuple(block for table in seq.tables for block in table.ids[seq.num_sent :])


def _introduce(seq: Sequence, encoded: tuple[int, ...]) -> Introduction:
    request = seq.request
    return Introduction(
        prompt_tokens=request.prompt_tokens,
        output_tokens=tuple(seq.tokens[seq.num_prompt :]),
        sampling=request.sampling,
        seed=request.seed,
        choice=request.choice,
        eos_token_ids=request.end_token_ids,
        pooling=request.pooling,
        adapter=request.adapter,
        bad_words=request.bad_words,
        dry_breakers=request.dry_breakers,
        slow_s=seq.slow_s,
        embeds=request.embeds,
        encoded=encoded,
        unencoded=seq.unencoded,
        prediction=request.prediction,
    )
