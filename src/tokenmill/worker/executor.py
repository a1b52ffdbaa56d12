"""The live Executor: steps run in order on one thread of their own, so that the event loop plans the next meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..core.errors import InvalidRequest
from ..core.step import StepPlan, StepResult
from .adapters import Adapters
from .pooling import PoolingRunner
from .runner import Runner


class ModelExecutor:
    """Runs plans first in, first out. `on_close` frees what the runner uses, once the last step has ended."""

    def __init__(
        self, runner: Runner | PoolingRunner, on_close: Callable[[], None], adapters: Adapters | None = None
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._on_close = on_close
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenmill-step")

    async def execute(self, plan: StepPlan) -> StepResult:
        """Run a step on the step thread. Calls that overlap run one after the other in the order they were made; one
        that fails raises here and does not stop the next."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.run, plan)

    async def load_adapter(self, path: str, inside: str) -> str:
        """Reading goes on beside the steps; packing is done between two of them."""
        if self._adapters is None:
            raise InvalidRequest("This server takes no LoRA adapters; start it with --enable-lora.", param="lora_name")
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(None, self._adapters.prepare, path, inside)
        return await loop.run_in_executor(self._thread, self._adapters.install, prepared)

    async def unload_adapter(self, digest: str) -> None:
        """Takes effect after the steps submitted before."""
        assert self._adapters is not None, "no adapter was ever loaded"
        await asyncio.get_running_loop().run_in_executor(self._thread, self._adapters.remove, digest)

    def execute_now(self, plan: StepPlan) -> StepResult:
        """Run a step on the step thread and wait for it."""
        return self._thread.submit(self._runner.run, plan).result()

    def close(self) -> None:
        """Wait for the step that is running, drop those that are not, free memory. May be called again."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._on_close()
