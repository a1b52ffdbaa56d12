"""The format of a step log: what each step of an engine had to do and when, for fitting what steps take
(`sim.calibrated`). Pure.

    header     text in JSON: what ran the steps (LogFacts)
    steps      a ring of the last NUM_STEPS
    requests   a ring of the last NUM_REQUESTS that have ended: lengths and times, no ids and no texts

A slot begins with the number of what it holds, plus one; 0: it is empty, or being written. Times are seconds of the
engine's monotonic clock, which other processes of the same machine share; 0: it has not happened. The flight recorder
(`core.flight`) keeps fewer steps, with the names of their requests, to tell what went wrong; this keeps what a cost
model of steps needs, for hours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from struct import Struct
from typing import Any, NamedTuple

from .cost import Work
from .errors import ConfigError

MAGIC = b"TMSTEPS\0"
VERSION = 1
NUM_STEPS = 1 << 18
NUM_REQUESTS = 1 << 16

FAILED, VOID = 1, 2
"""A step's flags: it failed; it was planned on top of one that did."""

_HEADER_BYTES = 16384
_HEADER = Struct("<8sII")
_STEP = Struct("<QdddddIIIIIIIIQQQ")
_REQUEST = Struct("<QddddIIII")
_MARK = Struct("<Q")
_REQUESTS_AT = _HEADER_BYTES + NUM_STEPS * _STEP.size
SIZE = _REQUESTS_AT + NUM_REQUESTS * _REQUEST.size
"""Bytes of a log: 29.5 MiB, whatever it holds."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What ran the steps. numerics_id, block_size, max_num_seqs, max_num_batched_tokens, chosen_experts: of its
    EngineConfig; num_blocks: of the pool of layers that see everything, or where there are none, of the largest.
    processor, isa, threads: what computed, on a machine of so many cores (0: unknown)."""

    model: str = ""
    numerics_id: str = ""
    processor: str = ""
    isa: str = ""
    threads: int = 0
    block_size: int = 0
    num_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    chosen_experts: float = 0.0
    cores: int = 0


@dataclass(frozen=True, slots=True)
class LogFacts(Machine):
    """began_s: when the log did; unix_s: the time of day at 0 of its clock."""

    pid: int = 0
    began_s: float = 0.0
    unix_s: float = 0.0


class TimedStep(NamedTuple):
    """planned_s     planning began
    submitted_s   it had been handed to the executor
    ended_s       its result was taken up
    duration_s    by the worker's own measure
    committed_s   its outputs were ready to be sent
    num_decode_rows: rows of one token, and drafts; the others are chunks of prompts. num_drawn: see core.cost.Work.
    num_positions, num_context: see core.cost.Work; num_decode_context: of the rows of one token.
    num_running, num_waiting, num_free_blocks: when it had been planned.
    """

    number: int
    planned_s: float
    submitted_s: float
    ended_s: float
    duration_s: float
    committed_s: float
    num_rows: int
    num_decode_rows: int
    num_tokens: int
    num_drawn: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    flags: int
    num_positions: int
    num_context: int
    num_decode_context: int

    @property
    def work(self) -> Work:
        return Work(self.num_rows, self.num_tokens, self.num_positions, self.num_context, self.num_drawn)


class TimedRequest(NamedTuple):
    """arrival_s: the front end had it. first_token_s: the commit of its first token; 0: it got none."""

    seq: int
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    ended_s: float
    num_prompt: int
    num_cached: int
    num_output: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StepRecords:
    """Steps by number, requests in the order in which they ended. num_lost: steps that the ring has no more."""

    facts: LogFacts
    steps: tuple[TimedStep, ...]
    requests: tuple[TimedRequest, ...]
    num_lost: int = 0


class StepWriter:
    """Writes into `buffer`, SIZE writable bytes that are all 0."""

    def __init__(self, buffer: Any, facts: LogFacts) -> None:
        assert len(buffer) == SIZE, f"{len(buffer)} bytes, not {SIZE}"
        text = json.dumps(asdict(facts)).encode()
        assert len(text) <= _HEADER_BYTES - _HEADER.size, f"{len(text)} bytes of facts"
        self._buffer = buffer
        self._num_requests = 0
        _HEADER.pack_into(buffer, 0, MAGIC, VERSION, len(text))
        buffer[_HEADER.size : _HEADER.size + len(text)] = text

    def step(self, step: tuple[Any, ...]) -> None:
        """One has ended: the fields of a TimedStep."""
        number = step[0]
        at = _HEADER_BYTES + number % NUM_STEPS * _STEP.size
        _STEP.pack_into(self._buffer, at, 0, *step[1:])
        _MARK.pack_into(self._buffer, at, number + 1)

    def request(self, request: TimedRequest) -> None:
        """One has ended."""
        at = _REQUESTS_AT + self._num_requests % NUM_REQUESTS * _REQUEST.size
        self._num_requests += 1
        _REQUEST.pack_into(self._buffer, at, 0, *request[1:])
        _MARK.pack_into(self._buffer, at, request.seq + 1)


def read_steps(data: bytes, name: str) -> StepRecords:
    """What a log holds. name: what to call it in an error. Raises ConfigError."""
    if len(data) != SIZE or data[: len(MAGIC)] != MAGIC:
        raise ConfigError(f"{name} is no step log: write one by tokenmill serve --step-log FILE.", param="log")
    _, version, num_bytes = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ConfigError(f"{name} is a step log of version {version}; this build reads {VERSION}.", param="log")
    try:
        facts = LogFacts(**json.loads(data[_HEADER.size : _HEADER.size + num_bytes]))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name} is a damaged step log: its header cannot be read.", param="log") from error
    steps = sorted(map(TimedStep._make, _slots(data, _HEADER_BYTES, _REQUESTS_AT, _STEP)))
    requests = sorted(map(TimedRequest._make, _slots(data, _REQUESTS_AT, SIZE, _REQUEST)), key=lambda one: one.ended_s)
    num_lost = max(0, steps[-1].number + 1 - NUM_STEPS) if steps else 0
    return StepRecords(facts, tuple(steps), tuple(requests), num_lost)


def _slots(data: bytes, begin: int, end: int, slot: Struct) -> Iterator[tuple[Any, ...]]:
    """Those that are written, with their own numbers."""
    for fields in slot.iter_unpack(memoryview(data)[begin:end]):
        if fields[0]:
            yield (fields[0] - 1, *fields[1:])
