"""How often the goodput search is right, on more queues and more searches than the tests have time for. Prints figures.

    python tests/bench/bench_virtual.py --runs 200 --probe-s 30 60 120

For each queue of known capacity: the median error of the answer, how many intervals hold the truth, how wide they are,
and how many probes a search took. No sockets and no clock: everything runs on the virtual loop.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from test_bench_virtual import BLANK, drifts, plain_probes

from tokenmill.bench.load import goodput
from virtual_queue import Queue, search

QUEUES = (
    (Queue(1, 0.05, True, 0.15), 1.0),
    (Queue(1, 0.05, True, 0.4), 3.0),
    (Queue(8, 0.2, False, 0.15), 1.0),
    (Queue(8, 0.2, False, 0.5), 100.0),
    (Queue(32, 1.0, False, 0.5), 1.0),
    (Queue(1, 0.025, False, 0.2), 7.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="searches of each queue")
    parser.add_argument("--probe-s", type=float, nargs="+", default=[30.0, 60.0], help="lengths of a probe")
    args = parser.parse_args()
    for queue, start_rate in QUEUES:
        limits = goodput.Search(start_rate=start_rate)
        capacity = queue.capacity(limits.target_attainment)
        grown = ", ".join(f"{load} {drifts(queue, load, args.runs):.1%}" for load in (0.7, 0.9, 1.1, 1.2))
        print(f"{queue}: {capacity:.2f}/s of {queue.most:.0f}; said to grow at {grown}")
        for probe_s in args.probe_s:
            searches = [search(queue, limits, probe_s, seed, BLANK) for seed in range(args.runs)]
            found = [goodput.conclude([probes], {}, limits, goodput.Price(), []) for probes in searches]
            held = fmean(one.request_rate_low <= capacity <= (one.request_rate_high or 1e9) for one in found)
            width = median((one.request_rate_high or 1e9) / max(1e-9, one.request_rate_low) for one in found)
            error = median(abs(one.request_rate / capacity - 1) for one in found)
            num_probes, plain = fmean(map(len, searches)), plain_probes(start_rate, capacity, limits.tolerance)
            print(
                f"  probes of {probe_s:.0f} s: error {error:.1%}, interval holds it {held:.0%}, ratio of its ends"
                f" {width:.2f}, {num_probes:.1f} probes (bisecting: {plain})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
