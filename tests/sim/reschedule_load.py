"""What rescheduling gains on a load of Llumnix's kind (OSDI 2024): 16 engines, lengths of a power law with means 128, 256
and 512, arrivals by a Poisson or a bursty Gamma process. Least load with migration off, against the same with it on.

The step law is roughly that of a 7B model on an A10, whose KV has room for 13,616 tokens.

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
    asks: list[Ask], migration: str, law: Law = LAW, num_engines: int = NUM_ENGINES
) -> tuple[list[Served], Cluster]:
    def configure(gateway: Gateway) -> None:
        gateway.reviews.policy = policy_named(migration)

    cluster = Cluster([law] * num_engines, ["mixed"] * num_engines, configure)
    return cluster.run(asks), cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print("load          rate  migration  p50 s   p99 s  ttft99  tok99 ms  mean s  lost tokens  moves rerouted failed")
    for name, mean_in, mean_out, rate, variation in LOADS:
        if options.only not in name:
            continue
        asks = load(options.seed, options.requests, mean_in, mean_out, rate, variation)
        seen = {}
        for migration in ("off", "on"):
            served, cluster = serve(asks, migration)
            latencies = [each.latency_s for each in served]
            seen[migration] = percentile(latencies, 0.99)
            report = cluster.report
            print(
                f"{name:12} {rate:5.1f}  {migration:9} {percentile(latencies, 0.5):6.2f} {seen[migration]:7.2f} "
                f"{percentile([each.ttft_s for each in served], 0.99):7.2f} "
                f"{1e3 * percentile([each.tpot_s for each in served], 0.99):8.1f} "
                f"{sum(latencies) / len(latencies):7.2f} {report.num_preempted:12d} {report.num_moved:6d} "
                f"{report.num_rerouted:7d} {report.num_failed:5d}",
                flush=True,
            )
        print(f"{name:12} p99 latency: {seen['off'] / seen['on']:.2f} times lower", flush=True)


LOADS = (
    ("S-S poisson", 128, 128, 45.0, 1.0),
    ("M-M poisson", 256, 256, 19.0, 1.0),
    ("L-L poisson", 512, 512, 8.0, 1.0),
    ("S-L poisson", 128, 512, 12.0, 1.0),
    ("L-S poisson", 512, 128, 20.0, 1.0),
    ("M-M gamma 4", 256, 256, 15.0, 4.0),
)

if __name__ == "__main__":
    main()
