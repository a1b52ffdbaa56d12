"""The whole loop around EngineCore, live and simulated: read the inbox, plan, execute, commit, emit.

Up to `steps_in_flight` steps are under way at once, and their results are committed in order. Where requests come and
go, a step is planned when the one before it is nearly over, so that it has rows for what has arrived by then. The loop
sleeps on one event that an arriving message, an ending step or the time to plan sets; it never polls. Knows nothing of
HTTP, models or real time.

    inbox -> core.handle                    at the next step border
    core.plan -> executor.execute           while steps may be started and it is time
    result -> core.commit, error -> core.handle(StepFailed)
    effects: jobs -> executor.run           beside the steps; their ends go to the inbox
             answers -> link.send           each at once
             outputs -> link.send           one message a step, empty ones too: they show that steps make progress
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from ..core.effects import Effects, Event, Job, JobEnded, StepFailed
from ..core.errors import EngineFailed, TokenmillError
from ..core.events import FromEngine, Output, StepOutputs, Submit
from ..core.ports import Clock, EngineEnd, Executor, hear_all
from ..core.step import StepPlan, StepResult
from ..core.work import lead_s
from .core import EngineCore
from .recorders import Watcher

# Predicts how long a step will take, from similar steps, and therefore when to plan the next one.
#
# A plan made early misses requests that arrive before its step can start; a plan made late leaves the processors idle.
# The time left for planning is therefore generous, and predictions are rather too short: they follow a shorter step at
# once and a longer one slowly, so that one delayed step does little harm. What is to be expected of a step, and not at
# least, is known to the cost model (`core.cost`).


SHORT_S = 0.006
"""Steps below this are planned ahead at once: there is nothing to wait for."""

_GROWTH = 1.25

_RECENT_S, _RECENT_STEPS = 0.25, 4
"""After this long, and so many steps, without a request that came or went, none is waited for: to wait costs the step a
little, which is less of a long one."""


class Pace:
    """Durations of steps by the number of their tokens."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}  # by bit length: tokens and seconds of a step

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step has ended."""
        size = num_tokens.bit_length()
        known = self._known.get(size)
        if known is not None:
            duration_s = min(duration_s, _GROWTH * (known[1] * min(1.0, num_tokens / known[0])))
        self._known[size] = (num_tokens, duration_s)

    def note_alike(self, num_tokens: int, durations: Sequence[float]) -> None:
        """As `note` of steps of so many tokens, one after the other."""
        self.note(num_tokens, durations[0])
        size = num_tokens.bit_length()
        known_s = self._known[size][1]
        for duration_s in durations[1:]:
            known_s = min(duration_s, _GROWTH * known_s)
        self._known[size] = (num_tokens, known_s)

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step of this many tokens takes: no less than one of fewer tokens, nor, for each token, than
        one of more. 0 where neither is known."""
        size = num_tokens.bit_length()
        if size in self._known:
            return self._scaled(size, num_tokens)
        below = max((known for known in self._known if known < size), default=size)
        above = min((known for known in self._known if known > size), default=size)
        return max(self._scaled(below, num_tokens), self._scaled(above, num_tokens))

    def is_recent(self, since_s: float, num_tokens: int) -> bool:
        """Whether a request that came or went so long before a step of so many tokens says that others will."""
        return since_s <= max(_RECENT_S, _RECENT_STEPS * self.predict(num_tokens))

    def _scaled(self, size: int, num_tokens: int) -> float:
        known_tokens, duration_s = self._known.get(size, (1, 0.0))
        return duration_s * min(1.0, num_tokens / known_tokens)

    def delay(self, num_tokens: int) -> float:
        """Seconds from the start of such a step to the planning of the next."""
        predicted_s = self.predict(num_tokens)
        if predicted_s < SHORT_S:
            return 0.0
        return predicted_s - lead_s(predicted_s)


class Wake:
    """For one task that waits: asyncio.Event at a third of the price. Once set, it stays so until somebody has
    waited."""

    def __init__(self) -> None:
        self.is_set = False
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        self.is_set = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Returns when it has been set; it no longer is then."""
        if not self.is_set:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        self.is_set = False


log = logging.getLogger(__name__)

LONG_S = 0.05
LONG_SHARE = 2.0
"""A step is long that takes more than both: these seconds, and so many times what was expected of it."""


class Rest(Protocol):
    """What a shell does while it has nothing to do: a simulation makes the steps that are known then."""

    def begin(self, shell: EngineShell) -> None:
        """It sleeps from now on."""
        ...

    def end(self, shell: EngineShell) -> None:
        """It wakes; what it finds is as if it had made each step."""
        ...


class EngineShell:
    """Runs one engine until it is drained or its front end is gone. `core` is for whoever looks into it."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        link: EngineEnd,
        clock: Clock,
        flight: Watcher | None = None,
        rest: Rest | None = None,
    ) -> None:
        self.core = core
        self._executor = executor
        self._link = link
        self._clock = clock
        self._flight = flight
        self._rest = rest
        self._inbox: deque[Event] = deque()
        self._in_flight: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        self._jobs: set[asyncio.Task[None]] = set()
        self._answers: list[FromEngine] = []  # not yet sent
        self._outputs: list[Output] = []  # of the message to be sent next
        self.num_held = 0  # blocks, as told last: a transfer that ends between steps gives some back
        self._wake = Wake()
        self.pace = Pace()
        self.changed_s = -math.inf  # when a request last came or went
        self.began_s = 0.0  # when the oldest step in flight was the first to compute
        self._alarm: asyncio.TimerHandle | None = None
        self._has_rung = False

    async def run(self) -> None:
        """Serve until every request admitted before a Drain is finished, or the front end is gone.

        A failed step ends its requests and the loop goes on. Steps and jobs in flight are waited for before returning,
        so that the core may serve another front end; cancelling this coroutine cancels them.
        """
        reader = asyncio.create_task(self._read(), name="engine inbox")
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._take_inbox()
                has_stepped = self._commit_finished()
                if not reader.done():
                    self._start_steps()
                elif not self._in_flight and not self._jobs:
                    reader.result()
                    return
                await self._send(has_stepped)
                if self.core.is_drained:
                    return
                if self._rest is not None:
                    self._rest.begin(self)
                await self._wake.wait()
                if self._rest is not None:
                    self._rest.end(self)
        finally:
            reader.cancel()
            self._forget_alarm()
            for _, result in self._in_flight:
                result.cancel()
            for job in self._jobs:
                job.cancel()

    @property
    def num_jobs(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing but steps is under way."""
        return not (self._inbox or self._jobs or self._answers or self._outputs or self._wake.is_set)

    def is_changing(self, num_tokens: int) -> bool:
        """Whether a request came or went lately, as the step of so many tokens began that is the first in flight."""
        return self.pace.is_recent(self.began_s - self.changed_s, num_tokens)

    def wake(self) -> None:
        self._wake.set()

    def resume(self, in_flight: list[tuple[StepPlan, asyncio.Future[StepResult]]], plan_s: float | None) -> None:
        """These are in flight now, instead of those that were; the next is planned at `plan_s`, if that is not over."""
        self._forget_alarm()
        self._in_flight = deque(in_flight)
        for _, result in in_flight:
            result.add_done_callback(lambda _: self._wake.set())
        if plan_s is not None:
            self._alarm = asyncio.get_running_loop().call_at(plan_s, self._ring)

    def hear(self, event: Event) -> None:
        """Have the core handle an event at the next turn of the loop, after those that came before."""
        self._inbox.append(event)
        self._wake.set()

    async def _read(self) -> None:
        """Fill the inbox; ends when the front end is gone."""
        with contextlib.suppress(EOFError):
            await hear_all(self._link, self.hear)

    def _take_inbox(self) -> None:
        now = self._clock.now()
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Submit):
                self.changed_s = now
            self._carry_out(self.core.handle(event, now))

    def _carry_out(self, effects: Effects) -> None:
        """Start the jobs; what goes to the front end is sent at the end of this turn of the loop."""
        if any([output.finish_reason is not None for output in effects.outputs]):
            self.changed_s = self._clock.now()
            if self._flight is not None:
                self._flight.told(effects.outputs, self.changed_s)
        self._outputs += effects.outputs
        self._answers += effects.answers
        for job in effects.jobs:
            task = asyncio.create_task(self._run_job(job))
            self._jobs.add(task)
            task.add_done_callback(self._end_job)

    async def _run_job(self, job: Job) -> None:
        try:
            end = JobEnded(job, await self._executor.run(job))
        except TokenmillError as error:
            end = JobEnded(job, "", error.message, error.kind, error.param or "")
        except Exception as error:
            log.exception("A job failed: %s.", type(job).__name__)
            message = f"{type(job).__name__} failed: {type(error).__name__}; see the server's log."
            end = JobEnded(job, "", message, EngineFailed.kind)
        self.hear(end)

    def _end_job(self, task: asyncio.Task[None]) -> None:
        self._jobs.discard(task)
        self._wake.set()

    async def _send(self, has_stepped: bool) -> None:
        with contextlib.suppress(EOFError):  # the reader hears of it, too
            await self._send_what_there_is(has_stepped)

    async def _send_what_there_is(self, has_stepped: bool) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            await self._link.send(answer)
        outputs, self._outputs = self._outputs, []
        if outputs or has_stepped or not self._in_flight:
            stats = self.core.stats()
            if outputs or has_stepped or stats.num_held_blocks != self.num_held:
                self.num_held = stats.num_held_blocks
                await self._link.send(StepOutputs(tuple(outputs), stats, self._clock.now()))

    def _commit_finished(self) -> bool:
        """Commit the steps that have ended, oldest first, and tell whether there was one."""
        has_stepped = False
        while self._in_flight and self._in_flight[0][1].done():
            plan, ended = self._in_flight.popleft()
            step, duration_s, has_failed = self.core.state.in_flight[0], 0.0, False
            has_stepped = True
            self.began_s = self._clock.now()
            self._forget_alarm()
            try:
                result = ended.result()
            except Exception as error:
                log.exception("Step %d of %d rows failed.", plan.step, len(plan.rows))
                failure = StepFailed(plan.step, f"{type(error).__name__}: {error}")
                self._carry_out(self.core.handle(failure, self._clock.now()))
                has_failed = True
            else:
                self._tell_long(plan, result.duration_s)
                self.pace.note(step.num_tokens, result.duration_s)
                self._carry_out(self.core.commit(result, self._clock.now()))
                duration_s = result.duration_s
            if self._flight is not None:
                self._flight.ended(step, self.began_s, duration_s, self._clock.now(), has_failed=has_failed)
        return has_stepped

    def _tell_long(self, plan: StepPlan, duration_s: float) -> None:
        """Log a step that took much longer than those of its size did before."""
        if duration_s < LONG_S or not log.isEnabledFor(logging.DEBUG):
            return
        expected_s = self.pace.predict(plan.num_tokens)
        if 0 < expected_s * LONG_SHARE < duration_s:
            log.debug(
                "Step %d took %.0f ms instead of %.0f: %d rows (%d of them new, %d drawing), %d tokens.",
                plan.step, 1e3 * duration_s, 1e3 * expected_s, len(plan.rows),
                sum(row.intro is not None for row in plan.rows), sum(row.sample for row in plan.rows), plan.num_tokens,
            )  # fmt: skip

    def _start_steps(self) -> None:
        while self._is_time() and (plan := self.core.plan(now := self._clock.now())) is not None:
            if not self._in_flight:
                self.began_s = self._clock.now()
            if self._flight is not None:
                self._flight.planned(self.core.state, now)
            result = asyncio.ensure_future(self._executor.execute(plan))
            result.add_done_callback(lambda _: self._wake.set())
            self._in_flight.append((plan, result))
            if self._flight is not None:
                self._flight.submitted(plan.step, self._clock.now())
        self._carry_out(self.core.take_effects())

    def _is_time(self) -> bool:
        """Whether to plan now; if not, the alarm will wake the loop for it."""
        if not self._in_flight:
            return True
        num_tokens = self.core.state.in_flight[0].num_tokens
        if not self.is_changing(num_tokens):
            return True
        if self._alarm is None:
            left_s = self.began_s + self.pace.delay(num_tokens) - self._clock.now()
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
