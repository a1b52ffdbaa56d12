"""Whether the searches and verdicts of bench are right as often as they say: hundreds of runs on virtual queues.

Everything is seeded, so a test passes or fails for good; the bars are on how many of a hundred runs are right.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, median

import pytest
from test_bench_load_measure import exchange, run_of

from tokenmill.bench.load import goodput
from tokenmill.bench.load.compare import METRICS, Side, decide, make_ratio
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.result import Distribution, Ratio, Run
from tokenmill.bench.stats import drift
from virtual_queue import Queue, search

BLANK = run_of([exchange(0, 0.0, 0.0, [1.0, 2.0])])
NUM_RUNS = 100
PROBE_S = 60.0


def plain_probes(start: float, capacity: float, tolerance: float) -> int:
    """How many probes doubling or halving to a bracket and bisecting it take, if no probe is ever wrong."""
    doublings = abs(math.floor(math.log2(capacity / start))) + (2 if capacity > start else 1)
    return doublings + math.ceil(math.log2(math.log(2) / math.log1p(tolerance)))


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    ("queue", "start_rate"),
    [
        (Queue(1, 0.05, True, 0.15), 1.0),
        (Queue(8, 0.2, False, 0.15), 1.0),
        (Queue(1, 0.025, False, 0.2), 7.0),
    ],
    ids=["M/D/1", "M/M/8", "M/M/1"],
)
def test_the_interval_of_goodput_holds_the_capacity(queue: Queue, start_rate: float) -> None:
    """In at least 90 of 100 searches; the answer is off by at most 3 % in the median, for no more probes than plain
    doubling and bisecting would make."""
    limits = goodput.Search(start_rate=start_rate)
    capacity = queue.capacity(limits.target_attainment)
    errors, num_held, num_probes = [], 0, []
    for seed in range(NUM_RUNS):
        probes = search(queue, limits, PROBE_S, seed, BLANK)
        found = goodput.conclude([probes], {}, limits, goodput.Price(), [])
        assert found.request_rate_high is not None and found.request_rate_interval is not None
        errors.append(abs(found.request_rate / capacity - 1))
        num_held += found.request_rate_low <= capacity <= found.request_rate_high
        num_probes.append(len(probes))
    assert num_held >= 0.9 * NUM_RUNS and median(errors) <= 0.03, (num_held, median(errors))
    assert fmean(num_probes) <= plain_probes(start_rate, capacity, limits.tolerance)


def drifts(queue: Queue, load: float, num_runs: int) -> float:
    """Share of runs at `load` times what the queue can serve that are said to have grown."""
    found = 0
    rate = load * queue.most
    for seed in range(num_runs):
        arrivals = Schedule(request_rate=rate).arrival_times(round(30.0 * rate), seed)
        waits = queue.waits(random.Random(f"{seed}/{load}"), arrivals)
        found += drift([(at, wait + queue.service_s) for at, wait in zip(arrivals, waits, strict=True)]).has_grown
    return found / num_runs


@pytest.mark.parametrize(
    "queue", [Queue(1, 0.05, True, 1.0), Queue(8, 0.4, False, 1.0), Queue(1, 0.05, False, 1.0)], ids=str
)
def test_a_queue_that_keeps_up_is_seldom_said_to_grow(queue: Queue) -> None:
    """At most 2 of 100 runs of 30 s up to nine tenths of its capacity; at 1.2 times its capacity at least 90."""
    for load in (0.5, 0.7, 0.8, 0.9):
        assert drifts(queue, load, 200) <= 0.02, load
    assert drifts(queue, 1.2, 100) >= 0.9


def test_equal_latencies_and_few_are_no_drift() -> None:
    """A constant has no trend, and a handful of requests tells nothing."""
    assert not drift([(float(i), 1.0) for i in range(100)]).has_grown
    assert drift([(float(i), float(i)) for i in range(19)]).slope is None
    assert drift([(0.0, float(i)) for i in range(100)]).slope is None
    grown = drift([(float(i), 1.0 + 0.1 * i) for i in range(100)])
    assert grown.has_grown and grown.slope == pytest.approx(0.1)


def turns(num_repeats: int, slower: float, seed: int) -> list[Ratio]:
    """The decided ratios of two servers, the second slower by that share, whose runs vary by 3.5 %."""
    rng = random.Random(f"turns/{seed}")
    sides = []
    for name, factor in (("a", 1.0), ("b", 1.0 - slower)):
        runs = []
        for _ in range(num_repeats):
            speed = factor * math.exp(rng.gauss(0.0, 0.035))
            runs.append(run_at(speed, rng))
        sides.append(Side(name, "cold", runs))
    made = (make_ratio(metric, higher, *sides) for metric, higher in METRICS)
    return decide([ratio for ratio in made if ratio is not None], "output_tokens_per_s", num_repeats)


def run_at(speed: float, rng: random.Random) -> Run:
    """Rates go with the speed, latencies against it, each with a little variation of its own."""
    figures: dict[str, float | Distribution] = {}
    for metric, higher in METRICS:
        name, _, part = metric.partition(".")
        value = (speed if higher else 1.0 / speed) * math.exp(rng.gauss(0.0, 0.02 if part else 0.0))
        before = figures.get(name)
        figures[name] = (
            replace(before if isinstance(before, Distribution) else Distribution(1), **{part: value}) if part else value
        )
    return replace(BLANK, **figures)  # type: ignore[arg-type]


def test_verdicts_are_as_rare_and_as_likely_as_promised() -> None:
    """Two servers that are equal get no verdict, on any metric, in at least 95 of 100 comparisons of 12 repeats; one
    that is 5 % slower is found out by the primary metric in at least 80."""
    num = 300
    equal = [turns(12, 0.0, seed) for seed in range(num)]
    slower = [turns(12, 0.05, seed + num) for seed in range(num)]
    assert all(ratios[0].is_primary and not ratios[1].is_primary for ratios in equal)
    assert sum(all(ratio.verdict == "undecided" for ratio in ratios) for ratios in equal) >= 0.95 * num
    assert sum(ratios[0].verdict == "worse" for ratios in slower) >= 0.8 * num
    assert not any(ratios[0].verdict == "better" for ratios in slower)
