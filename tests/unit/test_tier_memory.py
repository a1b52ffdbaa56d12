"""What the index of a tier costs: at most a thousandth of the bytes that it is about."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from tokenmill.core.tiers import DISK, BlockFacts, TierEntry
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.kv.tiers.manager import TierManager
from tokenmill.kv.tiers.policies import REPLACEMENTS

BLOCK_BYTES = 368_640
"""16 tokens of SmolLM2-135M in f32."""

NUM_BLOCKS = 44_000
"""16 GB; more than two thirds of 2**16, so that the table has just grown, which is the worst case."""


def entries(rng: random.Random) -> Iterator[TierEntry]:
    """As a disk tells them: prompts of 250 blocks, each value an object of its own."""
    parent = b""
    for nth in range(NUM_BLOCKS):
        facts = BlockFacts((0, rng.randbytes(16)), parent if nth % 250 else b"", nth % 250, "")
        yield TierEntry(facts, nth, rng.getrandbits(63))
        parent = bytes(bytearray(facts.block[1]))


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("policy", sorted(REPLACEMENTS))
def test_the_index_is_small(policy: str) -> None:
    """The policy's share included."""
    config = TierConfig(
        "n", (BLOCK_BYTES,), 64 * BLOCK_BYTES, (DISK,), NUM_BLOCKS * BLOCK_BYTES, policies={DISK: policy}
    )
    manager = TierManager(config)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        manager.contents.open_disk(entries(random.Random(1)), 0.0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manager.contents.disk is not None and manager.contents.disk.num_blocks == NUM_BLOCKS
    assert (after - before) / NUM_BLOCKS <= BLOCK_BYTES / 1000
