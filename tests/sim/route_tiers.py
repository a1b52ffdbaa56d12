"""Routing with KV stores on a trace of conversations: real engines, gateway, stores and managers on virtual time.

    PYTHONPATH=scripts python tests/sim/route_tiers.py TRACE.jsonl[.gz] [--requests 1500] [--workers 8]
        [--per-store 2] [--speed 1]

Lengths and hash blocks of the trace are an eighth of what they are, so that pools, which hold a quarter of the working
set together, and stores are in proportion. Three ways: without tiers; with tiers of which the front end knows nothing,
so that it sends requests by pools and load alone; and with tiers that it routes by.
"""

from __future__ import annotations

import argparse
import sys
import time

from route_mooncake import HASH_TOKENS, Line, read

from scale import Ask, ScaleReport, run_scale
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.tiers import DISK, HOST
from tokenmill.sim.tier_plan import TierSpec, TierSpecs

SCALE = 8
HASH = HASH_TOKENS // SCALE
BLOCK = 16
BLOCK_BYTES = 320 * 1024 * BLOCK
COSTS = Costs(step_s=0.030, row_s=5e-5, token_s=8.8e-4, position_s=1.3e-7, context_s=3.3e-8)
"""As in route_mooncake, a token counting for eight."""
COPY_BYTES_S, DISK_BYTES_S = 2e10, 5e9


def asks_of(lines: list[Line], speed: float) -> list[Ask]:
    asks = []
    for number, line in enumerate(lines):
        rest = max(1, line.num_input // SCALE - len(line.hashes) * HASH)
        parts = (*((each, HASH) for each in line.hashes), (-1 - number, rest))
        asks.append(Ask(line.at_s / speed, parts, max(1, line.num_output // SCALE)))
    return asks


def run(asks: list[Ask], num_workers: int, per_store: int, num_blocks: int, way: str, policy: str) -> ScaleReport:
    longest = max(sum(size for _, size in ask.parts) + ask.num_output for ask in asks)
    config = EngineConfig(
        groups=full_groups(num_blocks, BLOCK_BYTES), max_model_len=longest + BLOCK, max_num_batched_tokens=256,
        max_num_seqs=64,
    )  # fmt: skip
    tiers = None
    if way != "none":
        num_bytes = num_blocks * per_store * BLOCK_BYTES
        host = TierSpec(HOST, 2 * num_bytes, COPY_BYTES_S, COPY_BYTES_S, 1e-4)
        disk = TierSpec(DISK, 16 * num_bytes, DISK_BYTES_S, DISK_BYTES_S, 1e-3, admission="all")
        tiers = TierSpecs((host, disk), per_store, is_told=way == "routed")

    def set_up(gateway: Gateway) -> None:
        gateway.router.choose_by(policy)

    return run_scale(asks, config, COSTS, ["mixed"] * num_workers, set_up, tiers=tiers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--per-store", type=int, default=2)
    parser.add_argument("--speed", type=float, default=1.0, help="times the trace's rate")
    parser.add_argument("--policy", default="kv_aware")
    parser.add_argument("--ways", default="none,blind,routed")
    args = parser.parse_args()
    lines = read(args.trace, args.requests)
    asks = asks_of(lines, args.speed)
    working = len({each for line in lines for each in line.hashes}) * HASH // BLOCK
    num_blocks = max(2 * max(len(line.hashes) + 2 for line in lines) * HASH // BLOCK, working // 4 // args.workers)
    print(f"{len(asks)} requests, a working set of {working} blocks; {args.workers} pools of {num_blocks} each")
    for way in args.ways.split(","):
        began_s = time.perf_counter()
        made = run(asks, args.workers, args.per_store, num_blocks, way, args.policy)
        num_prompt = sum(size for ask in asks for _, size in ask.parts)
        cached = sum(each.num_cached for each in made.seen) / num_prompt
        print(
            f"{way:8} TTFT mean {made.mean('ttft_s'):.3f} p50 {made.percentile('ttft_s', 0.5):.3f} "
            f"p99 {made.percentile('ttft_s', 0.99):.2f} s, cached {cached:.1%}, {made.num_fetched} blocks fetched, "
            f"busy {sum(made.busy_s.values()) / made.duration_s / args.workers:.0%}, "
            f"{dict(made.reasons.most_common())}   ({time.perf_counter() - began_s:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
