"""A cluster at scale: the live gateway and real engines under a load of thousands of requests, where steps cost time
and nothing else. For measuring policies; whether answers are right is for `cluster`.

Steps take what a law of costs says of their rows (`core.cost.Costs`), one after the other on each worker. KV that moves
takes its bytes over the wires of both hosts (`network`). Prompts are made of parts: equal parts at the head of two
prompts are equal tokens, as the block hashes of a trace say.

`python -m tokenmill.sim.scale --nodes 16 --requests 3000 --rate 40` prints latencies of a synthetic load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cluster.events import Effects, GatewayEvent
from ..cluster.gateway import Gateway
from ..cluster.pools import DECISIONS, decision_named
from ..cluster.rescheduling import POLICIES, policy_named
from ..core.block import full_groups
from ..core.config import EngineConfig
from ..core.cost import Costs, work_of
from ..core.effects import Event, Job
from ..core.errors import EngineFailed
from ..core.moves import EndMove, PullBlocks, SendBlocks
from ..core.ports import Executor
from ..core.request import Request, SamplingParams
from ..core.step import RowResult, StepPlan, StepResult
from ..core.terms import USUAL, Terms
from .front import Front
from .loop import VirtualLoop
from .network import Network, Shape
from .peers import ToyNetwork, ToyPeer
from .worker import Build, Worker

LAN = Shape(latency_s=0.0002, byte_s=1e-10)
"""Messages take 0.2 ms, and a wire carries 10 GB a second."""


class Ask(NamedTuple):
    """parts: (which, number of tokens) of the prompt, in order. num_output: tokens it draws. most: its max_tokens where
    that is more; what ends it is then an end token, as far as anybody can know."""

    at_s: float
    parts: tuple[tuple[int, int], ...]
    num_output: int
    most: int = 0
    client: str = ""
    terms: Terms = USUAL

    def request(self, request_id: str, seed: int) -> Request:
        prompt: list[int] = []
        for which, num_tokens in self.parts:
            prompt += random.Random(which).randbytes(num_tokens)
        most = max(self.most, self.num_output)
        sampling = SamplingParams(max_tokens=most, temperature=0.0)
        return Request(
            request_id,
            tuple(prompt),
            sampling,
            most,
            seed,
            eos_token_ids=(_EOS,),
            arrival_s=self.at_s,
            terms=self.terms,
        )


class Seen(NamedTuple):
    """What the client of an ask saw, in seconds. tpot_s: 0.0 where it drew one token."""

    ask: Ask
    ttft_s: float
    latency_s: float
    tpot_s: float
    num_cached: int


@dataclass(slots=True)
class ScaleReport:
    """seen: of each request that ended, in the order of their ends; busy_s: of steps, by worker. num_moved,
    num_unmoved: moves from worker to worker that succeeded, and that did not."""

    seen: list[Seen] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    num_moved: int = 0
    num_unmoved: int = 0
    num_rerouted: int = 0
    num_preemptions: int = 0

    @property
    def imbalance(self) -> float:
        """Busiest worker's time, over the mean."""
        return max(self.busy_s.values()) * len(self.busy_s) / sum(self.busy_s.values())

    def mean(self, name: str) -> float:
        return sum(float(getattr(each, name)) for each in self.seen) / len(self.seen)

    def percentile(self, name: str, share: float) -> float:
        values = sorted(getattr(each, name) for each in self.seen)
        return float(values[min(len(values) - 1, int(share * len(values)))])


_EOS = 256


class _Nowhere(array):  # type: ignore[type-arg]
    """Slots that hold nothing."""

    def __getitem__(self, where: object) -> array[int]:
        return array("q")

    def __setitem__(self, where: object, what: object) -> None:
        pass


class _NoPool:
    def __init__(self) -> None:
        self.positions: array[int] = _Nowhere("q")
        self.tokens: array[int] = _Nowhere("q")
        self.moving: dict[int, bool] = {}
        self.sending: dict[int, int] = {}


class TimedExecutor:
    """Steps that take time. `lengths`: seed of a request -> tokens that it draws before its end token."""

    def __init__(
        self,
        config: EngineConfig,
        costs: Costs,
        lengths: dict[int, int],
        loop: VirtualLoop,
        network: Network,
        peers: ToyNetwork,
        address: str,
        incarnation: str,
    ) -> None:
        self.busy_s = 0.0
        self._costs = costs
        self._lengths = lengths
        self._loop = loop
        self._network = network
        self._address = address
        self._block_bytes = sum(group.bytes_per_block for group in config.groups)
        self._free_s = 0.0
        self._sequences: dict[int, tuple[int, int]] = {}
        pools = [_NoPool() for _ in config.groups]
        self._peer = ToyPeer(peers, address, incarnation, pools, config.block_size, lambda holds, message: None)

    async def execute(self, plan: StepPlan) -> StepResult:
        for number in plan.released:
            self._sequences.pop(number, None)
        for row in plan.rows:
            if row.intro is not None:
                self._sequences[row.seq] = len(row.intro.prompt_tokens), self._lengths[row.intro.seed]
        took_s = self._costs.predict(work_of(plan.rows))
        self._free_s = max(self._free_s, self._loop.time()) + took_s
        self.busy_s += took_s
        rows = []
        for row in plan.rows:
            if row.sample:
                num_prompt, num_output = self._sequences[row.seq]
                is_end = row.start + row.num_tokens - num_prompt >= num_output - 1
                rows.append(RowResult(row.seq, (_EOS if is_end else 1,)))
            else:
                rows.append(RowResult(row.seq))
        await asyncio.sleep(self._free_s - self._loop.time())
        return StepResult(plan.step, tuple(rows), took_s)

    async def run(self, job: Job) -> str:
        match job:
            case PullBlocks():
                result = await self._peer.pull(job)
                num_blocks = sum(block >= 0 for block in job.blocks[0])
                await self._network.carry(job.source.address, self._address, num_blocks * self._block_bytes)
                return result
            case SendBlocks():
                return await self._peer.send(job)
            case EndMove():
                return self._peer.end(job)
            case _:
                raise EngineFailed("There are only steps and moves here.")


def run_scale(
    asks: Iterable[Ask],
    config: EngineConfig,
    costs: Costs,
    pools: Sequence[str],
    set_up: Callable[[Gateway], None] = lambda gateway: None,
    *,
    shape: Shape = LAN,
    seed: int = 0,
) -> ScaleReport:
    """Serve asks, in the order of their times, with one worker for each name in `pools`. `set_up` chooses policies.
    Raises AssertionError where one is not served."""
    loop = VirtualLoop()
    report, open_asks = ScaleReport(), dict[str, tuple[Ask, float]]()
    lengths: dict[int, int] = {}
    made: dict[str, TimedExecutor] = {}
    idle = asyncio.Event()

    def hear(event: GatewayEvent, effects: Effects) -> None:
        for request, ttft_s in effects.firsts:
            open_asks[request.id] = open_asks[request.id][0], ttft_s
        for moved in effects.moved:
            report.num_moved += not moved.error
            report.num_unmoved += bool(moved.error)
        report.num_rerouted += effects.rerouted
        for ended in effects.ended:
            ask, ttft_s = open_asks.pop(ended.request.id)
            output = ended.output
            assert output is not None and not output.error, ended
            latency_s = ended.now_s - ask.at_s
            tpot_s = (latency_s - ttft_s) / (ask.num_output - 1) if ask.num_output > 1 else 0.0
            report.seen.append(Seen(ask, ttft_s, latency_s, tpot_s, output.num_cached))
            if not open_asks:
                idle.set()

    front = Front(loop, hear, is_checked=False)
    front.gateway.is_shared = True
    set_up(front.gateway)

    async def call() -> None:
        for number, ask in enumerate(asks):
            await asyncio.sleep(max(0.0, ask.at_s - loop.time()))
            # An end token counts as drawn: the last of `num_output`, where it may draw more.
            lengths[number] = ask.num_output if ask.most > ask.num_output else 2**62
            open_asks[f"r{number}"] = ask, 0.0
            front.open((ask.request(f"r{number}", number),), ask.client or f"client {number}")
        while open_asks:
            idle.clear()
            await idle.wait()

    async def main() -> None:
        rng = random.Random(f"network {seed}")
        network, peers = Network(loop, shape, rng), ToyNetwork(seed, delays=(shape.latency_s,))

        def begin(address: str, incarnation: str) -> tuple[Executor, tuple[Event, ...]]:
            made[address] = TimedExecutor(config, costs, lengths, loop, network, peers, address, incarnation)
            return made[address], ()

        build = Build(config, begin, peers, check_rate=0.0, num_blocks=config.groups[0].num_blocks)
        workers = [
            Worker(f"w{number}", pool, build, network, loop, random.Random(number), [front.attach])
            for number, pool in enumerate(pools)
        ]
        for worker in workers:
            loop.spawn(worker.serve(), worker.name)
        await asyncio.sleep(0.01)
        await call()
        report.duration_s = loop.time()
        report.num_preemptions = sum(worker.core.stats().num_preemptions for worker in workers)

    loop.run(main())
    report.busy_s = {name: executor.busy_s for name, executor in made.items()}
    return report


def synthetic(
    num_requests: int,
    rate: float,
    draw_prompt: Callable[[random.Random], int],
    draw_output: Callable[[random.Random], int],
    *,
    cv: float = 1.0,
    seed: int = 0,
    most: int = 0,
) -> list[Ask]:
    """Prompts of their own. Arrivals: a gamma process of `rate` a second, whose gaps have the coefficient of variation
    `cv`; 1 is Poisson. Llumnix uses both (Sun et al., 2024)."""
    rng = random.Random(f"asks {seed}")
    at_s, asks = 0.0, []
    for number in range(num_requests):
        at_s += rng.gammavariate(cv**-2, cv**2 / rate)
        asks.append(Ask(at_s, ((number, draw_prompt(rng)),), draw_output(rng), most))
    return asks


def power_law(mean: int, longest: int, exponent: float = 1.2) -> Callable[[random.Random], int]:
    """Lengths with a long tail, as Llumnix draws them: Pareto with this exponent, scaled to have the mean once cut."""

    def cut_mean(scale: float) -> float:
        steps = 2000
        values: list[float] = [scale * ((i + 0.5) / steps) ** (-1 / exponent) for i in range(steps)]
        return sum(min(longest, value) for value in values) / steps

    low, high = 0.0, float(mean)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)

    def length(rng: random.Random) -> int:
        drawn: float = high * (1.0 - rng.random()) ** (-1 / exponent)
        return max(1, min(longest, round(drawn)))

    return length


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tokenmill.sim.scale", description="Load a simulated cluster.")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--mean", type=int, default=256, help="mean tokens of prompts and of answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill", type=int, default=0, help="nodes that compute prompts for the others")
    parser.add_argument("--disaggregation", choices=DECISIONS, default="cost")
    parser.add_argument("--migration", choices=POLICIES, default="off")
    options = parser.parse_args(arguments)
    lengths = power_law(options.mean, 16 * options.mean)
    most = 16 * options.mean
    asks = synthetic(options.requests, options.rate, lengths, lengths, seed=options.seed, most=most)
    config = EngineConfig(groups=full_groups(2048), max_model_len=32 * options.mean, max_num_batched_tokens=512)
    pools = ["prefill"] * options.prefill + ["decode" if options.prefill else "mixed"] * (
        options.nodes - options.prefill
    )

    def set_up(gateway: Gateway) -> None:
        gateway.pools.decision = decision_named(options.disaggregation)
        gateway.reviews.policy = policy_named(options.migration)

    report = run_scale(asks, config, Costs(0.012, 0.0003, 0.00012, 1e-8, 2e-7), pools, set_up, seed=options.seed)
    print(
        f"{len(report.seen)} requests in {report.duration_s:.1f} s, busiest / mean {report.imbalance:.2f}, "
        f"{report.num_moved} moved, {report.num_unmoved} not, {report.num_rerouted} given to others while waiting, "
        f"{report.num_preemptions} preemptions"
    )
    for name in ("ttft_s", "tpot_s", "latency_s"):
        shares = ", ".join(f"p{100 * share:g} {report.percentile(name, share):.3f}" for share in (0.5, 0.9, 0.99))
        print(f"{name:10} mean {report.mean(name):.3f}, {shares}")


if __name__ == "__main__":
    main()
