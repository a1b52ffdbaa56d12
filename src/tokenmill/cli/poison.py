"""A fault for tests: the engine process ends as if killed when a step has a row of one request.

`TOKENMILL_TEST_POISON_SEED=N tokenmill serve ...` makes requests with the seed N such. It is how tests see what becomes
of a request that ends engines, and of those beside it (cluster.suspects).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable

from ..core.effects import Job
from ..core.ports import Executor
from ..core.step import StepPlan, StepResult

VARIABLE = "TOKENMILL_TEST_POISON_SEED"


class PoisonedExecutor:
    """An executor that does what `executor` does, until it is given a row of a request with this seed."""

    def __init__(self, executor: Executor, seed: int) -> None:
        self._executor = executor
        self._seed = seed

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        if any(row.intro is not None and row.intro.seed == self._seed for row in plan.rows):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._executor.execute(plan)

    async def run(self, job: Job) -> str:
        return await self._executor.run(job)


def maybe_poisoned(executor: Executor) -> Executor:
    seed = os.environ.get(VARIABLE)
    return executor if seed is None else PoisonedExecutor(executor, int(seed))
