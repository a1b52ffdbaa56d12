"""Which cached block is given up first, by example, in a pool of its own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.core.policy import CachedBlock
from tokenmill.kv.blocks.allocator import LeastValueFirst, unreferenced_for
from tokenmill.kv.blocks.eviction import EVICTIONS, pick
from tokenmill.kv.blocks.manager import BlockManager


@dataclass
class Known:
    """core.policy.Measured."""

    attention: float = 0.0


def prefix(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(num_blocks)]


class Cache:
    """A pool that serves one prompt at a time. lost: blocks that had to be computed."""

    def __init__(self, policy: str, num_blocks: int, attention: float = 0.0) -> None:
        self.manager = BlockManager(num_blocks, 0, unreferenced_for(EVICTIONS[policy], Known(attention)))
        self.lost: list[bytes] = []

    def serve(self, keys: Sequence[bytes]) -> int:
        """Returns the number of blocks that were cached."""
        table = self.manager.match(keys, 0, len(keys))
        self.manager.adopt(table)
        num_cached = len(table)
        table += self.manager.reserve(len(keys) - num_cached)
        assert self.manager.publish(keys, table, num_cached, len(keys)) == len(keys)
        self.lost += keys[num_cached:]
        self.manager.release(table, -1)
        self.manager.check([])
        return num_cached


def serve_all(cache: Cache, prompts: Iterable[Sequence[bytes]]) -> int:
    return sum(cache.serve(keys) for keys in prompts)


def test_lfu_keeps_a_system_prompt_that_lru_loses() -> None:
    """Between the calls of a busy assistant come bursts of long documents, each asked once. Least recently used gives
    the system prompt up in every burst; by frequency it stays from the third call on."""
    system = prefix("system", 8)

    def hits(policy: str) -> int:
        cache, num_cached = Cache(policy, 32), 0
        for turn in range(20):
            num_cached += serve_all(cache, [[*system, f"question {turn} {i}".encode()] for i in range(4)])
            serve_all(cache, [prefix(f"document {turn} {i} ", 12) for i in range(4)])
        return num_cached

    assert hits("lru") == 20 * 3 * 8
    assert hits("lfu") == (20 * 4 - 1) * 8


def test_what_was_popular_once_does_not_stay_for_ever() -> None:
    """Blocks used often long ago are outlived by what is used now: values age."""
    cache = Cache("lfu", 16)
    for _ in range(50):
        cache.serve(prefix("old", 8))
    for turn in range(120):
        cache.serve(prefix("new", 8))
        cache.serve(prefix(f"once {turn} ", 4))
    assert cache.serve(prefix("new", 8)) == 8
    assert cache.serve(prefix("old", 8)) < 8


def test_recompute_seconds_keep_what_is_expensive() -> None:
    """A long prompt and many short ones are used equally often, and do not fit together. Its last blocks cost ten times
    a short one's: they stay, and the seconds spent on computing again are fewer than by age or by count."""
    prompts = [prefix("long", 40), *(prefix(f"short {i} ", 2) for i in range(12))]
    attention = 0.25

    def seconds(policy: str) -> float:
        cache = Cache(policy, 48, attention)
        rng = random.Random(1)
        for _ in range(400):
            cache.serve(rng.choice(prompts))
        depth = {key: index for keys in prompts for index, key in enumerate(keys)}
        return sum(1 + attention * depth[key] for key in cache.lost)

    assert seconds("recompute-seconds") < 0.5 * min(seconds("lru"), seconds("lfu"))


@pytest.mark.parametrize("policy", sorted(EVICTIONS))
def test_leaves_go_first(policy: str) -> None:
    """Whatever a policy values, a block outlives those that hang below it: what is left of a prompt is its start."""
    cache = Cache(policy, 24, 0.1)
    rng = random.Random(policy)
    prompts = [prefix(name, 6)[: rng.randint(1, 6)] + prefix(f"{name} {i} ", 4) for i in range(5) for name in "abc"]
    for _ in range(500):
        keys = rng.choice(prompts)
        found = cache.manager.match(keys, 0, len(keys))
        assert cache.serve(keys) == len(found)  # And BlockManager.check has found every parent in its place.


def test_equal_values_are_least_recently_used() -> None:
    """The heap, which knows only values, gives the order of the queue when all are the same."""
    queue = BlockManager(20)
    heap = BlockManager(20, 0, LeastValueFirst(EVICTIONS["lru"], Known()))
    rng = random.Random(3)
    held: list[list[int]] = []
    for step in range(2000):
        keys = prefix(rng.choice("abcd"), rng.randint(1, 6))
        if held and (rng.random() < 0.5 or queue.num_available < len(keys)):
            table = held.pop(rng.randrange(len(held)))
            for manager in (queue, heap):
                manager.release(table, step)
        else:
            tables = []
            for manager in (queue, heap):
                table = manager.match(keys, 0, len(keys))
                manager.adopt(table)
                table += manager.reserve(len(keys) - len(table))
                manager.publish(keys, table, 0, len(keys))
                tables.append(table)
            assert tables[0] == tables[1]
            held.append(tables[0])
        for manager in (queue, heap):
            manager.end_step(step)
            manager.check(held)
    assert queue.num_cached


def test_the_heap_stays_as_small_as_the_pool() -> None:
    """Blocks that are used and released again and again leave no trace, though nothing is ever evicted."""
    order = LeastValueFirst(EVICTIONS["lfu"], Known())
    manager = BlockManager(8, 0, order)
    table = manager.reserve(1)
    manager.publish([b"key"], table, 0, 1)
    manager.release(table, -1)
    for _ in range(10_000):
        manager.adopt(table)
        manager.release(table, -1)
    assert len(order._leaves) < 100


class OldestFirst:
    """First in, first out."""

    summary = ""

    def value(self, block: CachedBlock, age: float, attention: float) -> float:
        return block.number


def test_a_policy_may_value_blocks_by_their_publication() -> None:
    """By it alone: hits do not count, nor does age, and what is published again is new."""
    manager = BlockManager(4, 0, unreferenced_for(OldestFirst(), Known()))

    def serve(name: str) -> bool:
        """Whether the prompt of one block was cached."""
        table = manager.match([name.encode()], 0, 1)
        was_cached = bool(table)
        manager.adopt(table)
        table += manager.reserve(1 - len(table))
        manager.publish([name.encode()], table, int(was_cached), 1)
        manager.release(table, -1)
        return was_cached

    assert [name for name in "abcdaaeafbgcb" if not serve(name)] == list("abcdeafbgc")


def test_unknown_names_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"eviction_policy must be one of lru, .* Did you mean 'lfu'"):
        pick("lfuu")
