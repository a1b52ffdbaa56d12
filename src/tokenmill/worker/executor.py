"""The live Executor: steps run in order on one thread of their own, so that the event loop plans the next meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..core.step import StepPlan, StepResult
from .pooling import PoolingRunner
from .runner import Runner


class ModelExecutor:
    """Runs plans first in, first out. `on_close` frees what the runner uses, once the last step has ended."""

    def __init__(self, runner: Runner | PoolingRunner, on_close: Callable[[], None]) -> None:
        self._runner = runner
        self._on_close = on_close
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenmill-step")

    async def execute(self, plan: StepPlan) -> StepResult:
        """Run a step on the step thread. Calls that overlap run one after the other in the order they were made; one
        that fails raises here and does not stop the next."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.run, plan)

    def execute_now(self, plan: StepPlan) -> StepResult:
        """Run a step on the step thread and wait for it."""
        return self._thread.submit(self._runner.run, plan).result()

    def close(self) -> None:
        """Wait for the step that is running, drop those that are not, free memory. May be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._on_close()
