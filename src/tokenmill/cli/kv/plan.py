"""`kv plan`: how much host memory and disk a load is worth, from a trace of it.

Exact for LRU of any size, from reuse distances (`sim.kv_reuse`); the usual policy saves at least as much on public
traces (docs/develop/reports/kv-policies.md). A disk has what host memory has given up, so that what is saved is a
matter of the larger of both. Loading takes its bytes at the usual rates.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.errors import ConfigError
from ...core.tiers import DISK, HOST, USUAL_FACTS
from ...core.units import GiB, format_bytes
from ...formats.checkpoint import open_checkpoint
from ...formats.hub import local_model
from ...models.summary import model_summary
from ...node.machine import read_machine
from ...node.options import KV_CACHE_DTYPES
from ...sim.kv_reuse import RecomputeCosts, Run, lru_s, num_reused, recompute_costs, runs_of, total_s, working_set
from ...sim.kv_traces import Load, trace_of
from ...text.files import read_jsonl
from .look import table

DAY_S = 86400.0
USUAL = {HOST: tuple(2**step * GiB for step in range(0, 9, 2)), DISK: tuple(2**step * GiB for step in range(4, 13, 2))}
ENOUGH = 0.05
"""Host memory is doubled as long as that saves so much more of all that can be saved."""


@dataclass(frozen=True)
class Size:
    """A tier of this size. hit_share: of blocks asked; saved_s: less computing; ttft_s: on average, computing and
    loading, nothing waiting. writes_day: bytes a day that go to it, and of those that were wanted twice alone."""

    tier: str
    num_bytes: int
    hit_share: float
    saved_s: float
    saved_share: float
    ttft_s: float
    writes_day: float
    second_use_day: float


@dataclass(frozen=True)
class Plan:
    """all_s: to compute everything. most_s: what endless room saves. least_bytes: with which 99 % of that is saved.
    flags: what to start with."""

    requests: int
    span_s: float
    block_size: int
    block_bytes: int
    blocks_asked: int
    blocks: int
    all_s: float
    most_s: float
    ttft_s: float
    least_bytes: int
    sizes: tuple[Size, ...]
    flags: str


def plan(args: argparse.Namespace) -> int:
    load = _read(Path(args.trace))
    token_bytes = args.bytes_per_token or _token_bytes(args.model, args.kv_cache_dtype)
    costs = recompute_costs(load.block_size, args.token_ms / 1e3, args.position_us / 1e6)
    room = max(args.host) if args.host else int(read_machine().usable_memory * 0.5)
    found = make_plan(load, costs, token_bytes, args.host or USUAL[HOST], args.disk or USUAL[DISK], room)
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print("\n".join(_page(found)))
    sys.stdout.flush()
    return 0


def make_plan(
    load: Load, costs: RecomputeCosts, token_bytes: int, host: Sequence[int], disk: Sequence[int], host_room: int
) -> Plan:
    """host_room: bytes of host memory to spend at most."""
    runs = runs_of(load.requests)
    block_bytes = token_bytes * load.block_size
    counts = Counter(block for one in load.requests for block in one.blocks)
    all_s = sum(costs.sum_s(0, len(one.blocks)) for one in load.requests)
    span_s = max(1.0, load.requests[-1].at_s - load.requests[0].at_s)
    num_again = sum(count > 1 for count in counts.values())

    def size(tier: str, num_bytes: int) -> Size:
        num_blocks = num_bytes // block_bytes
        num_hits, saved_s = num_reused(runs, num_blocks), lru_s(runs, costs, num_blocks)
        load_s = num_hits * block_bytes / USUAL_FACTS[tier].bytes_s
        a_day = block_bytes * DAY_S / span_s
        return Size(
            tier, num_bytes, num_hits / counts.total(), saved_s, saved_s / all_s,
            (all_s - saved_s + load_s) / len(load.requests), (counts.total() - num_hits) * a_day, num_again * a_day,
        )  # fmt: skip

    sizes = (*(size(HOST, each) for each in sorted(host)), *(size(DISK, each) for each in sorted(disk)))
    most_s = total_s(runs, costs)
    least = working_set(runs, costs) * block_bytes if most_s else 0
    flags = _flags(runs, costs, block_bytes, least, host_room)
    ttft_s = all_s / len(load.requests)
    return Plan(
        len(load.requests), span_s, load.block_size, block_bytes, counts.total(), load.num_blocks, all_s, most_s,
        ttft_s, least, sizes, flags,
    )  # fmt: skip


def _flags(runs: Sequence[Run], costs: RecomputeCosts, block_bytes: int, least: int, room: int) -> str:
    """All in host memory where it fits; else there as much as pays, and all on disk."""
    if not least:
        return ""
    if least <= room:
        return f"--kv-host {_size(least)}"
    most_s = total_s(runs, costs)
    host = GiB / 4
    while 2 * host <= room:
        more_s = lru_s(runs, costs, 2 * host // block_bytes) - lru_s(runs, costs, host // block_bytes)
        if more_s < ENOUGH * most_s and lru_s(runs, costs, host // block_bytes) > ENOUGH * most_s:
            break
        host *= 2
    return f"--kv-host {_size(host)} --kv-disk DIR:{_size(least)}"


def _size(num_bytes: float) -> str:
    """Rounded up."""
    tenths = -(-int(num_bytes) * 10 // GiB)
    return f"{tenths / 10:g}GiB" if tenths < 100 else f"{-(-int(num_bytes) // GiB)}GiB"


def _read(path: Path) -> Load:
    try:
        load = trace_of(path.name, iter(read_jsonl(path)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} has a row that is not like its first: {error}.", param="trace") from None
    if load is None:
        raise ConfigError(
            f"{path} is no trace that names shared blocks: Mooncake's, agentic coding, ServeGen, or request bodies with"
            " prompt or messages, one JSON object in a line.",
            param="trace",
        )
    if not any(one.blocks for one in load.requests):
        raise ConfigError(f"{path} has no prompt of a whole block of {load.block_size} tokens.", param="trace")
    return load


def _token_bytes(model: str, dtype: str) -> int:
    checkpoint = open_checkpoint(local_model(model))
    try:
        found = model_summary(checkpoint, kv_dtype=KV_CACHE_DTYPES[dtype]).kv_bytes_per_token
    finally:
        checkpoint.close()
    if not found:
        raise ConfigError(f"{model} keeps no KV.", param="model")
    return found


def _page(found: Plan) -> Iterator[str]:
    yield (
        f"{found.requests:,} requests in {found.span_s / 3600:.1f} h; {found.blocks_asked:,} blocks of"
        f" {found.block_size} tokens ({format_bytes(found.block_bytes)}) asked, {found.blocks:,} distinct"
    )
    yield (
        f"computing everything takes {found.all_s:,.0f} s, {found.ttft_s:.2f} s a prompt; endless room saves"
        f" {found.most_s / found.all_s:.1%}, and {format_bytes(found.least_bytes)} nearly all of that"
    )
    yield ""
    rows: list[Sequence[str]] = [
        ("TIER", "SIZE", "HITS", "SAVED", "TTFT", "WRITES/DAY", "IF WANTED TWICE", "OF DISK/DAY")
    ]
    for each in found.sizes:
        writes = "-", "-", "-"
        if each.tier == DISK:
            times = f"{min(each.writes_day, each.second_use_day) / each.num_bytes:.1f}"
            writes = format_bytes(each.writes_day), format_bytes(each.second_use_day), times
        saved = f"{each.saved_share:.1%}"
        rows.append(
            (each.tier, format_bytes(each.num_bytes), f"{each.hit_share:.1%}", saved, f"{each.ttft_s:.2f} s", *writes)
        )
    yield from table(rows)
    yield ""
    yield f"start with: {found.flags}" if found.flags else "nothing is asked for twice: KV tiers would save nothing"
