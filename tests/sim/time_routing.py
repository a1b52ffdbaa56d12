"""How long a decision takes, and how much memory the index: a thousand engines that hold a million blocks.

    python tests/sim/time_routing.py [--links 1000] [--blocks 1000000] [--tokens 12000]

Prompts have keys already. Every engine holds a prefix that all have; a fifth of the prompts are held whole by 1 to 3
engines, a fifth in half by 40, and the others by nobody beyond the common prefix. Between two decisions 20 engines make
a step, and one request starts. With `--per-store N` so many engines share a KV store, and two stores have each prompt:
half in host memory, all on disk.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections import Counter
from random import Random

from tokenmill.cluster.entry import Entry
from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.router import Router
from tokenmill.core.block import KEY_BYTES
from tokenmill.core.cost import Costs
from tokenmill.core.events import EngineStats, Ready, WorkerFacts
from tokenmill.core.kv_events import CLEARED, STORED, KVEvent, KVEvents
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.tiers import DISK, HOST, TierEvent, TierEvents, TierFacts

COSTS = Costs(step_s=0.030, row_s=5e-5, token_s=1.1e-4, position_s=2.1e-9, context_s=3.3e-8)
BLOCK, COMMON = 16, 32
TIERS = (TierFacts(HOST, 0, 1e-3, 1e10), TierFacts(DISK, 0, 1e-2, 5e9))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--per-store", type=int, default=0)
    args = parser.parse_args()
    random = Random(0)
    router, links = Router(), {}
    for number in range(args.links):
        worker = WorkerFacts(kv_store=str(number // args.per_store) if args.per_store else "")
        ready = Ready(
            "m", 2**20, 1, (), "id", BLOCK, 0, max_num_seqs=256, max_num_batched_tokens=2048, worker=worker,
            tiers=TIERS, block_bytes=5_000_000,
        )  # fmt: skip
        costs = Costs(*(each * random.uniform(0.97, 1.03) for each in COSTS))
        links[number] = EngineLink(number, ready, "mixed", EngineStats(costs=costs))
        router.join(links)
        router.hear(number, KVEvents(0, (KVEvent(CLEARED),)))
    common = random.randbytes(COMMON * KEY_BYTES)
    num_keys = args.tokens // BLOCK
    prompts = [common + random.randbytes((num_keys - COMMON) * KEY_BYTES) for _ in range(100)]
    num_blocks = dict.fromkeys(links, 0)
    seqs = dict.fromkeys(links, 1)

    def hold(number: int, keys: bytes, depth: int = 0) -> None:
        router.hear(number, KVEvents(seqs[number], (KVEvent(STORED, keys, b"", depth),)))
        seqs[number] += 1
        num_blocks[number] += len(keys) // KEY_BYTES

    tracemalloc.start()
    for number in links:
        hold(number, common)
    for at, keys in enumerate(prompts):
        holders = random.sample(list(links), 1 + at % 3 if at % 5 == 0 else 40 if at % 5 == 1 else 0)
        for number in holders:
            hold(number, keys[COMMON * KEY_BYTES : len(keys) // (1 if at % 5 == 0 else 2)], COMMON)
    while (left := args.blocks - sum(num_blocks.values())) > 0:
        number = min(num_blocks, key=lambda each: num_blocks[each])
        hold(number, random.randbytes(min(left, 500) * KEY_BYTES))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{sum(num_blocks.values())} blocks held, {size / sum(num_blocks.values()):.0f} bytes each")

    for number in range(0, args.links if args.per_store else 0, args.per_store or 1):
        events = [TierEvent(CLEARED)]
        for keys in random.sample(prompts, max(1, 2 * len(prompts) * args.per_store // args.links)):
            events += [TierEvent(STORED, HOST, keys[: len(keys) // 2]), TierEvent(STORED, DISK, keys)]
        router.hear(number, TierEvents(0, tuple(events)))

    entries: list[Entry] = []
    reasons: Counter[str] = Counter()
    prompt = tuple(range(args.tokens))
    took: list[float] = []
    worked: list[float] = []
    for turn in range(args.decisions):
        request = Request(f"r{turn}", prompt, SamplingParams(), 300, 0, keys=random.choice(prompts))
        for number in random.sample(list(links), 20):
            stats = links[number].stats
            computed = stats.prompt_tokens_computed + 2048 * bool(links[number].load.num_waiting)
            links[number].step(stats._replace(prompt_tokens_computed=computed))
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        route = router.choose(request, links, 0.0)
        took.append(time.perf_counter() - began_s)
        worked.append(time.thread_time() - began_cpu_s)
        entry = Entry(request)
        reasons[route.reason] += 1
        route.link.give(entry, route.num_hit)
        router.given(request, route.link.number)
        entries.append(entry)
        if len(entries) > 2 * args.links:
            done = entries.pop(random.randrange(len(entries)))
            assert done.link is not None
            links[done.link].take_back(done)
            router.end(done.request)
        else:
            begun = random.choice(entries)
            if not begun.tokens and begun.link is not None:
                links[begun.link].start(begun, begun.num_hit)
                begun.tokens.append(1)
    print(", ".join(f"{count} for {reason}" for reason, count in reasons.most_common()))
    for name, times in (("decision takes", took), ("processor spends", worked)):
        times.sort()
        p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
        print(f"a {name} {1e6 * p50:.0f} us (median), {1e6 * p99:.0f} us (p99)")
    print(f"at {args.links} engines and {args.tokens} tokens; load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
