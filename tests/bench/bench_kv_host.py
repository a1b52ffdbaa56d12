"""How fast KV comes out of a KV store's host memory into an engine's pool and goes in, beside plain copies.

    python tests/bench/bench_kv_host.py [--tokens N] [--rounds N]

A store in a process of its own, an engine's pool and its jobs as they are in a server: leases, copies, checksums of
every block. Beside it, in turns: memcpy of as many bytes between blocks of the pool. And the time of a find. What was
used longest ago is given up: the usual policy would rather keep what was fetched in earlier rounds than what is new.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from tokenmill.core.block import KVGroup
from tokenmill.core.effects import FetchBlocks, FindBlocks, SaveBlocks
from tokenmill.core.tiers import BlockFacts
from tokenmill.kv.connector.worker.tiers import TierCopies
from tokenmill.kv.store.child import KVStoreProcess
from tokenmill.kv.store.options import TierOptions
from tokenmill.kv.transfer.client import StoreClient
from tokenmill.net.system import run_event_loop
from tokenmill.ops.kv_pool import HostPool

GROUP = KVGroup("all", num_layers=30, num_kv_heads=3, head_dim=64)
"""Of SmolLM2 135M: 368,640 bytes for 16 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    run_event_loop(measure(args.tokens // GROUP.block_size, args.rounds))


async def measure(num_blocks: int, rounds: int) -> None:
    size = GROUP.bytes_per_block
    num_bytes = num_blocks * size
    pool = HostPool(GROUP, 2 * num_blocks, lambda data, group: None)
    pool.data[:] = np.frombuffer(random.Random(1).randbytes(size), np.uint8)
    blocks = list(range(2 * num_blocks))
    random.Random(2).shuffle(blocks)
    seconds: dict[str, list[float]] = {"memcpy": [], "load": [], "save": [], "find": []}
    with KVStoreProcess(TierOptions(kv_host=3 * num_bytes + (64 << 20), kv_tier_policy="lru")) as store:
        client = await StoreClient.connect(store.path, "bench", (size,), "worker", "life")
        copies = TierCopies([pool], client)
        for nth in range(rounds + 1):
            keys = [(0, b"%8d%8d" % (nth, place)) for place in range(num_blocks)]
            facts = tuple(BlockFacts(block, keys[place - 1][1] if place else b"", place)
                          for place, block in enumerate(keys))  # fmt: skip
            out = tuple((0, key, block) for (_, key), block in zip(keys, blocks, strict=False))
            back = tuple((0, key, block) for (_, key), block in zip(keys, blocks[num_blocks:], strict=True))
            began_s = time.perf_counter()
            assert await copies.save(SaveBlocks(1, out, facts=facts)) == ""
            saved_s = time.perf_counter()
            assert await copies.fetch(FetchBlocks(2, back)) == ""
            loaded_s = time.perf_counter()
            await asyncio.sleep(0)
            found_s = time.perf_counter()
            assert await copies.find(FindBlocks(3, tuple((keys * 250)[:250]))) == "1" * 250
            end_s = time.perf_counter()
            if nth:
                seconds["save"].append(saved_s - began_s)
                seconds["load"].append(loaded_s - saved_s)
                seconds["find"].append(end_s - found_s)
                seconds["memcpy"].append(copy(pool, blocks[:num_blocks], blocks[num_blocks:]))
        copies.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{num_blocks * GROUP.block_size} tokens, {num_bytes / 1e6:.1f} MB, {rounds} rounds: median (lowest to highest)"
    )
    for name in ("memcpy", "load", "save"):
        share = "" if name == "memcpy" else f", {median['memcpy'] / median[name]:.0%} of memcpy"
        spread = f"{num_bytes / max(seconds[name]) / 1e9:.2f} to {num_bytes / min(seconds[name]) / 1e9:.2f}"
        print(f"  {name:6} {num_bytes / median[name] / 1e9:6.2f} GB/s ({spread}){share}")
    print(f"  find of 250 blocks: {1e3 * median['find']:.2f} ms ({1e3 * min(seconds['find']):.2f} to"
          f" {1e3 * max(seconds['find']):.2f})")  # fmt: skip


def copy(pool: HostPool, sources: Sequence[int], targets: Sequence[int]) -> float:
    size, base = pool.group.bytes_per_block, pool.memory()[1]
    began_s = time.perf_counter()
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(base + target * size, base + source * size, size)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
