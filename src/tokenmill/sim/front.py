"""The shell of a gateway on virtual time: links, their messages in order, the gateway's timer, and who is stuck.

It does what `server.client` does on a real loop. `hear` is told of everything that the gateway did; clients and
measurements are made of that. `hear_run` gets outputs of several tokens, and the time of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

from ..cluster.events import (
    Effects,
    EngineMessage,
    GatewayEvent,
    Joined,
    Leaves,
    Left,
    Opened,
    Pace,
    Pooled,
    Stepped,
    Telling,
    Ticked,
)  # fmt: skip
from ..cluster.failures import LOOK_S, Liveness
from ..cluster.gateway import Gateway
from ..cluster.keys import with_keys
from ..core.events import (
    FINISH_MOVED,
    Abort,
    Drain,
    FromEngine,
    Leaving,
    Output,
    PoolChanged,
    Ready,
    SetPool,
    StepOutputs,
    Submit,
    ToEngine,
)
from ..core.kv_events import KVEvents
from ..core.policy import ENTERS, Verdict
from ..core.ports import FrontEnd, Pushing, hear_all
from ..core.request import Request
from .fast_forward.deferred import DeferredOutputs, EqualSteps, repeat
from .loop import VirtualLoop

Hear = Callable[[GatewayEvent, Effects], None]
HearRun = Callable[[Sequence[Output], Sequence[float]], None]


class _Attached:
    """The front end's side of a link."""

    def __init__(self, number: int, end: FrontEnd, liveness: Liveness) -> None:
        assert isinstance(end, Pushing)
        self.say: Callable[[ToEngine], None] = end.push
        self.number = number
        self.end = end
        self.liveness = liveness
        self.epoch = 0
        self.is_let_go = False


class Front:
    """gateway      decides
    num_left     links that were lost or let go
    num_let_go   of those, the ones that gave no sign of life
    limit_s      after which one is lost that gives none
    grace_s      a link that is let go is closed after so long; what comes over it until then reaches the gateway
    look         is called with steps that come late, at `look_s` or with the first later one
    """

    def __init__(
        self,
        loop: VirtualLoop,
        hear: Hear,
        hear_run: HearRun = lambda outputs, times: None,
        *,
        limit_s: float = 2.0,
        grace_s: float = 0.0,
        is_checked: bool = True,
    ) -> None:
        numbers = count()
        self.gateway = Gateway(new_ticket=lambda: f"ticket {next(numbers)}")
        self.num_left = 0
        self.num_let_go = 0
        self.refused = ""
        self.is_up = True
        self._loop = loop
        self._hear = hear
        self._hear_run = hear_run
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._is_checked = is_checked
        self._links: dict[int, _Attached] = {}
        self._num_links = 0
        self._given: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.look_s = math.inf
        self.look: Callable[[], None] = lambda: None
        self.deferred = DeferredOutputs(loop, self)
        self.gateway.request_queue.catch_up = self.deferred.settle

    def attach(self, end: FrontEnd) -> int:
        """Take up a link; its engine gets requests once its Ready has come. The number of the link."""
        link = self._links[self._num_links] = _Attached(self._num_links, end, Liveness(self._limit_s))
        self._num_links += 1
        self._loop.spawn(self._read(link), f"read {link.number}")
        return link.number

    def put(self, number: int, pool: str) -> None:
        """Put an engine into another pool, where it still serves."""
        link = self._links.get(number)
        if link is not None:
            link.say(SetPool(pool, link.epoch + 1))

    async def watch(self) -> None:
        """Let workers go that give no sign of life."""
        while self.is_up:
            await asyncio.sleep(LOOK_S)
            for link in list(self._links.values()):
                if link.liveness.look(self._loop.time(), self.gateway.num_open_at(link.number) > 0):
                    self.num_let_go += 1
                    self._let_go(link)

    def open(self, requests: Sequence[Request], client: str = "", verdict: Verdict = ENTERS) -> None:
        """A call, with the keys of its blocks where engines are chosen by them."""
        ready = self.gateway.ready
        if ready is not None and self.gateway.router.has_keys:
            requests = with_keys(requests, ready)
        self.handle(Opened(requests, client, verdict))

    def expect_call(self, requests: Sequence[Request] = ()) -> None:
        """Catch up with what a call that comes now is judged by: engines that tell the costliest steps and, as its
        requests are opened, those that their places depend on."""
        gateway, deferred = self.gateway, self.deferred
        looked = gateway.totals.costliest
        if looked is None or len(requests) > 1:
            return deferred.settle()
        some = [*looked]
        for request in requests:
            looked = gateway.placing.looks_at(request)
            if looked is None:
                return deferred.settle()
            # Of those that have been given something and have not begun with it, each step moves the standing.
            self._given = {number for number in self._given if self._waits(number)}
            some += [*looked, *deferred.younger(request), *self._given]
        deferred.settle_of(dict.fromkeys(some))

    def _waits(self, number: int) -> bool:
        """Whether a request of the engine has no token of it yet."""
        link = self.gateway.link(number)
        return link is not None and link.load.num_waiting > 0

    def handle(self, event: GatewayEvent) -> Effects:
        gateway = self.gateway
        if self.deferred.is_empty:
            pass
        elif isinstance(event, Opened):
            self.expect_call(event.requests)
        elif _is_decided_by(event):
            self.deferred.settle()
        else:
            self.deferred.settle_paces()
        effects = gateway.handle(event, self._loop.time())
        if self._is_checked:
            gateway.check()
        for number, request_id in effects.aborts:
            self._links[number].say(Abort((request_id,)))
        for number, request in effects.submits:
            self._links[number].say(Submit((request,)))
            self._given.add(number)
        for number, message in effects.tells:
            self._links[number].say(message)
        self.refused = self.refused or effects.refused
        self._hear(event, effects)
        self._set_timer()
        if gateway.placing.waits_for_steps:
            self.deferred.stay_awake()
        return effects

    def _set_timer(self) -> None:
        due_s = self.gateway.next_due_s
        if self._timer is not None and self._timer.when() != due_s:
            self._timer.cancel()
            self._timer = None
        if due_s is not None and self._timer is None:
            self._timer = self._loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Ticked())

    def _let_go(self, link: _Attached) -> None:
        """It is gone for the gateway; what it says yet is of the past."""
        del self._links[link.number]
        link.is_let_go = True
        self.num_left += 1
        self.handle(Left(link.number))
        self._loop.call_later(self._grace_s, link.end.close)  # type: ignore[attr-defined]

    def die(self) -> None:
        """Its process is gone, with all links."""
        if self._timer is not None:
            self._timer.cancel()
        for link in self._links.values():
            link.is_let_go = True
            link.end.close()  # type: ignore[attr-defined]
        self._links.clear()
        self.is_up = False

    async def _read(self, link: _Attached) -> None:
        with contextlib.suppress(EOFError):
            await hear_all(link.end, partial(self._take, link))
        if not link.is_let_go:
            self._let_go(link)

    # ---- what comes deferred (`deferred.Receiver`) ----

    @property
    def may_take_runs(self) -> bool:
        return self.is_up and not self.gateway.placing.waits_for_steps

    def pace(self, paces: list[Pace]) -> None:
        self.gateway.request_queue.pace(paces)

    def take_deferred(self, number: int, message: FromEngine) -> None:
        link = self._links.get(number)
        if link is not None:
            self._take(link, message)

    def take_run(self, told: EqualSteps) -> None:
        """Nothing is due because of it, and nobody is told anything."""
        link = self._links.get(told.link)
        if link is None:
            return
        link.liveness.hear(told.step)
        outputs = repeat(self.gateway, told)
        if self._is_checked:
            self.gateway.check()
        self._hear_run(outputs, told.times)

    def _take(self, link: _Attached, message: FromEngine) -> None:
        if not self.is_up:
            return
        link.liveness.hear(message)
        if isinstance(message, StepOutputs):
            self.handle(Stepped(link.number, message))
        elif isinstance(message, Telling):
            self.handle(EngineMessage(link.number, message))
        elif link.is_let_go:
            pass
        elif isinstance(message, PoolChanged):
            link.epoch = message.epoch
            self.handle(Pooled(link.number, message.pool))
        elif isinstance(message, Ready):
            link.epoch = message.worker.epoch
            self.handle(Joined(link.number, message))
        elif isinstance(message, Leaving):
            self.handle(Leaves(link.number))
            link.say(Drain())


def _is_decided_by(event: GatewayEvent) -> bool:
    """Whether the gateway may look at other engines because of it, where nothing waits for a step."""
    if isinstance(event, Stepped):
        return any([output.finish_reason == FINISH_MOVED or output.is_saved for output in event.step.outputs])
    return not (isinstance(event, EngineMessage) and isinstance(event.message, KVEvents))
