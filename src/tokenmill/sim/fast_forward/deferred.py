"""What workers in fast forward have done and the front end has not heard of yet.

The front end hears of it before it decides anything, in order of arrival, so that its decisions and all times are those
of single steps, to the last bit.

Where the gateway decides nothing after a step (`waits_for_steps`), equal steps are told at once (`EqualSteps`), in two
parts. How long single steps took is told in the order of all workers' steps, before the gateway hears of any other
step. Their outputs, and the engine's state after the last of them, are told before a decision depends on them: as a
call comes, those of the engines that its place depends on (`Placing.looks_at`), or of all where unfinished answers are
looked at (`RequestQueue.catch_up`).

Events at exactly the same virtual time may come in another order than without fast forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from operator import itemgetter
from typing import Protocol

from ...cluster.events import Pace
from ...cluster.gateway import Gateway
from ...core.block import KEY_BYTES
from ...core.events import FromEngine, Output, StepOutputs
from ...core.request import Request
from ..loop import VirtualLoop


@dataclass(frozen=True, slots=True)
class EqualSteps:
    """Steps of an engine that were alike, told at once: each gave one token of each of `step.outputs`, which hold all
    of them, and nothing else; `step.stats` are those after the last. times: when each was heard. What follows
    from the durations of single steps is told by RequestQueue.pace, in the order of all engines' steps."""

    link: int
    step: StepOutputs
    times: Sequence[float]


def repeat(gateway: Gateway, event: EqualSteps) -> list[Output]:
    """As Stepped of each, where nothing waited for a step (Placing.waits_for_steps) and no request began or ended.
    Engines may have been heard of since, and calls opened. Returns the outputs for those who wait for them."""
    step, link = event.step, gateway.link(event.link)
    outputs: list[Output] = []
    if link is None:
        return outputs
    entries, now = link.entries, step.now_s
    for output in step.outputs:
        entry = entries.get(output.request_id)
        if entry is None or output.attempt != entry.attempt:
            continue
        assert entry.has_progressed and output.finish_reason is None, output
        entry.last_token_s = now
        entry.tokens.extend(output.tokens)
        if entry.num_lives > 1:
            output = entry.as_first_life(output)
        if entry.ending is None:
            outputs.append(output)
    gateway.progress_s = max(gateway.progress_s, now)
    link.step(step.stats)
    gateway.totals.step(event.link, step.stats, event.times[-1])
    num_steps = len(event.times)
    gateway.request_queue.repeat(
        gateway.totals.sums, now, event.link, step.stats, num_steps, num_steps * len(step.outputs)
    )
    return outputs


_when = itemgetter(0, 1)


Head = bytes | int
"""Of a sequence that is no longer than the first block that a cache may tell of: the key of its first block, or where
that is not full, its first token."""


class ForwardedWorker(Protocol):
    """`worker.FastForward`."""

    link: int
    is_listed: bool
    heads: frozenset[Head]

    @property
    def told(self) -> Sequence[tuple[float, FromEngine]]: ...

    @property
    def next_s(self) -> float | None: ...

    def hear(self) -> list[FromEngine]: ...

    def pace(self, now: float, paces: list[Pace]) -> bool: ...

    def tell(self) -> tuple[list[tuple[float, FromEngine]], EqualSteps]: ...


class Receiver(Protocol):
    """The front end, as workers in fast forward tell it.

    take_deferred a message of a worker
    take_run      what EqualSteps says
    pace          of steps of such, as they arrive
    may_take_runs whether nothing waits for a step
    look_s        when single steps are looked at next, whoever's they are; `look` does
    """

    @property
    def may_take_runs(self) -> bool: ...

    @property
    def look_s(self) -> float: ...

    def look(self) -> None: ...

    def pace(self, paces: list[Pace]) -> None: ...

    def take_deferred(self, number: int, message: FromEngine) -> None: ...

    def take_run(self, told: EqualSteps) -> None: ...


class DeferredOutputs:
    """Deferred messages and steps of all workers. While they are told, the clock shows when the front end would have
    heard."""

    def __init__(self, loop: VirtualLoop, receiver: Receiver) -> None:
        self._loop = loop
        self._receiver = receiver
        self._heap: list[tuple[float, int, ForwardedWorker]] = []
        self._behind: dict[int, ForwardedWorker] = {}  # of which steps have been paced and not told
        self._young: dict[Head, dict[int, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_settling = False

    @property
    def is_empty(self) -> bool:
        """Nobody is in fast forward."""
        return not (self._heap or self._behind)

    def begin(self, fast_forward: ForwardedWorker) -> None:
        """Fast forward of a worker has begun."""
        for head in fast_forward.heads:
            self._young.setdefault(head, {})[fast_forward.link] = None
        self._list(fast_forward)

    def end(self, fast_forward: ForwardedWorker) -> None:
        """Fast forward of a worker has ended; what it has said is told as it arrives."""
        for head in fast_forward.heads:
            links = self._young[head]
            del links[fast_forward.link]
            if not links:
                del self._young[head]

    def younger(self, request: Request) -> Iterable[int]:
        """Engines whose caches may hold the beginning of this request by now, without the front end knowing."""
        tokens, key = request.prompt_tokens[:1], request.keys[:KEY_BYTES]
        return [*self._young.get(tokens[0] if tokens else -1, ()), *self._young.get(key, ())]

    def _list(self, fast_forward: ForwardedWorker) -> None:
        next_s = fast_forward.next_s
        if next_s is not None and not fast_forward.is_listed:
            fast_forward.is_listed = True
            heappush(self._heap, (next_s, fast_forward.link, fast_forward))

    def settle(self) -> None:
        """Tell all that has arrived by now."""
        now, heap = self._loop.time(), self._heap
        if self._is_settling or not (self._behind or (heap and heap[0][0] <= now)):
            return
        self._is_settling = True
        try:
            if self._receiver.may_take_runs:
                self._pace(now)
            self._tell([*self._behind.values()])
            while heap and heap[0][0] <= now:
                when_s, _, fast_forward = heappop(heap)
                fast_forward.is_listed = False
                if fast_forward.next_s == when_s:
                    messages = fast_forward.hear()
                    with self._loop.past(when_s):
                        for message in messages:
                            self._receiver.take_deferred(fast_forward.link, message)
                self._list(fast_forward)
        finally:
            self._is_settling = False

    def settle_paces(self) -> None:
        """Tell what must be told before a step that nothing is decided by."""
        now, heap = self._loop.time(), self._heap
        if self._is_settling or not heap or heap[0][0] > now:
            return
        if not self._receiver.may_take_runs:
            return self.settle()
        self._is_settling = True
        try:
            self._pace(now)
        finally:
            self._is_settling = False

    def settle_of(self, links: Iterable[int]) -> None:
        """Tell all that has arrived by now of some."""
        if not self._receiver.may_take_runs:
            return self.settle()
        self.settle_paces()
        if not self._is_settling and (some := [self._behind[link] for link in links if link in self._behind]):
            self._is_settling = True
            try:
                self._tell(some)
            finally:
                self._is_settling = False

    def _pace(self, now: float) -> None:
        """What has arrived: messages, and how long steps took that are told later."""
        heap, receiver = self._heap, self._receiver
        paces: list[Pace] = []
        messages: list[tuple[float, int, FromEngine]] = []
        num = 0
        while heap and heap[0][0] <= now:
            _, link, fast_forward = heap[0]
            while fast_forward.told and (when_s := fast_forward.told[0][0]) <= now:
                messages += [(when_s, link, message) for message in fast_forward.hear()]
            if not fast_forward.told and fast_forward.pace(now, paces):
                self._behind[link] = fast_forward
            num += 1
            next_s = fast_forward.next_s
            if next_s is not None:
                heapreplace(heap, (next_s, link, fast_forward))
            else:
                heappop(heap)
                fast_forward.is_listed = False
        if num > 1:
            paces.sort(key=_when)
        if not messages and (not paces or paces[-1][0] < receiver.look_s):
            receiver.pace(paces)
            return
        events: list[tuple[float, int, FromEngine | Pace]] = [*messages, *[(*each[:2], each) for each in paces]]
        events.sort(key=_when)
        for when_s, link, event in events:
            if type(event) is not tuple:
                with self._loop.past(when_s):
                    receiver.take_deferred(link, event)  # type: ignore[arg-type]
                continue
            receiver.pace([event])
            if when_s >= receiver.look_s:
                with self._loop.past(when_s):
                    receiver.look()

    def _tell(self, forwarded: Sequence[ForwardedWorker]) -> None:
        """All steps of these whose paces are known: messages in their order, and of the steps of each run the outputs
        and the engine's state with the last."""
        events: list[tuple[float, int, FromEngine | EqualSteps]] = []
        for fast_forward in forwarded:
            link = fast_forward.link
            del self._behind[link]
            answers, run = fast_forward.tell()
            events += [(at_s, link, answer) for at_s, answer in answers]
            events.append((run.times[-1], link, run))
        if len(events) > 1:
            events.sort(key=_when)
        for when_s, link, event in events:
            with self._loop.past(when_s):
                if isinstance(event, EqualSteps):
                    self._receiver.take_run(event)
                else:
                    self._receiver.take_deferred(link, event)

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
