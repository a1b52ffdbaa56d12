"""The flight recorder's format: an engine's last steps in a fixed number of bytes, which may be a file mapped into
memory. What is written there is there for others at once, and stays when the writer is killed. Pure.

    header     what it is, and how the engine's clock relates to the time of day
    steps      the last ones, those in flight included: times, counts, and the sequences that had a row
    requests   what sequences stand for
    events     chunks of prompts, and preemptions

Each part is a ring of slots of one size; a number counted up from 0 picks the slot. A slot carries that number, plus
one, at its front; 0 there means that it is empty or being written, and so may be skipped by who reads meanwhile. Times
are seconds of the engine's monotonic clock, 0 for what has not happened.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from struct import Struct
from typing import Any, NamedTuple

MAGIC = b"TMFLIGHT"
VERSION = 1

NUM_STEPS = 4096
NUM_REQUESTS = 4096
NUM_EVENTS = 16384
MAX_ROWS = 224
"""Rows of a step whose sequences are listed."""

CHUNK, PREEMPTED = 1, 2
FAILED, VOID = 1, 2
"""A step's flags: it failed; it was planned on top of one that did."""

_HEADER = Struct("<8sIIQdd128s")
_STEP = Struct("<QdddddIIIIIIII")
_REQUEST = Struct("<QddddIIIIBBHI120s64s")
_ID_BYTES, _TENANT_BYTES = 120, 64
_EVENT = Struct("<QddIIQII")
_MARK = Struct("<Q")
_TIMES, _TIMES_AT = Struct("<ddd"), 24
_FLAGS, _FLAGS_AT = Struct("<I"), 76
_TIME, _TIME_AT = Struct("<d"), 16

_HEADER_BYTES = 4096
_STEP_BYTES = 1024
_REQUEST_BYTES = 256
_REQUESTS_AT = _HEADER_BYTES + NUM_STEPS * _STEP_BYTES
_EVENTS_AT = _REQUESTS_AT + NUM_REQUESTS * _REQUEST_BYTES
SIZE = _EVENTS_AT + NUM_EVENTS * _EVENT.size
_ROWS = tuple(Struct(f"<{number}I") for number in range(MAX_ROWS + 1))

_AT_ONCE = 200

REASONS = ("", "stop", "length", "abort", "error", "moved")


class Header(NamedTuple):
    """`unix_s`: the time of day at 0 of the engine's clock. `began_s`: when recording did."""

    pid: int
    began_s: float
    unix_s: float
    model: str


class StepRecord(NamedTuple):
    """planned_s     planning began
    submitted_s   it had been handed to the executor; 0: it was being handed over
    ended_s       its result was taken up; 0: it is in flight
    duration_s    by the worker's own measure
    committed_s   its outputs were ready to be sent
    num_free_blocks, num_running, num_waiting: when it had been planned. `seqs`: of its rows, the first MAX_ROWS.
    """

    number: int
    planned_s: float
    submitted_s: float
    ended_s: float
    duration_s: float
    committed_s: float
    num_rows: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int
    flags: int
    seqs: tuple[int, ...]


class RequestRecord(NamedTuple):
    seq: int
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    ended_s: float
    num_prompt: int
    num_cached: int
    max_tokens: int
    num_output: int
    priority_class: int
    reason: str
    num_preemptions: int
    id: str
    tenant: str


class EventRecord(NamedTuple):
    """CHUNK: so many known tokens from position `start` on were in a step, from when it was planned to its end.
    PREEMPTED: the sequence gave so many computed tokens back, as that step was planned."""

    number: int
    at_s: float
    ended_s: float
    kind: int
    seq: int
    step: int
    start: int
    num_tokens: int


class Flight(NamedTuple):
    """All in order of their numbers."""

    header: Header
    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]
    events: tuple[EventRecord, ...]


class FlightWriter:
    """Writes into `buffer`, of SIZE bytes, which is emptied first."""

    def __init__(self, buffer: Any, *, pid: int, began_s: float, unix_s: float, model: str) -> None:
        assert len(buffer) == SIZE, len(buffer)
        self._buffer = buffer
        self._num_events = 0
        _HEADER.pack_into(buffer, 0, MAGIC, VERSION, 0, pid, began_s, unix_s, _cut(model, 128))

    def step(
        self,
        number: int,
        planned_s: float,
        counts: tuple[int, int, int, int, int, int],
        seqs: Sequence[int],
    ) -> None:
        """A step has been planned. counts: rows, tokens, running, waiting, free blocks, preemptions."""
        at = _HEADER_BYTES + number % NUM_STEPS * _STEP_BYTES
        buffer = self._buffer
        num_listed = len(seqs)
        if num_listed > MAX_ROWS:
            num_listed, seqs = MAX_ROWS, seqs[:MAX_ROWS]
        _MARK.pack_into(buffer, at, 0)
        _ROWS[num_listed].pack_into(buffer, at + _STEP.size, *seqs)
        _STEP.pack_into(buffer, at, number + 1, planned_s, 0.0, 0.0, 0.0, 0.0, *counts, num_listed, 0)

    def step_submitted(self, number: int, submitted_s: float) -> None:
        """It has been handed to the executor."""
        _TIME.pack_into(self._buffer, _HEADER_BYTES + number % NUM_STEPS * _STEP_BYTES + _TIME_AT, submitted_s)

    def step_ended(self, number: int, ended_s: float, duration_s: float, committed_s: float, flags: int) -> None:
        at = _HEADER_BYTES + number % NUM_STEPS * _STEP_BYTES
        _TIMES.pack_into(self._buffer, at + _TIMES_AT, ended_s, duration_s, committed_s)
        if flags:
            _FLAGS.pack_into(self._buffer, at + _FLAGS_AT, flags)

    def request(self, record: RequestRecord) -> None:
        """What is known of a sequence, again when it has ended."""
        at = _REQUESTS_AT + record.seq % NUM_REQUESTS * _REQUEST_BYTES
        _MARK.pack_into(self._buffer, at, 0)
        seq, *rest, priority_class, reason, num_preemptions, id, tenant = record
        _REQUEST.pack_into(
            self._buffer, at, seq + 1, *rest, min(priority_class, 255), REASONS.index(reason),
            min(num_preemptions, 65535), 0, _cut(id, _ID_BYTES), _cut(tenant, _TENANT_BYTES),
        )  # fmt: skip

    def event(self, kind: int, at_s: float, seq: int, step: int, start: int, num_tokens: int) -> int:
        """Its number, for `event_ended`."""
        number = self._num_events
        self._num_events = number + 1
        at = _EVENTS_AT + number % NUM_EVENTS * _EVENT.size
        _EVENT.pack_into(self._buffer, at, number + 1, at_s, 0.0, kind, seq, step, start, num_tokens)
        return number

    def event_ended(self, number: int, ended_s: float) -> None:
        _TIME.pack_into(self._buffer, _EVENTS_AT + number % NUM_EVENTS * _EVENT.size + _TIME_AT, ended_s)


def read_flight(data: bytes, num_steps: int = NUM_STEPS) -> Flight:
    """What a recorder's `data` holds: the last `num_steps` steps, and all requests and events. Raises ValueError for
    data that is none, or of another version."""
    work = reading(data, num_steps)
    while True:
        try:
            next(work)
        except StopIteration as done:
            found: Flight = done.value
            return found


def reading(data: bytes, num_steps: int = NUM_STEPS) -> Generator[None, None, Flight]:
    """The same, in pieces of a millisecond or so."""
    header = read_header(data)
    marks = sorted(_slots(data, _HEADER_BYTES, NUM_STEPS, _STEP_BYTES), reverse=True)[:num_steps]
    steps: list[StepRecord] = []
    for _, at in reversed(marks):
        steps.append(_read_step(data, at))
        if len(steps) % _AT_ONCE == 0:
            yield
    requests: list[RequestRecord] = []
    for _, at in sorted(_slots(data, _REQUESTS_AT, NUM_REQUESTS, _REQUEST_BYTES)):
        requests.append(_read_request(data, at))
        if len(requests) % _AT_ONCE == 0:
            yield
    events: list[EventRecord] = []
    for i, fields in enumerate(_EVENT.iter_unpack(data[_EVENTS_AT:])):
        if fields[0]:
            events.append(_event(fields))
        if i % _AT_ONCE == 0:
            yield
    events.sort()
    return Flight(header, tuple(steps), tuple(requests), tuple(events))


def read_header(data: Any) -> Header:
    if len(data) != SIZE or data[:8] != MAGIC:
        raise ValueError("it is no flight recorder's file")
    _, version, _, pid, began_s, unix_s, model = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"it is of version {version}; this build reads version {VERSION}")
    return Header(pid, began_s, unix_s, _text(model))


def find_request(data: Any, id: str) -> RequestRecord | None:
    """The last one with this id. `data`: bytes or a map of a file."""
    wanted = _cut(id, _ID_BYTES)
    at = data.rfind(wanted.ljust(_ID_BYTES, b"\0"), _REQUESTS_AT, _EVENTS_AT)
    if at < 0:
        return None
    record = _read_request(data, _REQUESTS_AT + (at - _REQUESTS_AT) // _REQUEST_BYTES * _REQUEST_BYTES)
    return record if record.seq >= 0 and record.id == id else None


def read_event(data: Any, number: int) -> EventRecord | None:
    """That event, or a later one that is in its place; None: it has not been written."""
    fields = _EVENT.unpack_from(data, _EVENTS_AT + number % NUM_EVENTS * _EVENT.size)
    return _event(fields) if fields[0] else None


def _event(fields: tuple[Any, ...]) -> EventRecord:
    return EventRecord._make((fields[0] - 1, *fields[1:]))


def _slots(data: Any, start: int, number: int, size: int) -> Iterator[tuple[int, int]]:
    """(mark, place) of those that are written."""
    for at in range(start, start + number * size, size):
        (mark,) = _MARK.unpack_from(data, at)
        if mark:
            yield mark, at


def _read_step(data: Any, at: int) -> StepRecord:
    mark, *fields, num_listed, flags = _STEP.unpack_from(data, at)
    seqs = _ROWS[min(num_listed, MAX_ROWS)].unpack_from(data, at + _STEP.size)
    return StepRecord._make((mark - 1, *fields, flags, seqs))


def _read_request(data: Any, at: int) -> RequestRecord:
    mark, *fields, priority_class, reason, num_preemptions, _, id, tenant = _REQUEST.unpack_from(data, at)
    reasons = REASONS[reason] if reason < len(REASONS) else ""
    ends = priority_class, reasons, num_preemptions, _text(id), _text(tenant)
    return RequestRecord._make((mark - 1, *fields, *ends))


def _cut(text: str, num_bytes: int) -> bytes:
    return text.encode()[:num_bytes]


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode("utf8", "replace")
