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

from .block import BlockKey, BlockMove
from .events import FromEngine, LoadAdapter, Output, ToEngine
from .moves import EndMove, PullBlocks, SendBlocks


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Forget an adapter after the steps submitted before; no later one names it."""

    digest: str


@dataclass(frozen=True, slots=True)
class FindBlocks:
    """Look anew which of these blocks, each the place of its KV group and its key, the store holds: others may have
    written there. The result has a digit for each, "1" where it is there, else "0"."""

    number: int
    wanted: tuple[tuple[int, BlockKey], ...]


@dataclass(frozen=True, slots=True)
class FetchBlocks:
    """Copy these blocks from the store into the pools. Nobody reads or writes them before the job has ended; if it
    fails, they may hold anything."""

    number: int
    moves: tuple[BlockMove, ...]


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Copy these blocks from the pools into the store, and those of `stored` that it has given up since it got them.
    Nobody writes any of them before the job has ended."""

    number: int
    moves: tuple[BlockMove, ...]
    stored: tuple[BlockMove, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Have a grammar ready for the sequences that follow it, which are introduced after the job's end."""

    grammar: str


Job = (
    LoadAdapter
    | DropAdapter
    | FindBlocks
    | FetchBlocks
    | SaveBlocks
    | PrepareGrammar
    | PullBlocks
    | SendBlocks
    | EndMove
)
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


@dataclass(frozen=True, slots=True)
class StoreOpened:
    """The executor has a store of KV blocks, which holds these keys, of each KV group. Blocks may be fetched from it,
    and are saved there when the engine is drained."""

    keys: tuple[tuple[BlockKey, ...], ...]


Event = ToEngine | JobEnded | StepFailed | StoreOpened


class Effects(NamedTuple):
    """What the shell has to do after an event or a commit."""

    outputs: tuple[Output, ...] = ()
    answers: tuple[FromEngine, ...] = ()
    jobs: tuple[Job, ...] = ()
