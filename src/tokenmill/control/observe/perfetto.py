"""A flight recorder's content as a trace that ui.perfetto.dev and chrome://tracing show: the JSON of Chrome's trace
event format, times in microseconds since the recording began.

    engine     a track of steps as they computed, one of what the loop did between them, counters
    requests   a track for each: queue, prefill with its chunks, decode; instants where it was preempted
    flows      from each request to the steps with its chunks, and to the last step that it was in
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ...core.flight import CHUNK, FAILED, PREEMPTED, VOID, EventRecord, Flight, RequestRecord, StepRecord

_ENGINE, _REQUESTS = 1, 2
_COMPUTE, _LOOP = 1, 2
_AT_ONCE = 20

Event = dict[str, Any]


def trace_of(flight: Flight, name: str = "engine") -> dict[str, Any]:
    """The whole trace. `name`: of the engine."""
    return {"traceEvents": [event for part in trace_parts(flight, name) for event in part], **facts_of(flight)}


def facts_of(flight: Flight) -> dict[str, Any]:
    """What a trace says beside its events."""
    header = flight.header
    told = {"model": header.model, "pid": header.pid, "began_unix_s": header.unix_s + header.began_s}
    return {"displayTimeUnit": "ms", "otherData": told}


def trace_parts(flight: Flight, name: str) -> Iterator[list[Event]]:
    """The events, a millisecond's work at a time; a part may be empty."""
    header, zero_s = flight.header, flight.header.began_s
    names = {each.seq: each.id for each in flight.requests}
    yield [
        named("process_name", _ENGINE, 0, f"{name} ({header.model}, pid {header.pid})"),
        named("process_name", _REQUESTS, 0, "requests"),
        named("thread_name", _ENGINE, _COMPUTE, "steps"),
        named("thread_name", _ENGINE, _LOOP, "plan and commit"),
    ]
    times: dict[int, tuple[float, float]] = {}
    lasts: dict[int, int] = {}  # of sequences: the last step with a row of it
    free_s = 0.0
    events: list[Event] = []
    for i, step in enumerate(flight.steps):
        times[step.number] = start_s, free_s = _computed(step, free_s)
        _add_step(events, step, start_s, free_s, zero_s, names)
        lasts.update(dict.fromkeys(step.seqs, step.number))
        if i % _AT_ONCE == 0:
            yield events
            events = []
    yield events
    of_seq: dict[int, list[EventRecord]] = defaultdict(list)
    for i, event in enumerate(flight.events):
        of_seq[event.seq].append(event)
        if i % 1000 == 0:
            yield []
    first_s = flight.steps[0].planned_s if flight.steps else zero_s
    last_s = max([free_s, *(step.planned_s for step in flight.steps[-1:])])
    events = []
    for i, request in enumerate(flight.requests):
        if request.seq in lasts or request.scheduled_s >= first_s:
            _add_request(events, request, of_seq[request.seq], lasts.get(request.seq), times, zero_s, last_s)
        if i % _AT_ONCE == 0:
            yield events
            events = []
    yield events


def _computed(step: StepRecord, free_s: float) -> tuple[float, float]:
    """When it computed: by its own measure, up to when it was over, but not before it was planned and the step ahead of
    it had ended. Of one that is in flight, the start alone."""
    if not step.ended_s:
        start_s = max(free_s, step.submitted_s, step.planned_s)
        return start_s, start_s
    start_s = step.ended_s - step.duration_s if step.duration_s else step.submitted_s
    start_s = min(max(start_s, step.planned_s, free_s), step.ended_s)
    return start_s, step.ended_s


def _add_step(
    events: list[Event], step: StepRecord, start_s: float, end_s: float, zero_s: float, names: dict[int, str]
) -> None:
    state = "in flight" if not step.ended_s else "failed" if step.flags & FAILED else ""
    state = "void" if step.flags & VOID else state
    args = {
        "step": step.number,
        "rows": step.num_rows,
        "tokens": step.num_tokens,
        "running": step.num_running,
        "waiting": step.num_waiting,
        "free_blocks": step.num_free_blocks,
        "preemptions": step.num_preemptions,
        "duration_ms": 1e3 * step.duration_s,
        "state": state or "done",
        "requests": [names.get(seq, f"sequence {seq}") for seq in step.seqs],
    }
    title = f"step {step.number}" + (f" ({state})" if state else "")
    events.append(lasting(title, "step", _ENGINE, _COMPUTE, start_s, end_s, zero_s, args))
    brief = {"step": step.number}
    events.append(
        lasting("plan", "loop", _ENGINE, _LOOP, step.planned_s, step.submitted_s or step.planned_s, zero_s, brief)
    )
    if step.committed_s:
        events.append(lasting("commit", "loop", _ENGINE, _LOOP, step.ended_s, step.committed_s, zero_s, brief))
    at = microseconds(step.planned_s, zero_s)
    counts = {"running": step.num_running, "waiting": step.num_waiting}
    events.append({"ph": "C", "name": "requests", "pid": _ENGINE, "tid": 0, "ts": at, "args": counts})
    blocks = {"free": step.num_free_blocks}
    events.append({"ph": "C", "name": "KV blocks", "pid": _ENGINE, "tid": 0, "ts": at, "args": blocks})


def _add_request(
    events: list[Event],
    request: RequestRecord,
    told: list[EventRecord],
    last_step: int | None,
    steps: dict[int, tuple[float, float]],
    zero_s: float,
    last_s: float,
) -> None:
    track = request.seq + 1
    end_s = request.ended_s or last_s
    first_token_s = request.first_token_s or end_s
    args = {
        "id": request.id,
        "tenant": request.tenant,
        "priority_class": request.priority_class,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.num_cached,
        "output_tokens": request.num_output if request.ended_s else None,
        "finish_reason": request.reason or None,
        "preemptions": request.num_preemptions,
    }
    events.append(named("thread_name", _REQUESTS, track, request.id))

    def add(name: str, start_s: float, stop_s: float, more: Event) -> None:
        events.append(lasting(name, "request", _REQUESTS, track, start_s, stop_s, zero_s, more))

    add(request.id, request.arrival_s, end_s, args)
    add("queue", request.arrival_s, request.scheduled_s, {})
    add("prefill", request.scheduled_s, min(first_token_s, end_s), {})
    if request.first_token_s:
        add("decode", request.first_token_s, end_s, {})
    linked: list[int] = []
    for event in told:
        if event.kind == PREEMPTED:
            at = microseconds(event.at_s, zero_s)
            lost = {"step": event.step, "tokens": event.num_tokens}
            events.append(
                {"ph": "i", "s": "t", "name": "preempted", "cat": "request", "pid": _REQUESTS, "tid": track, "ts": at,
                 "args": lost}
            )  # fmt: skip
        elif event.kind == CHUNK and event.step in steps:
            start_s, stop_s = steps[event.step]
            facts = {"step": event.step, "start": event.start, "tokens": event.num_tokens}
            add("chunk", start_s, stop_s, facts)
            linked.append(event.step)
    if last_step is not None and last_step not in linked:
        linked.append(last_step)
    _add_flow(events, request, sorted(linked), steps, zero_s)


def _add_flow(
    events: list[Event],
    request: RequestRecord,
    linked: list[int],
    steps: dict[int, tuple[float, float]],
    zero_s: float,
) -> None:
    """An arrow from the request to the first of these steps, and on to the others."""
    if not linked:
        return
    flow = {"cat": "flow", "name": "request", "id": request.seq}
    begin = min(request.scheduled_s, steps[linked[0]][0])
    events.append({"ph": "s", **flow, "pid": _REQUESTS, "tid": request.seq + 1, "ts": microseconds(begin, zero_s)})
    for i, number in enumerate(linked):
        is_last = i == len(linked) - 1
        bound = {"bp": "e"} if is_last else {}
        at = microseconds(sum(steps[number]) / 2, zero_s)
        events.append({"ph": "f" if is_last else "t", **flow, **bound, "pid": _ENGINE, "tid": _COMPUTE, "ts": at})


def named(what: str, pid: int, tid: int, name: str) -> Event:
    """What a process ("process_name") or a track of it ("thread_name") is called."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def lasting(
    name: str, category: str, pid: int, tid: int, start_s: float, end_s: float, zero_s: float, args: Event
) -> Event:
    """Something that lasts, on a track where nothing else does but what lies within. zero_s: where time begins."""
    start = microseconds(start_s, zero_s)
    dur = round(max(0.0, microseconds(end_s, zero_s) - start), 3)
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": dur, "args": args}


def microseconds(at_s: float, zero_s: float) -> float:
    return round(1e6 * (at_s - zero_s), 3)
