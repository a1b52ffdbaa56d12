"""Faults for tests: the engine process ends when a step has a row of one request.

`TOKENMILL_TEST_POISON_SEED=N tokenmill serve ...` makes requests with the seed N crash it;
`TOKENMILL_TEST_HUNGRY_SEED=N` makes them take HUNGRY_BYTES, and end it as the system does for want of memory. It is how
tests see what becomes of a request that ends engines, and of those beside it (cluster.suspects).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable

from ..core.effects import Job
from ..core.ports import Executor
from ..core.step import StepPlan, StepResult

CRASH, HUNGRY = "TOKENMILL_TEST_POISON_SEED", "TOKENMILL_TEST_HUNGRY_SEED"
HUNGRY_BYTES = 1 << 29


class PoisonedExecutor:
    """An executor that does what `executor` does, until it is given a row of a request with one of these seeds."""

    def __init__(self, executor: Executor, crash: int | None, hungry: int | None) -> None:
        self._executor = executor
        self._crash = crash
        self._hungry = hungry

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        seeds = {row.intro.seed for row in plan.rows if row.intro is not None}
        if self._crash in seeds:
            os.kill(os.getpid(), signal.SIGABRT)
        if self._hungry in seeds:
            taken = b"x" * HUNGRY_BYTES
            os.kill(os.getpid(), signal.SIGKILL)
            assert taken
        return self._executor.execute(plan)

    async def run(self, job: Job) -> str:
        return await self._executor.run(job)


def maybe_poisoned(executor: Executor) -> Executor:
    crash, hungry = (None if (seed := os.environ.get(name)) is None else int(seed) for name in (CRASH, HUNGRY))
    return executor if crash is hungry is None else PoisonedExecutor(executor, crash, hungry)
