"""What the rooms plug into each other. Each port has at least two implementations:

Executor             worker (native or numpy model), sim (checkable toy model)
EngineEnd, FrontEnd  the ends of a link: net (Unix socket or TCP), engine (asyncio queues in one process)
Clock                net (monotonic), sim (virtual)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, runtime_checkable

from .effects import Job
from .events import FromEngine, ToEngine
from .step import StepPlan, StepResult


class Executor(Protocol):
    """Runs plans in the order given. Up to `EngineConfig.steps_in_flight` may be under way at once; results come back
    in order. A raised exception means that the step had no effect that anyone may read.

    Steps submitted before a failure is reported may build on what the failed one never wrote or drew. They are void:
    they may raise or return anything, and every sequence they carry is released or introduced anew. The state of
    sequences with no row in the failed step or after it must survive."""

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Hand a plan over, by this call or by the first wait for its result."""
        ...

    async def run(self, job: Job) -> str:
        """Do a job beside the steps, and return its result. Raises TokenmillError where the fault is not the engine's.
        Jobs may overlap and end in any order; what each says of the steps before and after it holds."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic."""
        ...


class EngineEnd(Protocol):
    """The engine's end of a link."""

    async def receive(self) -> ToEngine:
        """Next message; raises EOFError when the other side is gone."""
        ...

    async def send(self, message: FromEngine) -> None: ...


class FrontEnd(Protocol):
    """The front end's end of a link."""

    async def send(self, message: ToEngine) -> None: ...

    async def receive(self) -> FromEngine:
        """Next message; raises EOFError when the engine is gone."""
        ...


@runtime_checkable
class Pushing(Protocol):
    """An end of a link that needs no task to wait for each message. Where an end is one, it is used so."""

    async def listen(self, hear: Callable[[Any], None]) -> None:
        """Have `hear` get each message as it comes, in order; raises EOFError when the other side is gone."""
        ...

    def push(self, message: Any) -> None:
        """Send at once. Where the other side is gone it is lost: who listens hears of that."""
        ...


async def hear_all(link: EngineEnd | FrontEnd, hear: Callable[[Any], None]) -> None:
    """Have `hear` get each message; raises EOFError when the other side is gone."""
    if isinstance(link, Pushing):
        await link.listen(hear)
    while True:
        hear(await link.receive())
