"""BlockManager by example: sharing, quarantine, eviction order, withdrawal."""

from __future__ import annotations

import pytest

from tokenmill.kv.blocks.manager import BlockManager

KEYS = [bytes([i]) * 16 for i in range(8)]


def published(manager: BlockManager, num_blocks: int, first_key: int = 0) -> list[int]:
    blocks = manager.reserve(num_blocks)
    keys = KEYS[first_key : first_key + num_blocks]
    assert manager.publish(keys, blocks, 0, num_blocks) == num_blocks
    return blocks


def test_a_published_block_is_matchable_at_once_and_after_release() -> None:
    """Blocks can be shared while held, and served from the cache once nobody holds them."""
    manager = BlockManager(4)
    blocks = published(manager, 2)
    assert manager.match(KEYS, 0, 8) == blocks
    assert manager.match(KEYS, 1, 2) == blocks[1:]
    manager.adopt(blocks)
    manager.release(blocks, -1)
    assert (manager.num_free, manager.num_cached, manager.num_held) == (2, 0, 2)
    manager.release(blocks, -1)
    assert (manager.num_free, manager.num_cached, manager.num_held) == (2, 2, 0)
    assert manager.num_cached_among(manager.match(KEYS, 0, 8)) == 2


def test_a_freed_block_is_held_back_until_its_step_has_ended() -> None:
    """A block that a step in flight may touch is neither free nor evictable, but still matchable."""
    manager = BlockManager(3)
    blocks = published(manager, 1) + manager.reserve(1)
    manager.release(blocks, last_step=1)
    assert manager.num_available == 1
    manager.end_step(0)
    assert manager.num_available == 1
    assert manager.match(KEYS, 0, 1) == blocks[:1]
    manager.end_step(1)
    assert (manager.num_free, manager.num_cached) == (2, 1)


def test_the_last_holder_does_not_shorten_the_quarantine() -> None:
    """A shared block waits for the latest step of any sequence that held it."""
    manager = BlockManager(1)
    blocks = published(manager, 1)
    manager.adopt(blocks)
    manager.release(blocks, last_step=5)
    manager.release(blocks, last_step=3)
    manager.end_step(4)
    assert manager.num_available == 0
    manager.end_step(5)
    assert manager.num_available == 1


def test_a_quarantined_block_can_be_adopted_again() -> None:
    """A match during quarantine keeps the block in use when the step ends."""
    manager = BlockManager(1)
    blocks = published(manager, 1)
    manager.release(blocks, last_step=0)
    manager.adopt(manager.match(KEYS, 0, 1))
    manager.end_step(0)
    manager.check([blocks])
    assert manager.num_held == 1


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    """The oldest released chain goes first, from its end; a prefix used again outlives it."""
    manager = BlockManager(4)
    old = published(manager, 2, first_key=0)
    new = published(manager, 2, first_key=2)
    manager.release(old, -1)
    manager.release(new, -1)
    manager.adopt(old[:1])
    manager.release(old[:1], -1)
    assert manager.reserve(3) == [old[1], new[1], new[0]]
    assert manager.match(KEYS, 0, 2) == old[:1]


def test_free_blocks_are_used_before_cached_ones_last_freed_first() -> None:
    """The cache is kept as long as there is anything else; memory touched last is touched next."""
    manager = BlockManager(4)
    kept = published(manager, 1)
    a, b = manager.reserve(2)
    manager.release(kept, -1)
    manager.release([a], -1)
    manager.release([b], -1)
    assert manager.reserve(2) == [b, a]
    assert manager.num_cached == 1


def test_a_second_copy_of_a_block_is_not_published() -> None:
    """Of two equal blocks the first is shared; the second and what follows it stay private until the first is gone."""
    manager = BlockManager(6)
    first = published(manager, 1)
    second = manager.reserve(2)
    assert manager.publish(KEYS, second, 0, 2) == 0
    manager.release(first, -1)
    manager.reserve(4)
    assert manager.publish(KEYS, second, 0, 2) == 2


def test_withdrawn_blocks_cannot_be_matched() -> None:
    """Blocks of a failed step vanish from the tree, held or not, and come back as free ids."""
    manager = BlockManager(4)
    blocks = published(manager, 3)
    manager.release(blocks[2:], -1)
    manager.withdraw(reversed(blocks[1:]))
    assert manager.match(KEYS, 0, 8) == blocks[:1]
    manager.release(blocks[:2], -1)
    assert (manager.num_free, manager.num_cached) == (3, 1)


def test_misuse_is_an_assertion() -> None:
    """Releasing twice and reserving more than there is are programmer errors."""
    manager = BlockManager(2)
    blocks = manager.reserve(1)
    manager.release(blocks, -1)
    with pytest.raises(AssertionError, match="without a reference"):
        manager.release(blocks, -1)
    with pytest.raises(AssertionError, match="available"):
        manager.reserve(3)
