"""Several engines with one KV store: a seeded scenario on virtual time, in which everything goes wrong that may.

    each request  ends as it would alone (`sim.run`), whatever tier its prefix came from
    engines       are killed with all that they had under way; their requests go on in the next life
    the store     crashes with its host memory; disk and remote store live on
    tiers         lose, refuse, swap and spoil blocks, fail, and are slow
    at the end    nothing is held, nothing hangs, and each life's journal replays

Prompts share prefixes and come again, so that most of them are in some tier.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace

from tokenmill.core.cost import Costs
from tokenmill.core.effects import WRITES, StoreOpened
from tokenmill.core.events import Abort, Drain, Output, StepOutputs, Submit
from tokenmill.core.ports import FrontEnd
from tokenmill.core.request import EXPORT, IMPORT, Request
from tokenmill.core.tiers import DISK, HOST, REMOTE, TierFacts
from tokenmill.engine.build import build_engine, local_link
from tokenmill.engine.journal import Entry, Planned
from tokenmill.engine.replay import Replayed, replay
from tokenmill.engine.shell import EngineShell
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.kv.tiers.policies import ADMISSIONS, REPLACEMENTS
from tokenmill.sim.executor import Failures, ToyExecutor
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.run import ClientStream, check_stream
from tokenmill.sim.tier_store import ToyMachine
from tokenmill.sim.tiers import NO_FAULTS, Medium, Pace, TierFaults
from tokenmill.sim.workload import VOCAB_SIZE, Scenario, make_scenario

LIMIT_S = 3600.0
BLOCK_BYTES = 4096
MOST_ARRIVALS = 10
CHECKED = 3
"""One in so many entries is followed by a check of the whole engine."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """ends: finish reason or error kind -> requests. counts: of all lives, named as in `_Node.count`."""

    ends: Counter[str]
    counts: Counter[str]


@dataclass(frozen=True, slots=True)
class Trouble:
    """deaths: of engines; crashes: of the store; spoil: share of blocks that go wrong on their way out of host memory;
    faults: of the tiers."""

    deaths: int = 0
    crashes: int = 0
    spoil: float = 0.0
    faults: TierFaults = NO_FAULTS


def make_trouble(rng: random.Random) -> Trouble:
    if rng.random() < 0.25:
        return Trouble()
    faults = TierFaults(*(rng.choice([0.0, 0.0, 0.05, 0.3]) for _ in TierFaults._fields))
    return Trouble(rng.choice([0, 1, 1, 3]), rng.choice([0, 0, 1, 3]), rng.choice([0.0, 0.02, 0.2]), faults)


def _machine(rng: random.Random, scenario: Scenario, clock: VirtualLoop, trouble: Trouble) -> ToyMachine:
    groups = len(scenario.config.groups)
    block_bytes = (BLOCK_BYTES,) * groups
    most = 3 * max(group.num_blocks for group in scenario.config.groups) * groups
    tiers = rng.choice([(), (DISK,), (DISK,), (REMOTE,), (DISK, REMOTE)])
    host = rng.choice([4, most // 4 + 1, most]) * BLOCK_BYTES
    disk = rng.choice([8, most, 10 * most]) * BLOCK_BYTES
    config = TierConfig(
        scenario.config.numerics_id,
        block_bytes,
        max(host, BLOCK_BYTES * groups),
        tiers,
        disk,
        admissions={tier: rng.choice(sorted(ADMISSIONS)) for tier in tiers},
        policies={tier: rng.choice(sorted(REPLACEMENTS)) for tier in (HOST, DISK)},
    )
    media = {}
    for tier in tiers:
        pace = Pace(rng.choice([0.0001, 0.002, 0.05]), rng.choice([1e6, 1e7, 1e9]), rng.choice([0.0, 0.05]), 2.0)
        num_bytes = disk if tier == DISK else 100 * disk
        media[tier] = Medium(num_bytes, block_bytes, is_shared=tier == REMOTE, pace=pace)
    return ToyMachine(config, media, clock, rng, dict.fromkeys(media, trouble.faults))


class _Node:
    """An engine in its lives, and the front end of its clients."""

    def __init__(self, run: _Run, name: str) -> None:
        self.run = run
        self.name = name
        self.num_lives = 0
        self.streams: dict[str, ClientStream] = {}
        self.open: dict[str, Request] = {}
        self.start()

    def start(self) -> None:
        run = self.run
        self.num_lives += 1
        self.journal: list[Entry] = []
        config, journal = run.scenario.config, self.journal
        self.executor = ToyExecutor(
            config,
            run.loop,
            vocab_size=VOCAB_SIZE,
            costs=run.scenario.costs,
            drafter=run.scenario.drafter,
            failures=Failures(run.rng.randrange(1 << 30), run.scenario.failure_rate),
            incarnation=f"{self.name}.{self.num_lives}",
            machine=run.machine,
        )
        assert self.executor.tiers is not None
        self.executor.tiers.spoil = run.trouble.spoil

        def record(entry: Entry) -> None:
            journal.append(entry)
            if len(journal) % CHECKED == 0:
                shell.core.check()

        engine_end, self.front = local_link()
        facts = tuple(TierFacts(name, 0, run.latency_s) for name in (HOST, *run.machine.media))
        first = [StoreOpened(tiers=facts, writes=run.writes)]
        self.shell = shell = build_engine(config, self.executor, engine_end, run.loop, record, first)
        self.task = run.loop.spawn(shell.run(), f"engine {self.name}.{self.num_lives}")
        self.reader = run.loop.spawn(self.receive(self.front, shell), f"front of {self.name}.{self.num_lives}")

    async def kill(self) -> None:
        """With all that it had under way; its requests go on elsewhere."""
        assert self.executor.tiers is not None
        self.count()
        self.executor.tiers.leave()
        self.task.cancel()
        self.reader.cancel()
        self.start()
        again = []
        for name, request in self.open.items():
            stream = self.streams[name]
            tokens = (*request.output_tokens, *stream.tokens)
            if len(tokens) >= request.max_tokens:
                continue
            again.append(replace(request, output_tokens=tokens, is_resumed=True, attempt=self.num_lives, handoff=""))
        await self.front.send(Submit(tuple(again)))

    def count(self) -> None:
        """What this life did."""
        stats, tiers, counts = self.shell.core.stats(), self.executor.tiers, self.run.counts
        assert tiers is not None
        counts["failures"] += self.executor.num_failures
        counts["fetched"] += tiers.num_fetched
        counts["saved"] += tiers.num_saved
        counts["bad"] += tiers.num_bad
        for name in ("external_hits", "external_recomputed", "external_missed", "kv_written", "kv_unwritten"):
            counts[name] += getattr(stats, name)
        num_steps = sum(1 for entry in self.journal if isinstance(entry, Planned) and entry.plan is not None)
        assert replay(self.run.scenario.config, self.journal) == Replayed(num_steps)

    async def submit(self, request: Request) -> None:
        self.open[request.id] = request
        self.streams[request.id] = ClientStream(request)
        await self.front.send(Submit((request,)))

    async def abort(self, name: str) -> None:
        if name in self.open:
            self.streams[name].is_cancelled = True
            await self.front.send(Abort((name,)))

    async def receive(self, front: FrontEnd, shell: EngineShell) -> None:
        while True:
            message = await front.receive()
            if isinstance(message, StepOutputs):
                for output in message.outputs:
                    self.take(output)

    def take(self, output: Output) -> None:
        self.streams[output.request_id].take(output)
        if output.finish_reason is not None:
            del self.open[output.request_id]
            self.run.num_open -= 1
            if not self.run.num_open:
                self.run.done.set()


class _Run:
    def __init__(self, seed: int, trouble: Trouble | None, scenario: Scenario | None) -> None:
        self.rng = rng = random.Random(f"tiers {seed}")
        scenario = scenario or make_scenario(seed)
        groups = tuple(replace(group, bytes_per_block=BLOCK_BYTES) for group in scenario.config.groups)
        config = replace(scenario.config, groups=groups, max_num_waiting=1000)
        costs = Costs(step_s=scenario.costs.step_s, token_s=rng.choice([0.0001, 0.002, 0.01]))  # stored KV is worth it
        arrivals = scenario.arrivals[:MOST_ARRIVALS]
        self.scenario = replace(scenario, config=config, costs=costs, arrivals=arrivals, stored=None)
        self.trouble = make_trouble(rng) if trouble is None else trouble
        self.writes = rng.choice(WRITES)
        self.latency_s = rng.choice([0.00001, 0.0001, 0.0])
        self.loop = VirtualLoop(limit_s=LIMIT_S)
        self.machine = _machine(rng, self.scenario, self.loop, self.trouble)
        self.counts: Counter[str] = Counter()
        self.done = asyncio.Event()
        self.num_open = 0

    async def main(self) -> None:
        rng, scenario = self.rng, self.scenario
        self.machine.start()
        nodes = [_Node(self, f"n{index}") for index in range(rng.choice([1, 2, 3]))]
        span_s = max([arrival.at_s for arrival in scenario.arrivals], default=0.0) + 0.1
        cancelled = {each.request_id: each.at_s for each in scenario.cancellations}
        turns = []
        for turn in range(3):
            for arrival in scenario.arrivals:
                for request in arrival.requests:
                    handoff = rng.choice(["", "", "", "", EXPORT, IMPORT]) if scenario.config.caches_prefixes else ""
                    again = replace(request, id=f"{request.id}/{turn}", handoff=handoff)
                    turns.append((arrival.at_s + turn * span_s, again, cancelled.get(request.id)))
        self.num_open = len(turns)
        spans = 3 * span_s
        tasks = [self.loop.spawn(self.send(rng.choice(nodes), *turn), turn[1].id) for turn in turns]
        for _ in range(self.trouble.deaths):
            tasks.append(self.loop.spawn(self.kill(rng.choice(nodes), rng.random() * spans), "death"))
        for _ in range(self.trouble.crashes):
            tasks.append(self.loop.spawn(self.crash(rng.random() * spans), "crash"))
        await self.done.wait()
        for task in tasks:
            await task
        for node in nodes:
            await node.front.send(Drain())
        for node in nodes:
            await node.task
            node.shell.core.check()
            stats = node.shell.core.stats()
            assert stats.num_held_blocks == stats.num_running == stats.num_waiting == 0, stats
            node.count()
        self.machine.check()
        self.ends = Counter(
            check_stream(stream, scenario, self.counts["failures"] + self.trouble.deaths)
            for node in nodes
            for stream in node.streams.values()
        )

    async def send(self, node: _Node, at_s: float, request: Request, cancelled_s: float | None) -> None:
        await asyncio.sleep(at_s)
        await node.submit(replace(request, arrival_s=self.loop.time()))
        if cancelled_s is not None:
            await asyncio.sleep(self.rng.random() * 0.5)
            await node.abort(request.id)

    async def kill(self, node: _Node, at_s: float) -> None:
        await asyncio.sleep(at_s)
        await node.kill()

    async def crash(self, at_s: float) -> None:
        await asyncio.sleep(at_s)
        if not self.machine.is_up:
            return
        self.machine.crash()
        await asyncio.sleep(self.rng.choice([0.0, 0.01, 0.5]))
        self.machine.start()


def run_tiers(seed: int, trouble: Trouble | None = None, scenario: Scenario | None = None) -> TierReport:
    """Run a scenario (None: the seed's) to the end of every request and check everything. An AssertionError or a
    Violation tells what is wrong."""
    run = _Run(seed, trouble, scenario)
    run.loop.run(run.main())
    run.counts["spoilt"] = run.machine.num_spoilt
    return TierReport(run.ends, run.counts)
