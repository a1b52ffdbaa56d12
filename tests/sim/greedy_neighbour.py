"""What a tenant feels of one that sends ten times its share, in simulation: p99 TTFT beside it, over that beside one
that sends exactly its share, over many seeds.

`python tests/sim/greedy_neighbour.py --seeds 200` prints the ratios.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from queueing import CONFIG, Ask, Replay, percentile
from tokenmill.core.terms import Terms

ENGINE = replace(CONFIG, max_num_seqs=16, max_num_batched_tokens=128)
SECONDS = 12.0
WARM_S = 2.4
MAX_QUEUE_S = 3.0
"""Of the server: what would wait longer is refused, and the greedy tenant does not come back."""

# Where rows, prompts or both are short: prompt, output, calls a second that the engine can serve.
LOADS = {"rows": (20, 40, 21.7), "prompts": (150, 4, 26.5), "both": (60, 20, 30.4)}


@dataclass(frozen=True)
class Felt:
    """By the watched tenant, of one that sends its share and of a greedy one."""

    even: list[float]
    greedy: list[float]
    num_refused: int

    @property
    def ratio(self) -> float:
        return percentile(self.greedy, 0.99) / percentile(self.even, 0.99)


def felt(name: str, load: float, seeds: range, times: float = 10.0, *, are_told_apart: bool = True) -> Felt:
    """load: of its share, that the watched tenant sends."""
    num_prompt, num_output, rate = LOADS[name]
    found: list[list[float]] = []
    num_refused = 0
    for factor in (1.0, times):
        ttfts: list[float] = []
        for seed in seeds:
            asks = [
                *calls("watched", rate / 2 * load, seed, num_prompt, num_output, are_told_apart),
                *calls("other", rate / 2 * factor, seed, num_prompt, num_output, are_told_apart),
            ]
            replay = Replay(ENGINE, max_queue_s=MAX_QUEUE_S).run(asks)
            num_refused += sum(ask.name == "watched" for _, ask, _ in replay.refused)
            ttfts += [each.ttft_s for each in replay.seen if each.call.startswith("watched") and each.at_s > WARM_S]
        found.append(ttfts)
    return Felt(*found, num_refused)


def calls(name: str, rate: float, seed: int, num_prompt: int, num_output: int, is_tenant: bool) -> list[Ask]:
    rng = random.Random(f"{name} {seed}")
    asks: list[Ask] = []
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(rate)) < SECONDS:
        lengths = [max(2, round(rng.uniform(0.5, 1.5) * mean)) for mean in (num_prompt, num_output)]
        who = name if is_tenant else ""
        asks.append(Ask(at_s, *lengths, name=name, client=who, terms=Terms(who)))
    return asks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1.0], metavar="X")
    args = parser.parse_args()
    for name in LOADS:
        for load in args.loads:
            seen = felt(name, load, range(args.seeds))
            even, greedy = (percentile(each, 0.99) for each in (seen.even, seen.greedy))
            print(
                f"{name:8} load {load:.2f}: p99 TTFT {1e3 * even:.0f} ms -> {1e3 * greedy:.0f} ms, {seen.ratio:.2f} x;"
                f" {len(seen.even)} requests, {seen.num_refused} refused",
                flush=True,
            )


if __name__ == "__main__":
    main()
