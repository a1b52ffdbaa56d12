"""What of an engine's life goes into its flight recorder (`core.flight`) and its step log (`core.step_records`).

Called by the shell with its own times; the core knows nothing of it. Each costs a few microseconds a step, and waits
for no disk. The flight recorder has each step as it is planned and as it ends, the requests that get their first row or
end, chunks of prompts, preemptions; the step log what each step had to do, and when, once it is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..core import step_records
from ..core.events import Output
from ..core.flight import CHUNK, FAILED, NUM_REQUESTS, PREEMPTED, VOID, FlightWriter, RequestRecord
from ..core.sequence import Sequence, Status
from ..core.step_records import StepWriter, TimedRequest
from ..sched.steps import Step
from .state import EngineState


class Watcher(Protocol):
    """What hears of an engine's steps from the shell: the flight recorder, and the step log (`engine.recorders`)."""

    def planned(self, state: EngineState, planned_s: float) -> None: ...

    def submitted(self, step: int, now: float) -> None: ...

    def ended(self, step: Step, ended_s: float, duration_s: float, committed_s: float, *, has_failed: bool) -> None: ...

    def told(self, outputs: Iterable[Output], now: float) -> None: ...


class FlightRecorder:
    """`writer`: what it writes to. `on_failure`: called when a step has failed, after it was recorded."""

    def __init__(self, writer: FlightWriter, on_failure: Callable[[int], None] = lambda step: None) -> None:
        self._writer = writer
        self._on_failure = on_failure
        self._chunks: deque[list[int]] = deque()  # numbers of events, of each step in flight
        self._sequences: dict[str, Sequence] = {}  # of requests that are recorded and have not ended

    def planned(self, state: EngineState, planned_s: float) -> None:
        """The last step in flight is about to be handed to the executor, which it may be the end of."""
        step = state.in_flight[-1]
        rows, number = step.rows, step.number
        writer, num_free = self._writer, 0
        for pool in state.blocks.pools:
            num_free += pool.num_free
        for seq_number, num_computed in step.preempted:
            writer.event(PREEMPTED, planned_s, seq_number, number, 0, num_computed)
        counts = (
            len(rows), step.num_tokens, len(state.running), len(state.waiting), num_free,
            state.counters.num_preemptions,
        )  # fmt: skip
        writer.step(number, planned_s, counts, [row[0] for row in rows])
        chunks: list[int] = []
        if step.num_more_tokens or any([row[5] for row in rows]):
            self._note_chunks(step, planned_s, chunks)
        self._chunks.append(chunks)

    def submitted(self, step: int, now: float) -> None:
        self._writer.step_submitted(step, now)

    def _note_chunks(self, step: Step, planned_s: float, chunks: list[int]) -> None:
        event = self._writer.event
        for row, seq in zip(step.rows, step.sequences, strict=True):
            if len(row.tokens) > 1 or row.intro is not None:
                if seq.request.id not in self._sequences:
                    self._note(seq)
                    self._writer.request(_record(seq, 0.0, ""))
                chunks.append(event(CHUNK, planned_s, row.seq, step.number, row.start, row.num_tokens))

    def _note(self, seq: Sequence) -> None:
        if len(self._sequences) > NUM_REQUESTS:  # of some no end was told, because nobody was there to hear it
            self._sequences = {name: one for name, one in self._sequences.items() if one.status is not Status.FINISHED}
        self._sequences[seq.request.id] = seq

    def ended(self, step: Step, ended_s: float, duration_s: float, committed_s: float, *, has_failed: bool) -> None:
        """The oldest step is over: committed, void or failed."""
        flags = FAILED if has_failed else VOID if step.is_void else 0
        self._writer.step_ended(step.number, ended_s, duration_s, committed_s, flags)
        for event in self._chunks.popleft():
            self._writer.event_ended(event, ended_s)
        if has_failed:
            self._on_failure(step.number)

    def told(self, outputs: Iterable[Output], now: float) -> None:
        """Among these outputs are some that end their requests."""
        for output in outputs:
            if output.finish_reason is not None:
                seq = self._sequences.pop(output.request_id, None)
                if seq is not None:
                    self._writer.request(_record(seq, now, output.finish_reason))


def _record(seq: Sequence, ended_s: float, reason: str) -> RequestRecord:
    request = seq.request
    return RequestRecord(
        seq.number, request.arrival_s, seq.first_scheduled_s, max(0.0, seq.first_token_s), ended_s,
        seq.num_prompt, min(max(0, seq.num_cached), seq.num_prompt), request.max_tokens, seq.num_output,
        request.terms.priority_class, reason, seq.num_preemptions, request.id, request.terms.tenant,
    )  # fmt: skip


_MOST_OPEN = 4096
"""Requests after which those are looked for whose ends nobody told."""


class StepLog:
    """`writer`: what it writes to. `beside`: hears of all that this hears of."""

    def __init__(self, writer: StepWriter, beside: Watcher | None = None) -> None:
        self._writer = writer
        self._beside = beside
        self._in_flight: deque[list[Any]] = deque()  # when planned, when submitted, then counts
        self._open: dict[str, Sequence] = {}

    def planned(self, state: EngineState, planned_s: float) -> None:
        """The last step in flight is about to be handed to the executor."""
        step = state.in_flight[-1]
        rows, num_free = step.rows, 0
        for pool in state.blocks.pools:
            num_free += pool.num_free
        num_drawn = sum([row[6] for row in rows]) + step.num_drafts
        if step.num_more_tokens:
            one = [row[1] for row in rows if len(row[2]) < 2]
            num_decode, num_decode_context = len(one), sum(one)
        else:
            num_decode, num_decode_context = len(rows), step.num_context
        self._in_flight.append([
            planned_s, 0.0, num_decode, num_drawn, len(state.running), len(state.waiting), num_free, num_decode_context,
        ])  # fmt: skip
        for row, seq in zip(rows, step.sequences, strict=True):
            if row[5] is not None:
                self._note(seq)
        if self._beside is not None:
            self._beside.planned(state, planned_s)

    def submitted(self, step: int, now: float) -> None:
        self._in_flight[-1][1] = now
        if self._beside is not None:
            self._beside.submitted(step, now)

    def ended(self, step: Step, ended_s: float, duration_s: float, committed_s: float, *, has_failed: bool) -> None:
        """The oldest step is over: committed, void or failed."""
        planned_s, submitted_s, num_decode, num_drawn, running, waiting, free, context = self._in_flight.popleft()
        flags = step_records.FAILED if has_failed else step_records.VOID if step.is_void else 0
        num_context = step.num_context
        self._writer.step((
            step.number, planned_s, submitted_s, ended_s, duration_s, committed_s, len(step.rows), num_decode,
            step.num_tokens, num_drawn, running, waiting, free, flags, num_context + step.num_more_positions,
            num_context, context,
        ))  # fmt: skip
        if self._beside is not None:
            self._beside.ended(step, ended_s, duration_s, committed_s, has_failed=has_failed)

    def told(self, outputs: Iterable[Output], now: float) -> None:
        """Among these outputs are some that end their requests."""
        for output in outputs:
            seq = None if output.finish_reason is None else self._open.pop(output.request_id, None)
            if seq is not None:
                self._writer.request(_record_step(seq, now))
        if self._beside is not None:
            self._beside.told(outputs, now)

    def _note(self, seq: Sequence) -> None:
        if len(self._open) > _MOST_OPEN:
            self._open = {name: one for name, one in self._open.items() if one.status is not Status.FINISHED}
        self._open[seq.request.id] = seq


def _record_step(seq: Sequence, ended_s: float) -> TimedRequest:
    return TimedRequest(
        seq.number, seq.request.arrival_s, seq.first_scheduled_s, max(0.0, seq.first_token_s), ended_s, seq.num_prompt,
        min(max(0, seq.num_cached), seq.num_prompt), seq.num_output, seq.num_preemptions,
    )  # fmt: skip
