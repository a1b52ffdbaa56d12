"""The live Executor: steps are prepared where they are planned, and computed in order on a thread of their own.

The thread does little but sit in native calls, which leave the interpreter to the event loop: while a step computes,
the loop takes in the one before, plans the next and makes its arrays. A step's end is told when the next one starts,
for the loop, once awake, keeps the interpreter longer than that takes. With nothing to compute for a
while the thread does what `when_idle` asks of it, a small piece at a time.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from ..core.step import StepPlan, StepResult
from .adapters import Adapters
from .pooling import PoolingRunner
from .runner import Runner

_REST_S = 0.02
"""How long nothing must have come before the thread does what can wait: a step that is late must not wait for it."""


@dataclass(slots=True)
class _Job:
    """Something to run on the step thread. `tell`: called there some time after it has ended; `settle` then makes its
    outcome that of a future, on the thread that waits for it."""

    run: Callable[[], Any]
    tell: Callable[[_Job], None]
    finish: Callable[[Any], Any]
    result: Any = None
    error: Exception | None = None

    def settle(self, future: asyncio.Future[Any] | Future[Any]) -> None:
        if future.cancelled():
            return
        try:
            if self.error is not None:
                raise self.error
            future.set_result(self.finish(self.result))
        except Exception as error:
            future.set_exception(error)


class ModelExecutor:
    """Runs plans first in, first out. `on_close` frees what the runner uses, once the last step has ended. `when_idle`
    does a piece of work that can wait, and tells whether there may be more."""

    def __init__(
        self,
        runner: Runner | PoolingRunner,
        on_close: Callable[[], None],
        adapters: Adapters | None = None,
        when_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runner: Any = runner  # what prepare returns goes to the other two and concerns nobody else
        self._adapters = adapters
        self._on_close = on_close
        self._when_idle = when_idle
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Run a step. Calls that overlap run one after the other in the order they were made; one that fails raises
        where its future is awaited and does not stop the next."""
        return self._submit(self._prepare(plan), self._runner.collect)

    def execute_now(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for it."""
        future: Future[StepResult] = Future()
        self._put(_Job(self._prepare(plan), lambda job: job.settle(future), self._runner.collect))
        return future.result()

    async def load_adapter(self, path: str, inside: str) -> str:
        """Reading goes on beside the steps; packing is done between two of them."""
        adapters = self._adapters
        if adapters is None:
            raise InvalidRequest("This server takes no LoRA adapters; start it with --enable-lora.", param="lora_name")
        prepared = await asyncio.get_running_loop().run_in_executor(None, adapters.prepare, path, inside)
        digest: str = await self._submit(lambda: adapters.install(prepared))
        return digest

    async def unload_adapter(self, digest: str) -> None:
        """Takes effect after the steps submitted before."""
        adapters = self._adapters
        assert adapters is not None, "no adapter was ever loaded"
        await self._submit(lambda: adapters.remove(digest))

    def close(self) -> None:
        """Wait for the step that is running, drop those that are not, free memory. May be called again."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._on_close()

    def _prepare(self, plan: StepPlan) -> Callable[[], Any]:
        """What is to be computed; a plan that cannot be prepared fails in its turn."""
        try:
            step = self._runner.prepare(plan)
        except Exception as error:
            return _raise(error)
        compute = self._runner.compute

        def run() -> Any:
            compute(step)
            return step

        return run

    def _submit(
        self, run: Callable[[], Any], finish: Callable[[Any], Any] = lambda result: result
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(job: _Job) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(job.settle, future)

        self._put(_Job(run, tell, finish))
        return future

    def _put(self, job: _Job) -> None:
        if self._is_closed:
            raise RuntimeError("The executor is closed.")
        self._queue.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_jobs, name="tokenmill-step", daemon=True)
            self._thread.start()

    def _run_jobs(self) -> None:
        ended: _Job | None = None
        while True:
            if ended is not None and self._queue.empty():
                ended.tell(ended)
                ended = None
            job = self._next_job()
            if ended is not None:
                ended.tell(ended)
            if job is None:
                return
            try:
                assert not self._is_closed, "The executor was closed before the step ran."
                job.result = job.run()
            except Exception as error:
                job.error = error
            ended = job

    def _next_job(self) -> _Job | None:
        try:
            return self._queue.get(timeout=_REST_S)
        except queue.Empty:
            while self._queue.empty() and self._when_idle():
                pass
        return self._queue.get()


def _raise(error: Exception) -> Callable[[], Any]:
    def run() -> None:
        raise error

    return run
