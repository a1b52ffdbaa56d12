"""split_pools: one budget for two pools, fair to short and to long sequences."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tokenmill.core.block import KVGroupSpec, full_groups, window_group
from tokenmill.core.units import GiB, MiB
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions
from tokenmill.node.resolve import ModelFacts, fewest_window_blocks, longest, resolve, split_pools

SIZE = 16
# Gemma 3 1B: 4 layers that see everything and 22 that see 512 positions, 1 KiB a layer and token.
FULL, LOCAL = 4 * SIZE * 1024, 22 * SIZE * 1024
GEMMA = {"full_block_bytes": FULL, "windows": [(512, LOCAL)]}


def split(pool_bytes: int = GiB, **changes) -> tuple[KVGroupSpec, ...]:
    settings = GEMMA | {"block_size": SIZE, "max_model_len": 32768, "max_num_seqs": 256, "num_in_flight": 1024}
    return split_pools(pool_bytes, **(settings | changes))


def test_short_and_long_sequences_lose_the_same_share():
    """Against a pool made for sequences shorter than the window alone, and one made for the longest alone."""
    full, local = split(num_in_flight=0)
    held = fewest_window_blocks(512, SIZE)
    short = local.num_blocks / (GiB / (FULL + LOCAL))
    long = full.num_blocks / (GiB / (FULL + LOCAL * held / 2048))
    assert short == pytest.approx(long, rel=0.01) and 0.5 < short < 1
    assert full.num_blocks > 3 * GiB // (FULL + LOCAL), "three times the tokens of long sequences in the same memory"


@pytest.mark.parametrize("seed", range(20))
def test_any_split_fits_the_budget_and_holds_a_query(seed: int):
    """Budgets from nothing up, windows and block sizes at random; what is not split is as if there were no windows."""
    rng = random.Random(seed)
    budget = int(2 ** rng.uniform(12, 34))
    shape = {
        "full_block_bytes": rng.choice([0, 1, 4]) * 4096,
        "windows": [(window, rng.choice([1, 5]) * 4096) for window in rng.choice([(), (7,), (512,), (1, 4096)])],
        "block_size": rng.choice([1, 8, 16]),
        "max_model_len": rng.choice([64, 5000, 131072]),
        "max_num_seqs": rng.choice([1, 256]),
    }
    if not shape["windows"]:
        shape["full_block_bytes"] = shape["full_block_bytes"] or 4096
    got = split(budget, **shape)
    together = shape["full_block_bytes"] + sum(num_bytes for _, num_bytes in shape["windows"])
    assert sum(group.bytes_per_block for group in got) == together
    if not any(group.window for group in got):
        assert got == full_groups(budget // together, together)
        return
    assert 0 <= sum(group.num_bytes for group in got) <= budget
    for group in got:
        if group.window:
            assert group.num_blocks >= fewest_window_blocks(group.window, shape["block_size"])
            assert longest(got, shape["block_size"], shape["max_model_len"]) > group.window


def test_the_window_pool_gets_no_more_than_its_sequences_use():
    """With memory in plenty, what few sequences can hold; the rest goes to the other pool."""
    _, local = split(64 * GiB, max_num_seqs=2)
    assert local.num_blocks == 1024 // SIZE + 2 * fewest_window_blocks(512, SIZE)


@pytest.mark.parametrize(("budget", "max_model_len"), [(64 * (FULL + LOCAL), 32768), (GiB, 512), (GiB, 300)])
def test_layers_with_other_heads_never_share_a_pool(budget: int, max_model_len: int):
    """Where nothing is to be split, both pools have as many blocks, and hold whole sequences."""
    (whole,) = split(budget, max_model_len=max_model_len)
    full, local = split(budget, max_model_len=max_model_len, apart={512})
    assert full == full_groups(whole.num_blocks, FULL)[0] and local == window_group(whole.num_blocks, 512, LOCAL)
    assert split(apart={512}) == split()


def test_resolve_prints_both_pools():
    """The settings name the window and its pool, within the budget; a short context needs no second pool."""
    machine = MachineFacts(num_cpus=2, cpu_quota=None, memory_available=8 * GiB, cgroup_headroom=None)
    model = ModelFacts(32768, 26 * 1024, 500 * MiB, windows=((512, 22 * 1024),))
    settings = resolve(EngineOptions(kv_cache_memory_bytes=GiB), machine, model)
    printed = {choice.name: choice.value for choice in settings.decisions}
    full, local = settings.config.groups
    assert local.window == 512 and settings.config.max_model_len == 32768
    assert f"{full.num_blocks} blocks" in printed["kv_cache"]
    assert f"{local.num_blocks} blocks" in printed["kv_window"] and "see 512 tokens" in printed["kv_window"]
    short = resolve(EngineOptions(kv_cache_memory_bytes=GiB, max_model_len=512), machine, model)
    assert short.config.groups == full_groups(GiB // (26 * 1024 * SIZE), 26 * 1024 * SIZE)
    every = dataclasses.replace(model, windows=((512, 26 * 1024),))
    settings = resolve(EngineOptions(kv_cache_memory_bytes=GiB), machine, every)
    assert settings.config.max_model_len == 32768
    assert settings.config.groups == (window_group(short.config.groups[0].num_blocks, 512, 26 * 1024 * SIZE),)
