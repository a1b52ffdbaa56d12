"""The live Executor: steps are prepared where they are planned, and computed in order on a thread of their own.

The thread does little but sit in native calls, which leave the interpreter to the event loop: while a step computes,
the loop takes in the one before, plans the next and makes its arrays. A step that is one call and no more (a turn, see
ops/api.py) is told to follow the one before where that is one too: then the thread stays in native code from one to the
next, and a pipe tells the loop of each one's end. Of other steps that is told when the next one starts, for the loop,
once awake, keeps the interpreter longer than that takes.

With nothing to compute for a while the thread does what `when_idle` asks of it, a small piece at a time.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..core.errors import InvalidRequest
from ..core.step import StepPlan, StepResult
from ..ops.api import Turn
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
        if self.error is not None:
            _settle(future, _raise(self.error))
        else:
            _settle(future, partial(self.finish, self.result))


@dataclass(slots=True)
class _RunningTurn:
    """`job`: what runs it, and those that follow it."""

    step: Any
    future: asyncio.Future[StepResult]
    job: _Job


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
        self._turns: deque[_RunningTurn] = deque()  # in order; a byte comes for each, unless its job fails
        self._last_turn: Turn | None = None  # of the step submitted last
        self._ends = _Ends(self._end_turns)

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Run a step. Calls that overlap run one after the other in the order they were made; one that fails raises
        where its future is awaited and does not stop the next."""
        self._require_open()
        step, run = self._prepare(plan)
        if step is None or step.turn is None:
            return self._submit(run, self._runner.collect)
        return self._submit_turn(step)

    def execute_now(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for it."""
        self._require_open()
        future: Future[StepResult] = Future()
        _, run = self._prepare(plan)
        self._put(_Job(run, lambda job: job.settle(future), self._runner.collect))
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
        """Wait for the step that is running and for the turns that follow it, drop what has not begun, free memory. May
        be called again."""
        self._is_closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._ends.close()
        while self._turns:
            self._settle_turn(self._turns.popleft())
        self._on_close()
        # What they hold goes now, and not when somebody lets go of the executor.
        self._runner = self._adapters = None
        self._last_turn = None
        self._when_idle = lambda: False
        self._on_close = lambda: None

    def _prepare(self, plan: StepPlan) -> tuple[Any, Callable[[], Any]]:
        """The step and what computes it; a plan that cannot be prepared gives none, and fails in its turn."""
        try:
            step = self._runner.prepare(plan)
        except Exception as error:
            return None, _raise(error)
        return step, partial(self._compute, step)

    def _compute(self, step: Any) -> Any:
        self._runner.compute(step)
        return step

    def _submit_turn(self, step: Any) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        turn: Turn = step.turn
        self._require_open()
        write_fd = self._ends.watched_by(loop)
        if self._last_turn is not None and turn.follow(self._last_turn):
            job = self._turns[-1].job
        else:

            def tell(job: _Job) -> None:
                if job.error is not None and not loop.is_closed():
                    loop.call_soon_threadsafe(self._fail_turns, job)

            job = _Job(partial(turn.run, write_fd), tell, lambda _: None)
            self._put(job)
        self._turns.append(_RunningTurn(step, future, job))
        self._last_turn = turn
        return future

    def _end_turns(self, count: int) -> None:
        for _ in range(count):
            self._settle_turn(self._turns.popleft())

    def _fail_turns(self, job: _Job) -> None:
        """A job that fails has run none of its turns. The ends of those before may still be unread."""
        failed = [turn for turn in self._turns if turn.job is job]
        self._turns = deque(turn for turn in self._turns if turn.job is not job)
        if any(turn.step.turn is self._last_turn for turn in failed):
            self._last_turn = None
        for turn in failed:
            self._settle_turn(turn)

    def _settle_turn(self, turn: _RunningTurn) -> None:
        error = turn.job.error
        _settle(turn.future, partial(self._collect_turn, turn.step) if error is None else _raise(error))

    def _collect_turn(self, step: Any) -> StepResult:
        self._runner.note_turn(step)
        result: StepResult = self._runner.collect(step)
        return result

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

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("The executor is closed.")

    def _put(self, job: _Job) -> None:
        self._require_open()
        self._last_turn = None
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


class _Ends:
    """A pipe: each byte in it is the end of a turn, and told to `on_ends` by the loop that watches it."""

    def __init__(self, on_ends: Callable[[int], None]) -> None:
        self._on_ends = on_ends
        self._fds: tuple[int, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None

    def watched_by(self, loop: asyncio.AbstractEventLoop) -> int:
        """Where to write, once `loop` watches."""
        if not self._fds:
            self._fds = os.pipe()
        if loop is not self._loop:
            self._leave()
            loop.add_reader(self._fds[0], self._read)
            self._loop = loop
        return self._fds[1]

    def close(self) -> None:
        self._leave()
        while self._fds:
            os.close(self._fds[0])
            self._fds = self._fds[1:]

    def _leave(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._fds[0])
        self._loop = None

    def _read(self) -> None:
        self._on_ends(len(os.read(self._fds[0], 4096)))


def _settle(future: asyncio.Future[Any] | Future[Any], outcome: Callable[[], Any]) -> None:
    if future.cancelled() or (isinstance(future, asyncio.Future) and future.get_loop().is_closed()):
        return
    try:
        future.set_result(outcome())
    except Exception as error:
        future.set_exception(error)


def _raise(error: Exception) -> Callable[[], Any]:
    def run() -> None:
        raise error

    return run
