"""What splitting prompts from answers costs and gains on workers of one core each: such that take everything, with the
best of four chunks, against a pool prefill and a pool decode, with that chunk or the largest, where requests are split
by the predicted cost or always. Workers are divided between the two pools as work is between prompts and answers.

The step cost model is roughly that of a model of 135M parameters on one core. Lengths are those of a trace, divided so
that prompts fit; arrivals are a Poisson process at a share of what all workers can do.

python tests/sim/split_goodput.py FOLDER [--workers N] [--requests N]      FOLDER: of the traces (tests/sim/traces.py)
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modelled import Ask, Cluster, Law, Served, percentile
from traces import NAMES, Row, rows_of

from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.pools import decision_named
from tokenmill.core.cost import Costs, Work
from tokenmill.core.terms import Terms

LAW = Law(Costs(0.005, 2e-4, 3.5e-4, 1.5e-8, 3e-7), 64, 512, 60_000, copy_s=1e-5, handoff_s=0.004)
CHUNKS = (64, 128, 256, 512)
DIVISORS = {"chat": 2, "code": 4, "agentic": 4, "mooncake": 8}
MOST_PROMPT, MOST_ANSWER = 8000, 1000
TTFT_S, TPOT_S = 2.0, 0.03
SHARES = (0.4, 0.6, 0.8)


def load(rows: Sequence[Row], divisor: int, num_workers: int, share: float) -> tuple[list[Ask], int]:
    """At this share of what the workers can compute with eight rows a step; and how many of them prompts take."""
    rng = random.Random(1)
    lengths = [
        (max(1, min(MOST_PROMPT, num_prompt // divisor)), max(1, min(MOST_ANSWER, num_answer // max(1, divisor // 2))))
        for _, num_prompt, num_answer, _ in rows
    ]
    prompts_s = sum(_prompt_s(num_prompt) for num_prompt, _ in lengths) / len(lengths)
    answers_s = sum(_answer_s(num_prompt, num_answer) for num_prompt, num_answer in lengths) / len(lengths)
    at_s, asks = 0.0, []
    for num_prompt, num_answer in lengths:
        at_s += rng.expovariate(num_workers * share / (prompts_s + answers_s))
        asks.append(Ask(at_s, num_prompt, num_answer, MOST_ANSWER, Terms(ttft_s=TTFT_S, tpot_s=TPOT_S)))
    num_prefill = round(num_workers * prompts_s / (prompts_s + answers_s))
    return asks, max(1, min(num_workers - 1, num_prefill))


def _prompt_s(num_prompt: int) -> float:
    costs = LAW.costs
    return costs.predict(Work(1, num_prompt, num_prompt * num_prompt / 2)) + num_prompt / 512 * costs.step_s


def _answer_s(num_prompt: int, num_answer: int) -> float:
    return num_answer * (LAW.costs.predict(Work(8, 8, 8 * num_prompt, 8 * num_prompt)) / 8)


def serve(asks: Sequence[Ask], pools: Sequence[str], decision: str, chunk: int) -> tuple[list[Served], Cluster]:
    def configure(gateway: Gateway) -> None:
        gateway.pools.decision = decision_named(decision)

    cluster = Cluster([replace(LAW, num_tokens=chunk)] * len(pools), pools, configure)
    return cluster.run(asks), cluster


def goodput(served: Sequence[Served]) -> float:
    """Share of requests that met both targets."""
    return sum(each.ttft_s <= TTFT_S and each.tpot_s <= TPOT_S for each in served) / len(served)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print(f"targets: first token {TTFT_S:g} s, further ones {1e3 * TPOT_S:g} ms")
    print("load      share  how         goodput  ttft99 s  tpot99 ms  split  tpot99 against plain")
    for name in NAMES:
        if options.only not in name:
            continue
        rows = rows_of(name, options.folder, options.requests)
        for share in SHARES:
            asks, num_prefill = load(rows, DIVISORS[name], options.workers, share)
            runs = {chunk: serve(asks, ["mixed"] * options.workers, "never", chunk) for chunk in CHUNKS}
            best = max(runs, key=lambda chunk: _merit(runs[chunk][0]))
            shown = {f"plain {best}": runs[best]}
            pools = ["prefill"] * num_prefill + ["decode"] * (options.workers - num_prefill)
            for decision in ("cost", "always"):
                made = [serve(asks, pools, decision, chunk) for chunk in {best, CHUNKS[-1]}]
                shown[f"{decision} {num_prefill}P"] = max(made, key=lambda each: _merit(each[0]))
            for how, (served, cluster) in shown.items():
                ratio = _tpot99(runs[best][0]) / max(1e-9, _tpot99(served))
                print(
                    f"{name:9} {share:5.2f}  {how:10} {goodput(served):8.3f}  "
                    f"{percentile([each.ttft_s for each in served], 0.99):8.2f} {1e3 * _tpot99(served):10.1f} "
                    f"{cluster.report.num_split:6d}  {ratio:.2f}",
                    flush=True,
                )


def _merit(served: Sequence[Served]) -> tuple[float, float]:
    return goodput(served), -_tpot99(served)


def _tpot99(served: Sequence[Served]) -> float:
    return percentile([each.tpot_s for each in served if each.num_tokens > 1], 0.99)


if __name__ == "__main__":
    main()
