"""Fast forward of a simulated worker over decode steps (`steps`), without a task, a timer and a message for each.

When a worker has nothing but decodes that go on, and nothing else is under way, its next steps are known: when each
ends, and what it gives. The worker then sleeps until the last of them, or until something arrives. What it would have
done and said by then is done when it is needed: as the front end decides something (`deferred`), or as the worker
wakes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from ...cluster.events import Pace
from ...cluster.index import STRIDE
from ...core.events import FromEngine, Output, StepOutputs, output_of
from ...engine.shell import EngineShell
from ..loop import VirtualLoop
from ..timed import DRAWN, Foreseen, TimedExecutor
from .deferred import DeferredOutputs, EqualSteps, Head
from .steps import DecodeRun, may_fast_forward

MOST_STEPS = 256
"""Of a run."""

_FIRST_FORESEEN = 16
"""Steps that are foreseen at first, then twice as many each time: something may come before the others."""


class FastForward:
    """engine.shell.Rest of a worker whose `executor` only takes time. link: its number at the front end. latency_s: of
    each message on the way there.

    Its steps go through three states: a pace is known (`paced`, when the gateway has heard of its duration), the step
    is made in the engine's books, and it is told.
    """

    def __init__(
        self, executor: TimedExecutor, loop: VirtualLoop, deferred: DeferredOutputs, link: int, latency_s: float
    ) -> None:
        self.link = link
        self.num_fast_forwarded = 0
        self.told: deque[tuple[float, FromEngine]] = deque()  # and not heard: when it arrives
        self.is_listed = False  # in `deferred`
        self.heads: frozenset[Head] = frozenset()
        self._executor = executor
        self._loop = loop
        self._deferred = deferred
        self._latency_s = latency_s
        self._run: DecodeRun | None = None
        self._shell: EngineShell | None = None
        self._ends: list[float] = []
        self._tooks: list[float] = []
        self._frees: list[float] = []
        self._context = 0  # of the first step that is planned in the run
        self._depth = 0  # steps that were under way before it
        self._most = self._known = 0  # steps of the run, and those foreseen
        self._num_paced = 0
        self._plan_s = -1.0  # when the next step is planned; -1: it is
        self._timer: asyncio.TimerHandle | None = None
        self._heads: list[tuple[tuple[object, ...], int, tuple[object, ...]]] = []

    # ---- engine.shell.Rest ----

    def begin(self, shell: EngineShell) -> None:
        """The shell has nothing to do now."""
        core = shell.core
        depth = core.config.steps_in_flight
        if not shell.is_quiet or len(core.state.in_flight) < depth:
            return
        now = self._loop.time()
        is_delayed = shell.is_changing(core.state.in_flight[0].num_tokens)
        if (is_delayed and depth > 2) or not may_fast_forward(core, DRAWN):
            return
        executor, running = self._executor, core.state.running
        most = min(MOST_STEPS, min([executor.num_left(seq.number, seq.num_computed) for seq in running]))
        if most < 2:
            return
        run = DecodeRun(core, DRAWN, most)
        most = run.most_commits
        if most < 2:
            return
        under_way = list(executor.under_way)
        assert len(under_way) == depth and under_way[0].end_s >= now, (under_way, now)
        num = min(most, _FIRST_FORESEEN)
        foreseen = executor.foresee(run.num_rows, run.next_context, num, executor.free_s)
        tooks = [*[each.took_s for each in under_way], *foreseen.tooks]
        if is_delayed and _shortens(tooks[: max(num, depth)]):
            return
        executor.pause()
        self._ends, self._tooks = [*[each.end_s for each in under_way], *foreseen.ends], tooks
        self._frees, self._context, self._depth = foreseen.frees, run.next_context, depth
        self._run, self._shell, self._num_paced, self._plan_s = run, shell, 0, -1.0
        self._most, self._known = most, num
        self._heads = [
            (
                (seq.request.id, (DRAWN,), (), (), None, None),
                len(seq.tokens) - seq.num_prompt,
                (min(seq.num_cached, seq.num_prompt), "", "", "", b"", None, False, seq.request.attempt, 0, False),
            )
            for seq in running
        ]
        self._timer = self._loop.call_at(self._ends[num - 1], self._go_on)
        if core.config.caches_prefixes:
            young = [seq for seq in running if seq.tables[-1].num_published < STRIDE]
            self.heads = frozenset([seq.keys[0] if seq.keys else seq.tokens[0] for seq in young])
        self._deferred.begin(self)

    def end(self, shell: EngineShell) -> None:
        """The shell wakes."""
        run = self._run
        if run is None:
            return
        self._deferred.settle_of((self.link,))
        self._deferred.end(self)
        self.advance(self._loop.time())
        self._run = None
        if self._timer is not None:
            self._timer.cancel()
        first = run.num_commits
        self.num_fast_forwarded += first
        plans = run.land()
        ends, tooks = self._ends[first:], self._tooks[first:]
        futures = self._executor.go_on(list(zip(plans, ends, tooks, strict=False)))
        shell.resume(list(zip(plans, futures, strict=True)), self._plan_s if self._plan_s >= 0 else None)

    # ---- what happens meanwhile ----

    def _go_on(self) -> None:
        """What was foreseen is over."""
        if not self._sees(self._known) and self._shell is not None:
            self._shell.wake()

    def _sees(self, at: int) -> bool:
        """Whether the run has a step `at`, which is foreseen then; `at`: the first that is not, at most."""
        if at < self._known:
            return True
        run, shell, known = self._run, self._shell, self._known
        if known >= self._most or run is None or shell is None:
            return False
        num = min(self._most - known, known)
        context = self._context + known * run.num_rows
        foreseen = self._executor.foresee(run.num_rows, context, num, self._frees[-1])
        if shell.is_changing(run.num_rows) and _shortens([self._tooks[-1], *foreseen.tooks]):
            self._most = known
            return False
        self._ends += foreseen.ends
        self._tooks += foreseen.tooks
        self._frees += foreseen.frees
        self._known += num
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ends[self._known - 1], self._go_on)
        return True

    @property
    def next_s(self) -> float | None:
        """When the front end hears next."""
        if self.told:
            return self.told[0][0]
        if self._run is None or not self._sees(self._num_paced):
            return None
        return self._ends[self._num_paced] + self._latency_s

    def hear(self) -> list[FromEngine]:
        """What arrives at `next_s`."""
        if not self.told:
            self.advance(self._ends[self._num_paced])
        when_s = self.told[0][0]
        messages = []
        while self.told and self.told[0][0] == when_s:
            messages.append(self.told.popleft()[1])
        return messages

    def pace(self, now: float, paces: list[Pace]) -> bool:
        """Of the steps that have arrived by now, add what is paced; `tell` tells the rest of them. Whether there was
        one."""
        if self._run is None:
            return False
        ends, tooks, latency_s, link, num_rows = (
            self._ends,
            self._tooks,
            self._latency_s,
            self.link,
            self._run.num_rows,
        )
        first = at = self._num_paced
        while self._sees(at):
            known = self._known
            while at < known and (when_s := ends[at] + latency_s) <= now:
                paces.append((when_s, link, tooks[at], num_rows))
                at += 1
            if at < known:
                break
        self._num_paced = at
        return at > first

    def tell(self) -> tuple[list[tuple[float, FromEngine]], EqualSteps]:
        """All steps whose paces are known, of which there are some: what goes before their outputs, and these."""
        run, shell, latency_s = self._run, self._shell, self._latency_s
        assert run is not None and shell is not None
        first, end = run.num_commits, self._num_paced
        answers = self._take_steps(run, shell, end)
        stats = run.stats()
        shell.num_held = stats.num_held_blocks
        drawn = (DRAWN,) * (end - first)
        outputs = tuple(
            [
                output_of((name, drawn, *rest, num_output + end, *tail))
                for (name, _, *rest), num_output, tail in self._heads
            ]
        )
        times = [end_s + latency_s for end_s in self._ends[first:end]]
        return answers, EqualSteps(self.link, StepOutputs(outputs, stats, self._ends[end - 1]), times)

    def advance(self, now: float) -> None:
        """Do what was due by now, and tell each step by itself."""
        run, shell = self._run, self._shell
        if run is None or shell is None:
            return
        while self._sees(at := run.num_commits) and self._ends[at] <= now:
            self.told += self._take_steps(run, shell, at + 1)
            stats = run.stats()
            shell.num_held = stats.num_held_blocks
            end_s = self._ends[at]
            self.told.append((end_s + self._latency_s, StepOutputs(self._outputs(at + 1), stats, end_s)))
        self._num_paced = run.num_commits
        if 0 <= self._plan_s <= now:
            self._plan(run)

    def _take_steps(self, run: DecodeRun, shell: EngineShell, end: int) -> list[tuple[float, FromEngine]]:
        """The ends of the steps in flight before step `end` of the run, each with the plan of the next; what goes
        before their outputs."""
        first, num_rows, pace = run.num_commits, run.num_rows, shell.pace
        if self._plan_s >= 0:
            self._plan(run)
        ends, tooks = self._ends[first:end], self._tooks[first:end]
        shell.began_s = end_s = ends[-1]
        pace.note_alike(num_rows, tooks)
        left_s = end_s + pace.delay(num_rows) - end_s if shell.is_changing(num_rows) else 0.0
        is_open = left_s > 0 and self._depth > 1
        num_plans = run.num_plans
        said = run.repeat(tooks, ends, is_open)
        if run.num_plans > num_plans:
            self._note(num_plans, run.num_plans)
        if is_open:
            self._plan_s = end_s + left_s
            assert self._plan_s < self._ends[end], (self._plan_s, self._ends[end])
        return [(ends[at] + self._latency_s, answer) for at, answer in said]

    def _plan(self, run: DecodeRun) -> None:
        """The next step, when it was due."""
        self._note(run.num_plans, run.num_plans + 1)
        run.plan(self._plan_s)
        self._plan_s = -1.0

    def _note(self, first: int, end: int) -> None:
        """The executor is given the steps that are planned by these plans of the run."""
        assert self._run is not None
        num_rows, begin, stop = self._run.num_rows, self._depth + first, self._depth + end
        steps = Foreseen(self._ends[begin:stop], self._tooks[begin:stop], self._frees[first:end])
        self._executor.note_decodes(num_rows, self._context + first * num_rows, steps)

    def _outputs(self, num_new: int) -> tuple[Output, ...]:
        return tuple([output_of((*head, num_output + num_new, *tail)) for head, num_output, tail in self._heads])


def _shortens(tooks: Sequence[float]) -> bool:
    """Whether a step takes much less than the one before."""
    return any([later < 0.8 * each for each, later in pairwise(tooks)])
