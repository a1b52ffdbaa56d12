"""Which policy saves most: replays traces through the replacement policies of KV stores and compares what they save,
in recompute seconds, with the most that any could (`kv_reuse`).

    python scripts/kv_study.py TRACES --out docs/develop/reports

A tier of so many blocks, all of one size. A request uses the blocks at its head that the tier has and stores the rest.
Sizes are shares of the working set: the room with which LRU saves 99 % of what endless room would.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kv_report import CURVE, Curve, Point, draw
from tokenmill.core.tiers import BlockFacts
from tokenmill.kv.tiers.policies import pick
from tokenmill.kv.tiers.replacement import Costs, TierBlock, block_kinds
from tokenmill.sim.kv_reuse import Run, bound_s, lru_s, recompute_costs, runs_of, total_s, working_set
from tokenmill.sim.kv_traces import Load, agentic, mooncake, servegen

POLICIES = ("lru", "lfu", "s3-fifo", "cost")
SHARES = (0.05, 0.1, 0.25, 0.5)
MODELS = {"SmolLM2-135M": (1.92e-3, 2.07e-6), "70B": (3.5e-4, 6.5e-9)}
"""token_s, position_s. As fitted to steps of prompts of 100 to 7,500 tokens on two busy cores, where attention is most
of what a block costs from 930 positions on; and as 2 * 70e9 and 4 * 80 * 8192 operations take at 4e14 a second, from
54,000 on."""

TRACES: dict[str, tuple[str, Callable[[str, Iterator[dict[str, Any]]], Load]]] = {
    "Mooncake conversation": ("mooncake_conversation", mooncake),
    "Mooncake synthetic": ("mooncake_synthetic", mooncake),
    "agentic coding": ("agentic_coding", agentic),
    "ServeGen turns": ("servegen_deepseek-r1", servegen),
}

_BYTES = 1
_SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""Makes keys of numbers that look like hashes."""


def replay(load: Load, policy: str, num_blocks: int, token_s: float, position_s: float) -> float:
    """Seconds that a tier of this size saves."""
    kind = block_kinds((_BYTES,), Costs(load.block_size, token_s, position_s))[0]
    costs = recompute_costs(load.block_size, token_s, position_s)
    replacement = pick(policy, num_blocks * _BYTES)
    keys = [(number * _SPREAD % (1 << 128)).to_bytes(16) for number in range(load.num_blocks)]
    tier: dict[bytes, TierBlock] = {}
    saved = 0.0
    for now, numbers in load.requests:
        names = [keys[number] for number in numbers]
        num_hits = 0
        while num_hits < len(names) and names[num_hits] in tier:
            num_hits += 1
        saved += costs.sum_s(0, num_hits)
        for depth in range(num_hits - 1, -1, -1):
            block = tier[names[depth]]
            block.num_uses += 1
            block.used_s = now
            replacement.use(block, now)
        parent, key = (tier[names[num_hits - 1]], names[num_hits - 1]) if num_hits else (None, b"")
        for depth in range(num_hits, len(names)):
            name = names[depth]
            known = tier.get(name)
            if known is None:
                facts = BlockFacts((0, name), key, depth)
                known = tier[name] = TierBlock(kind, facts, 0, 0, now)
                if parent is not None:
                    parent.num_children += 1
                replacement.add(known, now)
            else:
                known.num_uses += 1
                known.used_s = now
                replacement.use(known, now)
            parent, key = known, known.key
        while len(tier) > num_blocks:
            victim = replacement.victim(_any, now)
            assert victim is not None
            replacement.remove(victim)
            del tier[victim.key]
            before = tier.get(victim.parent)
            if before is not None and before.num_children:
                before.num_children -= 1
                if not before.num_children:
                    replacement.bare(before)
    return saved


def _any(block: TierBlock) -> bool:
    return True


def study(
    load: Load,
    model: str,
    coefficients: tuple[float, float],
    policies: Sequence[str] = POLICIES,
    shares: Sequence[float] = SHARES,
) -> Curve:
    costs = recompute_costs(load.block_size, *coefficients)
    runs = runs_of(load.requests)
    total, most = total_s(runs, costs), working_set(runs, costs)

    def bound(num_blocks: float) -> float:
        return bound_s(runs, costs, int(num_blocks), len(load.requests)) / total

    points = []
    for share in shares:
        num = max(1, int(share * most))
        saved = {policy: replay(load, policy, num, *coefficients) / total for policy in policies}
        points.append(Point(share, num, saved, bound(num)))
    lru = tuple(lru_s(runs, costs, num) / total for num in CURVE)
    return Curve(load, model, total, most, tuple(points), lru, tuple(_curve(runs, bound)))


def _curve(runs: Sequence[Run], bound: Callable[[float], float]) -> Iterator[float]:
    """1 from where all fits on."""
    is_all = False
    for num in CURVE:
        value = 1.0 if is_all else bound(num)
        is_all = value > 0.9999
        yield value


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf8") as lines:
        yield from map(json.loads, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python scripts/kv_study.py", description="Compare policies of KV tiers.")
    parser.add_argument("traces", type=Path, help="folder of the traces")
    parser.add_argument("--out", type=Path, help="folder to write kv-policies.md and kv-policies.svg to")
    parser.add_argument("--only", choices=[stem for stem, _ in TRACES.values()], help="one trace")
    parser.add_argument("--costs", choices=tuple(MODELS), help="of one model")
    options = parser.parse_args(arguments)
    curves = []
    for name, (stem, made) in TRACES.items():
        if options.only in (None, stem):
            load = made(name, read(options.traces / f"{stem}.jsonl.gz"))
            for model in (options.costs,) if options.costs else MODELS:
                curves.append(study(load, model, MODELS[model]))
                print(name, model, *curves[-1].points, sep="\n  ", flush=True)
    if options.out is not None:
        text, picture = draw(curves, POLICIES, CURVE)
        (options.out / "kv-policies.md").write_text(text, encoding="utf8")
        (options.out / "kv-policies.svg").write_text(picture, encoding="utf8")


if __name__ == "__main__":
    main()
