"""split_pools: one budget for two pools, fair to short and to long sequences."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tokenmill.core.units import GiB, MiB
from tokenmill.node.machine import MachineFacts
from tokenmill.node.pools import PoolSplit, fewest_window_blocks, split_pools
from tokenmill.node.resolve import EngineOptions, ModelFacts, resolve

SIZE = 16
# Gemma 3 1B: 4 layers that see everything and 22 that see 512 positions, 1 KiB a layer and token.
GEMMA = {"full_block_bytes": 4 * SIZE * 1024, "window_block_bytes": 22 * SIZE * 1024, "window": 512}


def split(pool_bytes: int = GiB, **changes) -> PoolSplit:
    settings = GEMMA | {"block_size": SIZE, "max_model_len": 32768, "max_num_seqs": 256, "num_in_flight": 1024}
    return split_pools(pool_bytes, **(settings | changes))


def test_short_and_long_sequences_lose_the_same_share():
    """Against a pool made for sequences shorter than the window alone, and one made for the longest alone."""
    full, local = GEMMA["full_block_bytes"], GEMMA["window_block_bytes"]
    got = split(num_in_flight=0)
    held = fewest_window_blocks(512, SIZE)
    short = got.num_window_blocks / (GiB / (full + local))
    long = got.num_blocks / (GiB / (full + local * held / 2048))
    assert short == pytest.approx(long, rel=0.01) and 0.5 < short < 1
    assert got.num_blocks > 3 * GiB // (full + local), "three times the tokens of long sequences in the same memory"


@pytest.mark.parametrize("seed", range(20))
def test_any_split_fits_the_budget_and_holds_a_query(seed: int):
    """Budgets from nothing up, windows and block sizes at random; what is not split is as if there were no windows."""
    rng = random.Random(seed)
    budget = int(2 ** rng.uniform(12, 34))
    shape = {
        "full_block_bytes": rng.choice([0, 1, 4]) * 4096,
        "window_block_bytes": rng.choice([0, 1, 5]) * 4096,
        "window": rng.choice([1, 7, 512, 4096]),
        "block_size": rng.choice([1, 8, 16]),
        "max_model_len": rng.choice([64, 5000, 131072]),
        "max_num_seqs": rng.choice([1, 256]),
    }
    if not shape["full_block_bytes"] + shape["window_block_bytes"]:
        shape["full_block_bytes"] = 4096
    got = split(budget, **shape)
    both = shape["full_block_bytes"] + shape["window_block_bytes"]
    if not got.window:
        assert got == PoolSplit(budget // both)
        return
    used = got.num_blocks * shape["full_block_bytes"] + got.num_window_blocks * shape["window_block_bytes"]
    assert 0 <= used <= budget
    assert got.num_window_blocks >= fewest_window_blocks(shape["window"], shape["block_size"])
    assert got.longest(shape["block_size"], shape["max_model_len"]) > shape["window"]


def test_the_window_pool_gets_no_more_than_its_sequences_use():
    """With memory in plenty, what few sequences can hold; the rest goes to the other pool."""
    got = split(64 * GiB, max_num_seqs=2)
    assert got.num_window_blocks == 1024 // SIZE + 2 * fewest_window_blocks(512, SIZE)


def test_resolve_prints_both_pools():
    """The settings name the window and its pool, within the budget; a short context needs no second pool."""
    machine = MachineFacts(num_cpus=2, cpu_quota=None, memory_available=8 * GiB, cgroup_headroom=None)
    model = ModelFacts(32768, 26 * 1024, 500 * MiB, window=512, window_bytes_per_token=22 * 1024)
    settings = resolve(EngineOptions(kv_cache_memory_bytes=GiB), machine, model)
    printed = {choice.name: choice.value for choice in settings.choices}
    assert settings.window == 512 and settings.max_model_len == 32768
    assert f"{settings.num_blocks} blocks" in printed["kv_cache"]
    assert f"{settings.num_window_blocks} blocks" in printed["kv_window"] and "see 512 tokens" in printed["kv_window"]
    short = resolve(EngineOptions(kv_cache_memory_bytes=GiB, max_model_len=512), machine, model)
    assert (short.window, short.num_window_blocks) == (0, 0)
    assert short.num_blocks == GiB // (26 * 1024 * SIZE)
    local = dataclasses.replace(model, window_bytes_per_token=26 * 1024)
    every = resolve(EngineOptions(kv_cache_memory_bytes=GiB), machine, local)
    assert (every.num_blocks, every.max_model_len) == (0, 32768) and every.num_window_blocks == short.num_blocks
