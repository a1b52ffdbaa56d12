"""Leaps of a simulated worker over decode steps that nothing comes between (`engine.leap`), without a task, a timer and
a message for each.

When a worker has nothing but decodes that go on, and all is quiet, its next steps are known: when each ends, and what
it gives. The worker then sleeps until the last of them, or until something arrives. What it would have done and said by
then is done when somebody asks: the front end, before it handles anything else (`Late`), or the worker as it wakes. So
the order in which the gateway hears of steps is that of single steps, and so are all times, to the last bit.

Where the gateway has nothing to decide after a step (`waits_for_steps`), all steps of a leap that have arrived are told
at once (`cluster.events.Repeated`): what it keeps of single steps is their durations, which it gets in the order of all
workers' steps.

Where two things happen at the very same time of virtual seconds, their order may be another than without leaps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, Protocol

from ..cluster.events import Repeated
from ..core.cost import Work
from ..core.events import FromEngine, Output, StepOutputs, output_of
from ..engine.leap import Leap, may_leap
from ..engine.shell import RECENT_S, EngineShell
from .loop import VirtualLoop
from .timed import DRAWN, Foreseen, TimedExecutor

MOST_STEPS = 256
"""Of a leap: what is known of later ones would mostly be in vain."""


class Run(NamedTuple):
    """Steps of a leap that have arrived: what is told of them, and their (seconds, tokens)."""

    told: Repeated
    paces: list[tuple[float, int]]


class Leaper:
    """engine.shell.Rest of a worker whose `executor` only takes time. link: its number at the front end. latency_s: of
    each message on the way there."""

    def __init__(self, executor: TimedExecutor, loop: VirtualLoop, late: Late, link: int, latency_s: float) -> None:
        self.link = link
        self.num_leapt = 0
        self.told: deque[tuple[float, FromEngine]] = deque()  # and not heard: when it arrives
        self.is_listed = False  # in `late`
        self._executor = executor
        self._loop = loop
        self._late = late
        self._latency_s = latency_s
        self._leap: Leap | None = None
        self._shell: EngineShell | None = None
        self._ends: list[float] = []
        self._tooks: list[float] = []
        self._foreseen: list[Foreseen] = []  # those that are planned in the leap
        self._free_s = 0.0  # after them
        self._most = 0
        self._plan_s = -1.0  # when the next step is planned; -1: it is
        self._alarm: asyncio.TimerHandle | None = None
        self._heads: list[tuple[tuple[object, ...], int, tuple[object, ...]]] = []

    # ---- engine.shell.Rest ----

    def begin(self, shell: EngineShell) -> None:
        """The shell has nothing to do now."""
        core = shell.core
        depth = core.config.steps_in_flight
        if not shell.is_quiet or len(core.state.in_flight) < depth:
            return
        now = self._loop.time()
        is_delayed = shell.began_s - shell.changed_s <= RECENT_S
        if (is_delayed and depth > 2) or not may_leap(core, DRAWN):
            return
        leap = Leap(core, DRAWN)
        running = core.state.running
        most = min(
            leap.most_commits, MOST_STEPS, *[self._executor.num_left(seq.number, seq.num_computed) for seq in running]
        )
        if most < 2:
            return
        executor, under_way = self._executor, list(self._executor.under_way)
        assert len(under_way) == depth and under_way[0].end_s >= now, (under_way, now)
        self._ends, self._tooks = [each.end_s for each in under_way], [each.took_s for each in under_way]
        self._foreseen, self._free_s = [], executor.free_s
        for later in range(most - depth):
            self._foresee(leap.work(later))
        if is_delayed and any(later < 0.8 * each for each, later in pairwise(self._tooks)):
            return
        executor.pause()
        self._leap, self._shell, self._most, self._plan_s = leap, shell, most, -1.0
        self._heads = [
            (
                (seq.request.id, (DRAWN,), (), (), None, None),
                len(seq.tokens) - seq.num_prompt,
                (min(seq.num_cached, seq.num_prompt), "", "", "", b"", None, False, seq.request.attempt),
            )
            for seq in running
        ]
        self._alarm = self._loop.call_at(self._ends[most - 1], shell.wake)
        self._late.list(self)

    def end(self, shell: EngineShell) -> None:
        """The shell wakes."""
        leap = self._leap
        if leap is None:
            return
        self._late.settle()
        self.advance(self._loop.time())
        self._leap = None
        if self._alarm is not None:
            self._alarm.cancel()
        first = leap.num_commits
        self.num_leapt += first
        plans = leap.land()
        ends, tooks = self._ends[first:], self._tooks[first:]
        futures = self._executor.go_on(list(zip(plans, ends, tooks, strict=False)))
        shell.resume(list(zip(plans, futures, strict=True)), self._plan_s if self._plan_s >= 0 else None)

    # ---- what happens meanwhile ----

    @property
    def next_s(self) -> float | None:
        """When the front end hears next."""
        if self.told:
            return self.told[0][0]
        leap = self._leap
        if leap is None or leap.num_commits >= self._most:
            return None
        return self._ends[leap.num_commits] + self._latency_s

    def hear(self) -> list[FromEngine]:
        """What arrives at `next_s`."""
        if not self.told:
            assert self._leap is not None
            self.advance(self._ends[self._leap.num_commits])
        when_s = self.told[0][0]
        messages = []
        while self.told and self.told[0][0] == when_s:
            messages.append(self.told.popleft()[1])
        return messages

    def hear_run(self, now: float) -> tuple[list[tuple[float, FromEngine]], Run | None]:
        """What has arrived by now, of a leap that has begun: what goes before outputs, and all of its steps."""
        leap, shell = self._leap, self._shell
        if leap is None or shell is None or self.told or not leap.num_commits:
            return [], None
        answers: list[tuple[float, FromEngine]] = []
        times: list[float] = []
        paces: list[tuple[float, int]] = []
        num_rows, latency_s, ends, tooks = leap.num_rows, self._latency_s, self._ends, self._tooks
        at = leap.num_commits
        while at < self._most and ends[at] + latency_s <= now:
            end_s, took_s = ends[at], tooks[at]
            when_s = end_s + latency_s
            answers += [(when_s, answer) for answer in self._take_step(leap, shell, at)]
            times.append(when_s)
            paces.append((took_s, num_rows))
            at += 1
        if not times:
            return [], None
        stats = leap.stats()
        shell.num_held = stats.num_held_blocks
        drawn = (DRAWN,) * len(times)
        outputs = tuple(
            [
                output_of((name, drawn, *rest, num_output + at, *tail))
                for (name, _, *rest), num_output, tail in self._heads
            ]
        )
        return answers, Run(Repeated(self.link, StepOutputs(outputs, stats, ends[at - 1]), times), paces)

    def advance(self, now: float) -> None:
        """Do what was due by now."""
        leap, shell = self._leap, self._shell
        if leap is None or shell is None:
            return
        while True:
            at = leap.num_commits
            if at >= self._most or self._ends[at] > now:
                if 0 <= self._plan_s <= now:
                    self._plan(leap, self._plan_s)
                return
            end_s = self._ends[at]
            answers = self._take_step(leap, shell, at)
            stats = leap.stats()
            shell.num_held = stats.num_held_blocks
            when_s = end_s + self._latency_s
            self.told += [(when_s, answer) for answer in answers]
            self.told.append((when_s, StepOutputs(self._outputs(at + 1), stats, end_s)))

    def _take_step(self, leap: Leap, shell: EngineShell, at: int) -> tuple[FromEngine, ...]:
        """The end of the oldest step in flight, and the plan of the next; what goes before its outputs."""
        end_s, took_s, num_rows, pace = self._ends[at], self._tooks[at], leap.num_rows, shell.pace
        if 0 <= self._plan_s <= end_s:
            self._plan(leap, self._plan_s)
        shell.began_s = end_s
        pace.note(num_rows, took_s)
        answers = leap.commit(took_s, end_s)
        left_s = 0.0 if end_s - shell.changed_s > RECENT_S else end_s + pace.delay(num_rows) - end_s
        if left_s <= 0 or not leap.num_in_flight:
            self._plan(leap, end_s)
        else:
            self._plan_s = end_s + left_s
            assert self._plan_s < self._ends[at + 1], (self._plan_s, self._ends[at + 1])
        return answers

    def _plan(self, leap: Leap, now: float) -> None:
        self._plan_s = -1.0
        if leap.num_plans == len(self._foreseen):
            self._foresee(leap.work())
        self._executor.note(*self._foreseen[leap.num_plans])
        leap.plan(now)

    def _foresee(self, work: Work) -> None:
        """The step after those that are foreseen."""
        seen = self._executor.foresee(work, self._free_s)
        self._foreseen.append(seen)
        self._ends.append(seen.end_s)
        self._tooks.append(seen.took_s)
        self._free_s = seen.end_s + seen.gap_s

    def _outputs(self, num_new: int) -> tuple[Output, ...]:
        return tuple([output_of((*head, num_output + num_new, *tail)) for head, num_output, tail in self._heads])


class Hearer(Protocol):
    """The front end, as workers that leap tell it.

    take_late     a message of a worker
    take_run      what Repeated says
    pace          (seconds, tokens) of steps of such, as they arrive
    may_take_runs whether nothing waits for a step
    look_s        when single steps are looked at next, whoever's they are; `look` does
    """

    @property
    def may_take_runs(self) -> bool: ...

    @property
    def look_s(self) -> float: ...

    def look(self) -> None: ...

    def pace(self, steps: list[tuple[float, int]]) -> None: ...

    def take_late(self, number: int, message: FromEngine) -> None: ...

    def take_run(self, told: Repeated) -> None: ...


class Late:
    """What workers that leap have said and the front end has not yet been told, in the order of its arrival. The clock
    shows when it would have heard."""

    def __init__(self, loop: VirtualLoop, hearer: Hearer) -> None:
        self._loop = loop
        self._hearer = hearer
        self._heap: list[tuple[float, int, Leaper]] = []
        self._num = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_settling = False

    @property
    def is_settling(self) -> bool:
        return self._is_settling

    def list(self, leaper: Leaper) -> None:
        """It has begun to leap."""
        next_s = leaper.next_s
        if next_s is not None and not leaper.is_listed:
            leaper.is_listed = True
            heappush(self._heap, (next_s, leaper.link, leaper))

    def settle(self) -> None:
        """Tell what has arrived by now."""
        now, heap = self._loop.time(), self._heap
        if self._is_settling or not heap or heap[0][0] > now:
            return
        self._is_settling = True
        try:
            if self._hearer.may_take_runs:
                self._settle_runs(now)
            while heap and heap[0][0] <= now:
                when_s, _, leaper = heappop(heap)
                leaper.is_listed = False
                if leaper.next_s == when_s:
                    messages = leaper.hear()
                    with self._loop.past(when_s):
                        for message in messages:
                            self._hearer.take_late(leaper.link, message)
                self.list(leaper)
        finally:
            self._is_settling = False

    def _settle_runs(self, now: float) -> None:
        """Tell all that has arrived: messages and steps in their order, and of the steps of each leap the outputs and
        the engine's state with the last."""
        heap, hearer = self._heap, self._hearer
        events: list[tuple[float, int, int, FromEngine | tuple[float, int] | Repeated]] = []
        while heap and heap[0][0] <= now:
            when_s, link, leaper = heappop(heap)
            leaper.is_listed = False
            next_s = leaper.next_s
            while next_s is not None and next_s <= now:
                answers, run = leaper.hear_run(now)
                if run is None:
                    events += [(next_s, link, len(events), message) for message in leaper.hear()]
                else:
                    events += [(at_s, link, len(events), answer) for at_s, answer in answers]
                    times = run.told.times
                    events += [(at_s, link, len(events), pace) for at_s, pace in zip(times, run.paces, strict=True)]
                    events.append((times[-1], link, len(events), run.told))
                next_s = leaper.next_s
            self.list(leaper)
        events.sort(key=_when)
        paces: list[tuple[float, int]] = []
        for when_s, link, _, event in events:
            if type(event) is tuple:
                paces.append(event)
                if when_s < hearer.look_s:
                    continue
            if paces:
                hearer.pace(paces)
                paces = []
            with self._loop.past(when_s):
                if isinstance(event, Repeated):
                    hearer.take_run(event)
                elif type(event) is tuple:
                    hearer.look()
                else:
                    hearer.take_late(link, event)  # type: ignore[arg-type]

    def stay_awake(self) -> None:
        """Tell what arrives next as it arrives: something waits for it."""
        heap = self._heap
        if heap and (self._timer is None or self._timer.cancelled() or self._timer.when() != heap[0][0]):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(heap[0][0], self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.settle()


def _when(event: tuple[float, int, int, object]) -> tuple[float, int]:
    return event[:2]
