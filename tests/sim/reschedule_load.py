"""What rescheduling gains on a load of Llumnix's kind (OSDI 2024): 16 engines, lengths of a power law for means of 128,
256 and 512, arrivals by a Poisson or a bursty Gamma process. Least load with migration off, and the same with it on.
Latency per token is that of a request by the tokens of its answer.

The step cost model is roughly that of a 7B model on an A10, whose KV has room for 13,616 tokens.

python tests/sim/reschedule_load.py [--requests N] [--seed S]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

from modelled import Ask, Cluster, Law, Served, percentile

from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.rescheduling import policy_named
from tokenmill.core.cost import Costs

LAW = Law(Costs(0.024, 5e-5, 2.2e-4, 1e-8, 9e-7), 256, 2048, 13_616, copy_s=6e-5, handoff_s=0.01)
"""copy_s: half a megabyte a token over 64 Gbit/s."""
NUM_ENGINES = 16
MOST = 6000


def power_law(rng: random.Random, mean: int, most: int = MOST) -> int:
    """A bounded Pareto with about this mean: most are short, a few very long."""
    alpha, low = 1.05, mean / 6.0
    return max(1, min(most, round(low * (1 - rng.random() * (1 - (low / most) ** alpha)) ** (-1 / alpha))))


def arrivals(rng: random.Random, rate: float, variation: float) -> Iterator[float]:
    """Gamma gaps with this coefficient of variation; 1 is a Poisson process."""
    shape = 1 / variation**2
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(shape, 1 / (rate * shape))
        yield at_s


def load(seed: int, number: int, mean_in: int, mean_out: int, rate: float, variation: float) -> list[Ask]:
    rng = random.Random(f"load {seed}")
    times = arrivals(rng, rate, variation)
    return [Ask(next(times), power_law(rng, mean_in), power_law(rng, mean_out), max_tokens=MOST) for _ in range(number)]


def serve(
    asks: list[Ask], migration: str, cost_model: Law = LAW, num_engines: int = NUM_ENGINES
) -> tuple[list[Served], Cluster]:
    def configure(gateway: Gateway) -> None:
        gateway.router.choose_by("least_load")
        gateway.reviews.policy = policy_named(migration)

    cluster = Cluster([cost_model] * num_engines, ["mixed"] * num_engines, configure)
    return cluster.run(asks), cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(
        "load         rate  migration  p50 s   p99 s  ttft99  per token99 ms  mean s  lost tokens  moves rerouted fail"
    )
    for name, mean_in, mean_out, rate, variation in LOADS:
        if options.only not in name:
            continue
        asks = load(options.seed, options.requests, mean_in, mean_out, rate, variation)
        seen: dict[str, tuple[float, ...]] = {}
        for migration in ("off", "on"):
            served, cluster = serve(asks, migration)
            latencies = [each.latency_s for each in served]
            per_token = [each.latency_s / each.num_tokens for each in served]
            ttfts = [each.ttft_s for each in served]
            seen[migration] = tuple(percentile(each, 0.99) for each in (latencies, ttfts, per_token))
            report = cluster.report
            print(
                f"{name:12} {rate:5.1f}  {migration:9} {percentile(latencies, 0.5):6.2f} {seen[migration][0]:7.2f} "
                f"{seen[migration][1]:7.2f} {1e3 * seen[migration][2]:15.1f} {sum(latencies) / len(latencies):7.2f} "
                f"{report.num_preempted:12d} {report.num_moved:6d} {report.num_rerouted:7d} {report.num_failed:5d}",
                flush=True,
            )
        gains = [before / after for before, after in zip(seen["off"], seen["on"], strict=True)]
        print("{} p99 lower: latency {:.2f}x, first token {:.2f}x, per token {:.2f}x".format(name, *gains), flush=True)


LOADS = (
    ("S-S poisson", 128, 128, 160.0, 1.0),
    ("M-M poisson", 256, 256, 75.0, 1.0),
    ("M-M busier", 256, 256, 100.0, 1.0),
    ("L-L poisson", 512, 512, 35.0, 1.0),
    ("S-L poisson", 128, 512, 40.0, 1.0),
    ("L-S poisson", 512, 128, 90.0, 1.0),
    ("M-M gamma 4", 256, 256, 60.0, 4.0),
)

if __name__ == "__main__":
    main()
