"""Records what happens to an EngineCore, and replays it: plan parity between a live run and a later build.

The core is deterministic, so its inputs in order are the whole story. A replay feeds them to a fresh core and stops at
the first plan that differs from the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ..core.config import EngineConfig
from ..core.events import EngineStats, Output
from ..core.request import Request
from ..core.step import StepPlan, StepResult
from .core import EngineCore


@dataclass(frozen=True, slots=True)
class Added:
    request: Request
    now: float


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str
    now: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter."""

    digest: str


@dataclass(frozen=True, slots=True)
class Unloaded:
    digest: str


@dataclass(frozen=True, slots=True)
class Drained:
    pass


@dataclass(frozen=True, slots=True)
class Planned:
    plan: StepPlan | None
    now: float


@dataclass(frozen=True, slots=True)
class Committed:
    result: StepResult
    now: float


@dataclass(frozen=True, slots=True)
class Failed:
    step: int
    message: str
    now: float


Event = Added | Aborted | Loaded | Unloaded | Drained | Planned | Committed | Failed
Recorder = Callable[[EngineCore, Event], None]


class Core(Protocol):
    """What the shell drives: an EngineCore, or a recorded one."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request, now: float) -> list[Output]: ...

    def abort(self, request_id: str, now: float) -> list[Output]: ...

    def load_adapter(self, digest: str) -> None: ...

    def unload_adapter(self, digest: str) -> None: ...

    def take_unused_adapters(self) -> list[str]: ...

    def drain(self) -> None: ...

    def plan(self, now: float) -> StepPlan | None: ...

    def commit(self, result: StepResult, now: float) -> list[Output]: ...

    def fail(self, step_number: int, message: str, now: float) -> list[Output]: ...

    def stats(self) -> EngineStats: ...


class RecordedCore:
    """Passes every call on to `core`, then tells `record` of it."""

    def __init__(self, core: EngineCore, record: Recorder) -> None:
        self._core = core
        self._record = record

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def add(self, request: Request, now: float) -> list[Output]:
        outputs = self._core.add(request, now)
        self._record(self._core, Added(request, now))
        return outputs

    def abort(self, request_id: str, now: float) -> list[Output]:
        outputs = self._core.abort(request_id, now)
        self._record(self._core, Aborted(request_id, now))
        return outputs

    def load_adapter(self, digest: str) -> None:
        self._core.load_adapter(digest)
        self._record(self._core, Loaded(digest))

    def unload_adapter(self, digest: str) -> None:
        self._core.unload_adapter(digest)
        self._record(self._core, Unloaded(digest))

    def take_unused_adapters(self) -> list[str]:
        """Changes nothing that a plan depends on, so it is not recorded."""
        return self._core.take_unused_adapters()

    def drain(self) -> None:
        self._core.drain()
        self._record(self._core, Drained())

    def plan(self, now: float) -> StepPlan | None:
        plan = self._core.plan(now)
        self._record(self._core, Planned(plan, now))
        return plan

    def commit(self, result: StepResult, now: float) -> list[Output]:
        outputs = self._core.commit(result, now)
        self._record(self._core, Committed(result, now))
        return outputs

    def fail(self, step_number: int, message: str, now: float) -> list[Output]:
        outputs = self._core.fail(step_number, message, now)
        self._record(self._core, Failed(step_number, message, now))
        return outputs

    def stats(self) -> EngineStats:
        return self._core.stats()


def replay(config: EngineConfig, events: Iterable[Event]) -> int:
    """Feed recorded events to a fresh core; returns the number of steps planned. Asserts that every plan is equal."""
    core = EngineCore(config)
    num_steps = 0
    for event in events:
        match event:
            case Added(request, now):
                core.add(request, now)
            case Aborted(request_id, now):
                core.abort(request_id, now)
            case Loaded(digest):
                core.load_adapter(digest)
            case Unloaded(digest):
                core.unload_adapter(digest)
            case Drained():
                core.drain()
            case Planned(recorded, now):
                plan = core.plan(now)
                assert plan == recorded, f"the replay planned {plan}, the recording {recorded}"
                num_steps += plan is not None
            case Committed(result, now):
                core.commit(result, now)
            case Failed(step, message, now):
                core.fail(step, message, now)
    return num_steps
