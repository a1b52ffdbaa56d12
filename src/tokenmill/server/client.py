"""The front end's view of its engines: requests out, deltas in, and the state of the engines.

The shell of a `cluster.gateway.Gateway`, which decides. Here are the links, the tasks that read and write them, and the
streams. An engine sends one message a step; its outputs go to the streams that wait for them, without a task for each
token or request.

When an engine dies, streams are not told: the gateway resumes its requests as soon as another engine is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from secrets import token_urlsafe
from typing import get_args

from ..cluster.events import (
    Cause,
    Closed,
    Effects,
    EngineMessage,
    GatewayEvent,
    GivenUp,
    Joined,
    Leaves,
    Left,
    Opened,
    Pooled,
    Stepped,
    Telling,
    Ticked,
)
from ..cluster.failures import LOOK_S, Liveness
from ..cluster.gateway import Gateway
from ..cluster.pools import decision_named
from ..cluster.replication import replication_named
from ..cluster.request_queue import RequestQueue
from ..cluster.rescheduling import policy_named
from ..control.observe.cache_views import CacheViews
from ..control.observe.observers import Observers
from ..control.workers.roster import Roster
from ..core.errors import TokenmillError, Unavailable
from ..core.events import (
    AdapterLoaded,
    CacheShown,
    Drain,
    EngineStats,
    ForgetTenants,
    FromEngine,
    Leaving,
    Output,
    PoolChanged,
    Ready,
    SetPool,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
    WantPart,
)
from ..core.experts import ExpertLoad
from ..core.policy import ENTERS, Newcomer, Verdict
from ..core.ports import FrontEnd
from ..core.request import Request
from ..core.work import PATIENCE
from .adapters import AdapterRegistry, ServedAdapter
from .deltas import Stream
from .engine_link import Absence, AttachedEngine, Timer
from .kv.hints import KVHints

_DELETED_LOOK_S = 0.5

_log = logging.getLogger(__name__)


class EngineClient:
    """`attach` a link for each life of an engine, `detach` it when that is over, `close` when none will come any more.

    ready        the engines' facts, or None while none is ready
    stats        their state after the last step
    request_queue         what is open: requests whose end no engine has yet confirmed, and those that no engine has yet
    observers      who is told of requests and their outputs
    adapters     the LoRA adapters that requests may name
    cache_views  what the engines' prefix caches hold
    kv_hints     asks for KV that is wanted later
    gateway      the record of all of this, to be set up and read
    roster       who works, also those whose engine does not serve now
    deleted_tenants  tells by id which tenants are

    wanted: adapters to load into the first engine. An engine is ready once it has all its adapters; on_prepared is
    called then, or with what kept a wanted one from being loaded. patience: see core.policy.Order. liveness_s: see
    cluster.liveness; 0: an engine whose link is open is never lost. why_down: told before any engine comes.
    """

    def __init__(
        self,
        wanted: Sequence[ServedAdapter] = (),
        on_prepared: Callable[[TokenmillError | None], None] = lambda error: None,
        patience: int = PATIENCE,
        why_down: str = "Loading model",
        liveness_s: float = 0.0,
    ) -> None:
        self.gateway = Gateway(patience, token_urlsafe)
        self.observers = Observers()
        self.adapters = AdapterRegistry(self._tell, self.gateway.uses, wanted)
        self.cache_views = CacheViews(self._tell)
        self._on_prepared = on_prepared
        self._links: dict[int, AttachedEngine] = {}
        self.kv_hints = KVHints(self._tell, self.gateway, self._links)
        self._num_links = 0
        self._streams: dict[str, Stream] = {}
        self._absence = Absence(why_down, lambda: self.gateway.ready)
        self.roster = Roster()
        self._timer = Timer(self._tick)
        self._liveness_s = liveness_s
        self.deleted_tenants: Callable[[], frozenset[str]] = frozenset
        self._next_look = Timer(self._look)

    @property
    def ready(self) -> Ready | None:
        return self.gateway.ready

    @property
    def stats(self) -> EngineStats:
        return self.gateway.totals.stats

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return self.gateway.num_waiting

    @property
    def request_queue(self) -> RequestQueue:
        return self.gateway.request_queue

    @property
    def num_open(self) -> int:
        return self.gateway.num_open

    def move_by(self, decision: str, rescheduling: str, replication: str) -> None:
        """By names in `cluster.pools.DECISIONS`, `cluster.rescheduling.POLICIES` and `cluster.replication.POLICIES`."""
        self.gateway.pools.decision = decision_named(decision)
        self.gateway.reviews.policy = policy_named(rescheduling)
        self.gateway.reviews.replication = replication_named(replication)

    def judge(self, newcomer: Newcomer, now: float) -> Verdict:
        return self.gateway.judge(newcomer, now)

    # ---- engines ----

    def attach(
        self,
        link: FrontEnd,
        on_broken: Callable[[], None] = lambda: None,
        flight: str = "",
        address: str = "",
        explained_s: float = 0.0,
    ) -> AttachedEngine:
        """Take up a new engine; it gets requests once its Ready has come. Needs a running loop. The link stays its
        maker's to close. `on_broken` is called when what comes over the link cannot be used: the engine has been let
        go, but may live on and hear of it from nobody else. `flight`: file of its flight recorder, where it has one
        here. `address`: where the link comes from; "": this machine. `explained_s`: the maker detaches it once it knows
        how the engine died; `on_broken` is called if the engine lives so long after its link. 0: nobody knows."""
        attached = AttachedEngine(
            self._num_links,
            link,
            take=self._take,
            must_wait=self._must_wait,
            count_open=self.gateway.num_open_at,
            lost=partial(self._lose, explained_s=explained_s),
            on_broken=on_broken,
            flight=flight,
            address=address,
            liveness=Liveness(self._liveness_s),
        )
        self._num_links += 1
        self._links[attached.number] = attached
        attached.since_s = asyncio.get_running_loop().time()
        if self.ready is None:
            self._absence.why = "Loading model"
        attached.open()
        return attached

    def detach(
        self, link: AttachedEngine, reason: str, back_s: float | None = None, cause: Cause = Cause.UNKNOWN
    ) -> None:
        """Let go of an engine. What it had goes on in another, or in the one that comes. Where there is none, `reason`
        is told to whoever asks, and to come back when one is expected: in `back_s` seconds from now, if known."""
        self._absence.expect(back_s)
        self._let_go(link, reason, cause)

    def _lose(self, link: AttachedEngine, reason: str, explained_s: float) -> None:
        """Its link has ended."""
        if explained_s:
            link.end_after(explained_s)
        else:
            self.detach(link, reason)

    def drain(self, number: int) -> None:
        """Give an engine no more; it ends when it has finished what it has."""
        link = self._links[number]
        link.is_leaving = True
        self._handle(Leaves(number))
        link.tell(Drain())  # behind all that it has been given
        self.roster.leave(number)
        if self.ready is None:
            self._absence.why = "The engine is about to leave; another is awaited."

    def put_into_pool(self, number: int, pool: str) -> None:
        """Let an engine serve in this pool as soon as it has answered; what it has it keeps. Of two front ends that put
        it somewhere at the same time one decides, for both."""
        link = self._links[number]
        link.tell(SetPool(pool, link.epoch + 1))

    def close(self, reason: str) -> None:
        """No engine will come any more: everything open ends with Unavailable."""
        self._absence.close(reason)
        self._timer.cancel()
        self._next_look.cancel()
        for link in list(self._links.values()):
            self._let_go(link, reason)
        self._handle(Closed(Unavailable(reason)))

    def _let_go(self, link: AttachedEngine, reason: str, cause: Cause = Cause.UNKNOWN) -> None:
        if self._links.pop(link.number, None) is None:
            return
        link.close()
        self.observers.engine_left(link.number, asyncio.get_running_loop().time())
        was_serving, num_held = self.gateway.link(link.number) is not None, link.num_open
        effects = self._handle(Left(link.number, cause))
        self.adapters.lose(link.number, Unavailable(reason))
        self.cache_views.lose(link.number)
        self.kv_hints.lose(link.number)
        self.roster.go(link.number)
        if self.ready is None:
            self._absence.why = reason
        if num_held:
            _log.warning(
                "The engine has gone: of %d requests that it had, %d are resumed, %d given up, %d were over.",
                num_held, effects.resumed, effects.poisoned, num_held - effects.resumed - effects.poisoned,
            )  # fmt: skip
        if was_serving:
            self.observers.engine_lost(self.ready, self.stats, effects)

    # ---- calls ----

    def open(
        self, requests: Sequence[Request], client: str = "", interval: int = 1, verdict: Verdict = ENTERS
    ) -> Stream:
        """Submit the requests of one call, or let them wait for places, or for an engine that is being restarted.
        `interval`: as Stream has it; `verdict`: what `judge` said. Raises Unavailable where none will come."""
        self._absence.require_hope()
        stream = Stream(self._end, [request.id for request in requests], interval)
        for request in requests:
            self._streams[request.id] = stream
        self.observers.opened(requests, client, asyncio.get_running_loop().time())
        self._handle(Opened(requests, client, verdict))
        return stream

    async def compute(self, request: Request, client: str) -> None:
        """Have the request answered, and drop the answer."""
        stream = self.open([request], client)
        try:
            while not any(delta.finish_reason for delta in await stream.take()):
                pass
        finally:
            stream.close()

    def num_output(self, request_id: str) -> int:
        """Tokens that have come for an open request."""
        return self.gateway.num_output(request_id)

    def require_ready(self) -> Ready:
        """Raises Unavailable while no engine is ready."""
        return self._absence.require_ready()

    async def wait_ready(self, longest_s: float) -> Ready:
        """Waits for an engine. Raises Unavailable where none is ready in time, at once where that is known."""
        return await self._absence.wait_ready(longest_s)

    def stalled_s(self, now: float) -> float:
        return self.gateway.stalled_s(now)

    def fail_open(self, failure: TokenmillError) -> None:
        """End every open stream with `failure`, and cancel its requests in the engine."""
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.fail(failure)
        self._absence.wake()

    def _end(self, request_id: str, reason: str) -> None:
        self._streams.pop(request_id, None)
        self._handle(GivenUp(request_id, reason))

    def _tick(self) -> float | None:
        """Deadlines are due."""
        self.observers.expired(self._handle(Ticked()).expired)
        return self.gateway.next_due_s

    def _look(self) -> float | None:
        """Let go of engines that are lost though their links are open. Looks go on as long as an engine has work."""
        now, has_work = asyncio.get_running_loop().time(), False
        for link in list(self._links.values()):
            num_open = link.num_open
            has_work |= num_open > 0
            if reason := link.liveness.look(now, num_open > 0):
                _log.error("An engine is taken out, with %d requests open. %s", num_open, reason)
                self._let_go(link, "An engine gives no sign of life; another is awaited.")
                link.on_broken()
        return now + LOOK_S if has_work else None

    # ---- what the gateway decides, carried out ----

    def _handle(self, event: GatewayEvent) -> Effects:
        now = asyncio.get_running_loop().time()
        effects = self.gateway.handle(event, now)
        for number, request_id in effects.aborts:
            self._links[number].abort(request_id)
        for number, request in effects.submits:
            self._links[number].submit(request)
            if self._liveness_s:
                self._next_look.set(now + LOOK_S)
            self.observers.given(number, request, now)
        self.observers.routed(effects.routes)
        for number, message in effects.tells:
            self._links[number].order(message)
        self.observers.sending(effects.outputs, event.step if isinstance(event, Stepped) else None)
        for output in effects.outputs:
            self._push(output)
        for ended in effects.ended:
            self.observers.ended(ended)
            for link in self._links.values():
                link.look_again()
        if effects.moved or effects.lengths or effects.rerouted or effects.copied:
            self.observers.moved(effects, now)
        self._timer.set(self.gateway.next_due_s)
        return effects

    def _push(self, output: Output) -> None:
        stream = self._streams.get(output.request_id)
        if stream is not None:
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            stream.push(output)

    # ---- links ----

    def _take(self, link: AttachedEngine, message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            link.num_steps = message.stats.num_steps
            self.observers.stepped(self._handle(Stepped(link.number, message)), message.now_s, self.stats)
        elif isinstance(message, AdapterLoaded):
            self.adapters.answer(message)
        elif isinstance(message, WantPart):
            link.spawn(partial(self._give_part, link, message), "part")
        elif isinstance(message, ExpertLoad):
            self.observers.experts.note(link.number, message)
        elif isinstance(message, CacheShown):
            self.cache_views.answer(link.number, message)
        elif isinstance(message, Telling):
            if not self.kv_hints.takes(message):
                self._handle(EngineMessage(link.number, message))
        elif isinstance(message, PoolChanged):
            link.epoch = message.epoch
            self._handle(Pooled(link.number, message.pool))
            self.roster.put(link.number, message.pool)
        elif isinstance(message, Leaving):
            self.drain(link.number)
        elif isinstance(message, Ready):
            link.epoch = message.worker.epoch
            link.spawn(partial(self._prepare, link, message), "prepare")
        elif not isinstance(message, get_args(FromEngine)):
            raise ValueError(f"No message of an engine: {type(message).__name__}.")

    async def _give_part(self, link: AttachedEngine, wanted: WantPart) -> None:
        await link.send_part(await self.adapters.read_part(link.number, wanted))

    async def _prepare(self, link: AttachedEngine, ready: Ready) -> None:
        try:
            await self.adapters.restore(link.number)
        except TokenmillError as error:
            if any(self.gateway.link(number) is not None for number in self._links):
                return self._refuse(link, error.message)
            self._on_prepared(error)
            return
        if link.is_leaving:
            return
        start_s = asyncio.get_running_loop().time() - link.since_s
        if refused := self._handle(Joined(link.number, ready, start_s)).refused:
            return self._refuse(link, refused)
        if ready.num_speculative_tokens:
            link.spawn(partial(self._forget_deleted, link), "forget")
        self.adapters.join(link.number)
        self.cache_views.join(link.number)
        self.roster.come(link.number, ready.worker, link.address)
        self.observers.engine_came(link.number, ready, self.stats, link.flight)
        self._on_prepared(None)
        self._absence.wake()

    async def _forget_deleted(self, link: AttachedEngine) -> None:
        """Have it forget the tenants that are deleted, and those that will be."""
        told: frozenset[str] = frozenset()
        while True:
            if new := self.deleted_tenants() - told:
                link.tell(ForgetTenants(tuple(sorted(new))))
                told |= new
            await asyncio.sleep(_DELETED_LOOK_S)

    def _refuse(self, link: AttachedEngine, reason: str) -> None:
        _log.error("The engine that has come is let go. %s", reason)
        self._let_go(link, reason)
        link.on_broken()

    def _tell(self, notice: ToEngine, number: int) -> None:
        """Sent after all requests opened so far, which may name an adapter that is unloaded now."""
        if number in self._links:
            self._links[number].tell(notice)

    def _must_wait(self, notice: ToEngine) -> bool:
        """That an adapter goes waits for requests that name it and that no engine has, unless it has another name."""
        if not isinstance(notice, UnloadAdapter) or self.adapters.name_of(notice.digest):
            return False
        return self.gateway.waits_for(notice.digest)
