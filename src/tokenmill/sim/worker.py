"""A worker of a simulated cluster: real engine shells, one life after the other, on faulty hardware.

    crash      its process is gone, with all that it had; another life follows, of another incarnation
    freeze     it stands still and goes on later, as a stopped process does: what it sends then is of the past
    slow       its steps take longer for a while
    cut        its link breaks; it lives on, takes back what the front end had asked for, and joins again
    leave      it wants no more requests, finishes those it has, and goes; another life follows

The engine, its executor and its store see none of this. They are the ones that serve alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..core.config import EngineConfig, most_drafted
from ..core.effects import Event, Job
from ..core.events import FromEngine, Leaving, Ready, ToEngine, WorkerFacts
from ..core.ports import Executor, FrontEnd
from ..core.step import StepPlan, StepResult
from ..core.tiers import TierFacts
from ..engine.background import send_heartbeats
from ..engine.core import EngineCore
from ..engine.front_ends import FrontEnds
from ..engine.journal import Entry
from ..engine.shell import EngineShell
from ..kv.events.relay import TierEventRelay, Watch
from ..sched.admission import max_running
from .fast_forward.worker import FastForward
from .loop import VirtualLoop
from .network import End, Link, Network
from .peers import ToyNetwork
from .workload import VOCAB_SIZE

POISON_SEED = 2**63 + 7
"""Of the request that ends every engine which is given a row of it."""


Begin = Callable[[str, str], tuple[Executor, tuple[Event, ...]]]
"""Makes the executor of a life, from its address and incarnation, and says what its engine is told first."""


@dataclass(frozen=True, slots=True)
class Build:
    """What a worker is made of. `peers`: ways of KV between executors. `check_rate`: share of the events of an engine
    after which all its books are checked. `num_blocks`: of KV, as front ends are told. stores: address -> the KV store
    that the worker there uses, by name, and what tells of it; tiers: of these stores. are_linked: workers reach each
    other. come_back: returns when a worker of this name, whose process is gone, can begin anew; None: soon. is_sound:
    no worker crashes, stands still or is watched for signs of life; fast_forward: of an executor, then."""

    config: EngineConfig
    begin: Begin
    peers: ToyNetwork
    check_rate: float = 0.05
    num_blocks: int = 1
    stores: Mapping[str, tuple[str, Watch]] = field(default_factory=dict)
    tiers: tuple[TierFacts, ...] = ()
    are_linked: bool = True
    is_sound: bool = False
    fast_forward: Callable[[Executor], FastForward] | None = None
    come_back: Callable[[str], Awaitable[None]] | None = None

    def ready(self, worker: WorkerFacts) -> Ready:
        config = self.config
        return Ready(
            "toy", config.max_model_len, VOCAB_SIZE, (), config.numerics_id, config.block_size, self.num_blocks,
            num_pool_blocks=sum(group.num_blocks for group in config.groups), max_num_seqs=max_running(config),
            max_num_batched_tokens=config.max_num_batched_tokens, worker=worker,
            tiers=self.tiers if config.caches_prefixes else (),
            block_bytes=sum(group.bytes_per_block for group in config.groups),
            num_speculative_tokens=most_drafted(config),
        )  # fmt: skip


class Hardware:
    """An executor that can stand still, run slowly and end."""

    def __init__(self, executor: Executor, loop: VirtualLoop) -> None:
        self.executor = executor
        self.died = asyncio.Event()
        self.last_step = -1
        self.num_steps = 0
        self.factor = 1.0
        self._loop = loop
        self._thaws_s = 0.0
        self._slow_until_s = 0.0

    def freeze(self, for_s: float) -> None:
        self._thaws_s = max(self._thaws_s, self._loop.time() + for_s)

    def slow(self, for_s: float, factor: float) -> None:
        self.factor, self._slow_until_s = factor, self._loop.time() + for_s

    def thaw(self) -> None:
        """From now on it is sound."""
        self._thaws_s = self._slow_until_s = 0.0
        self.last_step = -1

    async def passed(self) -> None:
        """Returns when it does not stand still."""
        while (left_s := self._thaws_s - self._loop.time()) > 0:
            await asyncio.sleep(min(left_s, 0.5))

    async def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps = plan.step + 1
        has_poison = any(row.intro is not None and row.intro.seed == POISON_SEED for row in plan.rows)
        if has_poison or plan.step == self.last_step:
            self.died.set()
            await self._loop.create_future()
        # A step that has begun ends, and nobody hears of it.
        result = await asyncio.shield(self.executor.execute(plan))
        if self._slow_until_s > self._loop.time():
            more_s = (self.factor - 1) * result.duration_s
            await asyncio.sleep(more_s)
            result = replace(result, duration_s=result.duration_s + more_s)
        await self.passed()
        return result

    async def run(self, job: Job) -> str:
        result = await self.executor.run(job)
        await self.passed()
        return result


class _FrozenEnd:
    """The engine's end of a link, on hardware that may stand still."""

    def __init__(self, end: End[ToEngine, FromEngine], hardware: Hardware) -> None:
        self._end = end
        self._hardware = hardware

    async def receive(self) -> ToEngine:
        message = await self._end.receive()
        await self._hardware.passed()
        return message

    async def send(self, message: FromEngine) -> None:
        await self._hardware.passed()
        await self._end.send(message)


class Worker:
    """`fronts`: each takes the front end's end of a new link, and gives its number there. `links`, `numbers`: of the
    present links, by front end. `core`, `hardware`: of the present life."""

    def __init__(
        self,
        name: str,
        pool: str,
        build: Build,
        network: Network,
        loop: VirtualLoop,
        rng: random.Random,
        fronts: Sequence[Callable[[FrontEnd], int]],
    ) -> None:
        self.name = name
        self.pool = pool
        self.num_lives = 0
        self._num_preemptions = 0  # of the lives before
        self.is_up = False
        self.links: dict[int, Link] = {}
        self.numbers: dict[int, int] = {}
        self._build = build
        self._network = network
        self._loop = loop
        self._rng = rng
        self._fronts = fronts
        self._begin()

    def _begin(self) -> None:
        """A new life."""
        build = self._build
        self.num_lives += 1
        self.incarnation = f"{self.name}.{self.num_lives}"
        executor, first = build.begin(self.name, self.incarnation)
        self.hardware = Hardware(executor, self._loop)
        self.core = EngineCore(build.config, self._record if build.check_rate else None)
        self._front_ends = FrontEnds()
        store, watch = build.stores.get(self.name, ("", None))
        self._store, self._relay = store, TierEventRelay(watch)
        self.fast_forward = build.fast_forward(executor) if build.fast_forward is not None else None
        runs = executor if build.is_sound else self.hardware
        self._shell = EngineShell(self.core, runs, self._front_ends, self._loop, rest=self.fast_forward)
        for event in first:
            self._shell.hear(event)
        self._is_leaving = False

    @property
    def num_preemptions(self) -> int:
        """Of all its lives."""
        return self._num_preemptions + self.core.stats().num_preemptions

    def _record(self, entry: Entry) -> None:
        if self._rng.random() < self._build.check_rate:
            self.core.check()

    async def serve(self) -> None:
        """One life after the other."""
        while True:
            self.is_up = True
            died = self.hardware.died
            living = self._loop.spawn(self._shell.run(), self.incarnation)
            living.add_done_callback(lambda _, died=died: died.set())  # type: ignore[misc]
            working = [self._loop.spawn(self._work_for(place), f"{self.name} {place}") for place in self._places()]
            if not self._build.is_sound:
                beats = send_heartbeats(self._shell, self._front_ends, lambda: None)
                working.append(self._loop.spawn(beats, f"{self.incarnation} beats"))
            await died.wait()
            self.is_up = False
            if self.name in self._build.peers.peers:
                self._build.peers.peers[self.name].leave()
            for task in (living, *working):
                task.cancel()
            for link in self.links.values():
                link.die()
            self.links.clear()
            if self._build.come_back is not None:
                await self._build.come_back(self.name)
            else:
                await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            self._num_preemptions = self.num_preemptions
            self._begin()

    def _places(self) -> range:
        return range(len(self._fronts))

    # ---- faults ----

    def crash(self, num_steps: int = 0) -> None:
        """Now, or in its step after so many more."""
        if num_steps:
            self.hardware.last_step = self.hardware.num_steps + num_steps - 1
        else:
            self.hardware.died.set()

    def cut(self) -> None:
        """One of its links; each side hears of it in its own time."""
        if self.links:
            link = self._rng.choice(list(self.links.values()))
            link.cut(self._rng.choice([0.0, 0.01, 0.3]), self._rng.choice([0.0, 0.01, 0.3]))

    def hold(self, for_s: float) -> None:
        """One of its links delivers nothing for a while."""
        if self.links:
            self._rng.choice(list(self.links.values())).hold(for_s)

    def leave(self) -> None:
        if not self._is_leaving:
            self._is_leaving = True
            self._front_ends.leave()

    # ---- one life ----

    async def _work_for(self, place: int) -> None:
        """Joins a front end again and again, until that wants no more of it."""
        while not await self._work_once(place) and not self._is_leaving:
            await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            await self.hardware.passed()
        self.links.pop(place, None)
        if not self.links:
            self._front_ends.drain()

    async def _work_once(self, place: int) -> bool:
        """Until the link ends; whether the front end wants no more."""
        link = self.links[place] = self._network.connect()
        is_plain = self._build.is_sound and not self._store
        end = link.engine_end if is_plain else _FrozenEnd(link.engine_end, self.hardware)
        self.numbers[place] = self._fronts[place](link.front_end)
        if self.fast_forward is not None:
            self.fast_forward.link = self.numbers[place]
        pool, epoch = self.core.state.membership.pool or self.pool, self.core.state.membership.epoch
        address = self.name if self._build.are_linked else ""
        facts = WorkerFacts(
            self.name, self.incarnation, self.num_lives, pool, self.name, address, epoch, kv_store=self._store
        )
        try:
            await end.send(replace(self._build.ready(facts), stats=self.core.stats()))
            if self._is_leaving:
                await end.send(Leaving())
            return await self._front_ends.serve(end if is_plain else self._relay.over(end), link.engine_end.close)
        except EOFError:
            return False
        finally:
            link.engine_end.close()
