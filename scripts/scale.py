"""A cluster at scale: the live gateway and real engines under a load of thousands of requests, where steps cost time
and nothing else. For measuring policies; whether answers are right is for `cluster`.

Steps take what a cost model says of their rows (`core.cost.Costs`), one after the other on each worker. KV that moves
takes its bytes over the wires of both hosts (`network`). Prompts are made of parts: equal parts at the head of two
prompts are equal tokens, as the block hashes of a trace say.

`python scripts/scale.py --nodes 16 --requests 3000 --rate 40` prints latencies of a synthetic load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.cluster.events import Effects, GatewayEvent
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.pools import DECISIONS, decision_named
from tokenmill.cluster.rescheduling import POLICIES, policy_named
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import CostModel, Costs
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import USUAL, Terms
from tokenmill.sim.deployment import LAN, Deployment, WorkerPlan
from tokenmill.sim.loop import VirtualLoop, rare_collections
from tokenmill.sim.network import Shape
from tokenmill.sim.parts import PartsPlan
from tokenmill.sim.service import Service, ServiceReport
from tokenmill.sim.tier_plan import TierSpecs
from tokenmill.sim.timed import END_TOKEN


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
            eos_token_ids=(END_TOKEN,),
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
    num_unmoved: moves from worker to worker that succeeded, and that did not. num_fetched: blocks from KV stores.
    reasons: why requests went where they went."""

    seen: list[Seen] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    num_moved: int = 0
    num_unmoved: int = 0
    num_rerouted: int = 0
    num_preemptions: int = 0
    num_fetched: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def imbalance(self) -> float:
        """Busiest worker's time, over the mean."""
        return max(self.busy_s.values()) * len(self.busy_s) / sum(self.busy_s.values())

    def mean(self, name: str) -> float:
        return sum(float(getattr(each, name)) for each in self.seen) / len(self.seen)

    def percentile(self, name: str, share: float) -> float:
        values = sorted(getattr(each, name) for each in self.seen)
        return float(values[min(len(values) - 1, int(share * len(values)))])


def run_scale(
    asks: Iterable[Ask],
    config: EngineConfig,
    cost_model: CostModel,
    pools: Sequence[str],
    set_up: Callable[[Gateway], None] = lambda gateway: None,
    *,
    shape: Shape = LAN,
    seed: int = 0,
    tiers: TierSpecs | None = None,
    fast_path: bool = True,
) -> ScaleReport:
    """Serve asks, in the order of their times, with one worker for each name in `pools`. `set_up` chooses policies.
    Raises AssertionError where one is not served."""
    loop = VirtualLoop()
    report, open_asks = ScaleReport(), dict[str, tuple[Ask, float]]()
    idle = asyncio.Event()
    plans = tuple(WorkerPlan(f"w{number}", pool, config, cost_model) for number, pool in enumerate(pools))

    def watch(event: GatewayEvent, effects: Effects) -> None:
        for request, ttft_s in effects.firsts:
            open_asks[request.id] = open_asks[request.id][0], ttft_s
        for ended in effects.ended:
            ask, ttft_s = open_asks.pop(ended.request.id)
            output = ended.output
            assert output is not None and not output.error, ended
            latency_s = ended.now_s - ask.at_s
            tpot_s = (latency_s - ttft_s) / (ask.num_output - 1) if ask.num_output > 1 else 0.0
            report.seen.append(Seen(ask, ttft_s, latency_s, tpot_s, output.num_cached))
            if not open_asks:
                idle.set()

    deployment = Deployment(plans, shape, PartsPlan(tiers=tiers))
    service = Service(deployment, loop, seed=seed, set_up=set_up, watch=watch, fast_path=fast_path)

    def hear(output: Output) -> None:
        assert not output.error, output

    def hear_run(output: Output, times: Sequence[float]) -> None:
        pass

    async def main() -> None:
        await service.start()
        for number, ask in enumerate(asks):
            await asyncio.sleep(max(0.0, ask.at_s - loop.time()))
            request = ask.request(f"r{number}", number)
            open_asks[request.id] = ask, 0.0
            # An end token counts as drawn: the last of `num_output`, where it may draw more.
            client = ask.client or f"client {number}"
            service.open(request, client, hear, num_output=ask.num_output, hear_run=hear_run)
        while open_asks:
            idle.clear()
            await idle.wait()
        await service.stop()

    with rare_collections():
        loop.run(main())
    _add_up(report, service.report)
    return report


def _add_up(report: ScaleReport, done: ServiceReport) -> None:
    report.busy_s, report.duration_s, report.reasons = done.busy_s, done.duration_s, done.reasons
    report.num_moved, report.num_unmoved, report.num_rerouted = done.num_moved, done.num_unmoved, done.num_rerouted
    report.num_preemptions, report.num_fetched = done.num_preemptions, done.num_fetched


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
    parser = argparse.ArgumentParser(prog="python scripts/scale.py", description="Load a simulated cluster.")
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
