"""What goes into `EngineCore.handle` and what comes out of it.

    messages of the front end  ->  handle  ->  outputs   to clients, with the next message of the engine
    jobs that ended            ->          ->  answers   to the front end, at once
    steps that failed          ->          ->  jobs      to the executor; each ends in one `JobEnded`

A job is what the engine asks of its executor beside the steps. Whoever adds one writes a type here, its handler in the
engine and its doing in the executors; the shell runs all of them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .events import FromEngine, LoadAdapter, Output, ToEngine


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget an adapter after the steps submitted before; no later one names it."""

    digest: str


Job = LoadAdapter | DropAdapter
"""LoadAdapter: make the adapter known to steps submitted after the job's end; the result is its digest."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """`result`: what the job says it gives. Where `error` is not "", it failed and changed nothing; `error_kind` and
    `error_param` as in Output."""

    job: Job
    result: str = ""
    error: str = ""
    error_kind: str = ""
    error_param: str = ""


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The oldest step in flight had no effect."""

    step: int
    message: str


Event = ToEngine | JobEnded | StepFailed


class Effects(NamedTuple):
    """What the shell has to do after an event or a commit."""

    outputs: tuple[Output, ...] = ()
    answers: tuple[FromEngine, ...] = ()
    jobs: tuple[Job, ...] = ()
