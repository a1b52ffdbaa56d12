"""The whole loop around EngineCore, live and simulated: read the inbox, plan, execute, commit, emit.

Up to `steps_in_flight` steps are under way at once, and their results are committed in order. Where requests come and
go, a step is planned when the one before it is nearly over, so that it has rows for what has arrived by then. The loop
sleeps on one event that an arriving message, an ending step or the time to plan sets; it never polls. Knows nothing of
HTTP, models or real time.

    inbox -> core.add / abort / drain       at the next step border
    LoadAdapter -> executor.load_adapter    beside the steps; then core.load_adapter, and an answer
    core.plan -> executor.execute           while steps may be started and it is time
    result -> core.commit, error -> core.fail
    outputs -> link.send                    one message a step, empty ones too: they show that steps make progress
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any

from ..core.errors import EngineFailed, TokenmillError
from ..core.events import Abort, AdapterLoaded, LoadAdapter, Output, StepOutputs, Submit, UnloadAdapter
from ..core.ports import Clock, EngineEnd, Executor, ToEngine
from ..core.step import StepPlan, StepResult
from .journal import Core
from .pace import Pace

log = logging.getLogger(__name__)

LONG_S = 0.05
LONG_SHARE = 2.0
"""A step is long that takes more than both: these seconds, and so many times what was expected of it."""

RECENT_S = 0.25
"""After this long without a request that came or went, none is waited for: to wait costs the step a little."""


class EngineShell:
    """Runs one engine until it is drained or its front end is gone."""

    def __init__(self, core: Core, executor: Executor, link: EngineEnd, clock: Clock) -> None:
        self._core = core
        self._executor = executor
        self._link = link
        self._clock = clock
        self._inbox: deque[ToEngine] = deque()
        self._in_flight: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        self._chores: set[asyncio.Task[None]] = set()
        self._num_loading = 0
        self._wake = asyncio.Event()
        self._is_draining = False
        self._pace = Pace()
        self._changed_s = -RECENT_S  # when a request last came or went
        self._began_s = 0.0  # when the oldest step in flight was the first to compute
        self._alarm: asyncio.TimerHandle | None = None
        self._has_rung = False

    async def run(self) -> None:
        """Serve until every request admitted before a Drain is finished, or the front end is gone.

        A failed step ends its requests and the loop goes on. Whatever is in flight is waited for before returning;
        cancelling this coroutine cancels it.
        """
        reader = asyncio.create_task(self._read(), name="engine inbox")
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                outputs = self._take_inbox()
                has_stepped = self._commit_finished(outputs)
                self._unload_unused()
                if any(output.finish_reason is not None for output in outputs):
                    self._changed_s = self._clock.now()
                if not reader.done():
                    self._start_steps()
                elif not self._in_flight:
                    reader.result()
                    return
                if outputs or has_stepped:
                    await self._link.send(StepOutputs(tuple(outputs), self._core.stats(), self._clock.now()))
                if self._is_draining and not self._core.has_work:
                    return
                await self._wake.wait()
                self._wake.clear()
        finally:
            reader.cancel()
            self._forget_alarm()
            for _, result in self._in_flight:
                result.cancel()
            for chore in self._chores:
                chore.cancel()

    async def _read(self) -> None:
        """Fill the inbox; ends when the front end is gone."""
        with contextlib.suppress(EOFError):
            while True:
                self._inbox.append(await self._link.receive())
                self._wake.set()

    def _take_inbox(self) -> list[Output]:
        outputs: list[Output] = []
        now = self._clock.now()
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Submit):
                self._changed_s = now
                for request in message.requests:
                    outputs += self._core.add(request, now)
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    outputs += self._core.abort(request_id, now)
            elif isinstance(message, LoadAdapter):
                self._num_loading += 1
                self._start_chore(self._load_adapter(message))
            elif isinstance(message, UnloadAdapter):
                self._core.unload_adapter(message.digest)
            else:
                self._core.drain()
                self._is_draining = True
        return outputs

    async def _load_adapter(self, message: LoadAdapter) -> None:
        try:
            digest = await self._executor.load_adapter(message.path, message.inside)
        except TokenmillError as error:
            answer = AdapterLoaded(message.number, "", error.message, error.kind, error.param or "")
        except Exception as error:
            log.exception("The adapter in %s could not be loaded.", message.path)
            text = f"The adapter could not be loaded: {type(error).__name__}; see the server's log."
            answer = AdapterLoaded(message.number, "", text, EngineFailed.kind)
        else:
            self._core.load_adapter(digest)
            answer = AdapterLoaded(message.number, digest)
        finally:
            self._num_loading -= 1
        with contextlib.suppress(EOFError):
            await self._link.send(answer)

    def _unload_unused(self) -> None:
        """Not while an adapter is being loaded: it may be one of these, found in its place and to be kept there."""
        if not self._num_loading:
            for digest in self._core.take_unused_adapters():
                self._start_chore(self._executor.unload_adapter(digest))

    def _start_chore(self, work: Coroutine[Any, Any, None]) -> None:
        chore = asyncio.create_task(work)
        self._chores.add(chore)
        chore.add_done_callback(self._end_chore)

    def _end_chore(self, chore: asyncio.Task[None]) -> None:
        self._chores.discard(chore)
        self._wake.set()
        if not chore.cancelled() and chore.exception() is not None:
            log.error("Unloading an adapter failed.", exc_info=chore.exception())

    def _commit_finished(self, outputs: list[Output]) -> bool:
        """Commit the steps that have ended, oldest first; extends `outputs` and tells whether there was one."""
        has_stepped = False
        while self._in_flight and self._in_flight[0][1].done():
            plan, ended = self._in_flight.popleft()
            has_stepped = True
            self._began_s = self._clock.now()
            self._forget_alarm()
            try:
                result = ended.result()
            except Exception as error:
                log.exception("Step %d of %d rows failed.", plan.step, len(plan.rows))
                outputs += self._core.fail(plan.step, f"{type(error).__name__}: {error}", self._clock.now())
            else:
                self._tell_long(plan, result.duration_s)
                self._pace.note(plan.num_tokens, result.duration_s)
                outputs += self._core.commit(result, self._clock.now())
        return has_stepped

    def _tell_long(self, plan: StepPlan, duration_s: float) -> None:
        """Log a step that took much longer than those of its size did before."""
        if duration_s < LONG_S or not log.isEnabledFor(logging.DEBUG):
            return
        expected_s = self._pace.predict(plan.num_tokens)
        if 0 < expected_s * LONG_SHARE < duration_s:
            log.debug(
                "Step %d took %.0f ms instead of %.0f: %d rows (%d of them new, %d drawing), %d tokens.",
                plan.step, 1e3 * duration_s, 1e3 * expected_s, len(plan.rows),
                sum(row.intro is not None for row in plan.rows), sum(row.sample for row in plan.rows), plan.num_tokens,
            )  # fmt: skip

    def _start_steps(self) -> None:
        while self._is_time() and (plan := self._core.plan(self._clock.now())) is not None:
            if not self._in_flight:
                self._began_s = self._clock.now()
            result = asyncio.ensure_future(self._executor.execute(plan))
            result.add_done_callback(lambda _: self._wake.set())
            self._in_flight.append((plan, result))

    def _is_time(self) -> bool:
        """Whether to plan now; if not, the alarm will wake the loop for it."""
        if not self._in_flight or self._began_s - self._changed_s > RECENT_S:
            return True
        if self._alarm is None:
            left_s = self._began_s + self._pace.delay(self._in_flight[0][0].num_tokens) - self._clock.now()
            if left_s <= 0:
                return True
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._ring)
        return self._has_rung

    def _ring(self) -> None:
        self._has_rung = True
        self._wake.set()

    def _forget_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._has_rung = False
