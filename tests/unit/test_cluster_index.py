"""The index of prefixes: what it finds is what engines hold, gaps are noticed, and it is small."""

from __future__ import annotations

import gc
import tracemalloc
from random import Random

import pytest

from tokenmill.cluster.index import STRIDE, PrefixIndex
from tokenmill.core.block import KEY_BYTES
from tokenmill.core.kv_events import CLEARED, REMOVED, STORED, KVEvent, KVEvents
from tokenmill.kv.blocks.manager import BlockManager


def key(*path: int) -> bytes:
    return hash(path).to_bytes(8, "little", signed=True) + len(path).to_bytes(8, "little")


def keys(path: tuple[int, ...]) -> bytes:
    return b"".join(key(*path[: end + 1]) for end in range(len(path)))


def told(link: int, index: PrefixIndex, *events: KVEvent, seq: int = 0) -> bool:
    return index.apply(link, KVEvents(seq, events))


def joined(*links: int) -> PrefixIndex:
    index = PrefixIndex()
    for link in links:
        index.join(link)
        told(link, index, KVEvent(CLEARED))
    return index


def hits(index: PrefixIndex, path: tuple[int, ...]) -> dict[int, int]:
    return {link: level.num_blocks for level in index.levels(keys(path)) for link in level.links}


@pytest.mark.parametrize("seed", range(40))
def test_every_engine_is_found_with_what_it_holds(seed: int) -> None:
    """Random trees of four engines that grow and lose leaves, with requests under way, against a plain search."""
    random = Random(seed)
    index, seqs = joined(0, 1, 2, 3), dict.fromkeys(range(4), 1)
    held: dict[int, set[tuple[int, ...]]] = {link: set() for link in range(4)}
    under_way: list[tuple[int, tuple[int, ...], str]] = []
    paths = [tuple(random.randrange(2) for _ in range(random.randrange(30))) for _ in range(12)]
    for number in range(150):
        link, path = random.randrange(4), random.choice(paths)
        prefixes = [path[: end + 1] for end in range(len(path))]
        choice = random.randrange(6)
        if choice < 2:
            depth = sum(prefix in held[link] for prefix in prefixes)
            held[link] |= set(prefixes)
            parent = key(*path[:depth]) if depth else b""
            event = KVEvent(STORED, keys(path)[depth * KEY_BYTES :], parent, depth)
        elif choice == 2:
            leaves = [
                one
                for one in held[link]
                if not any(len(two) > len(one) and two[: len(one)] == one for two in held[link])
            ]
            gone = random.sample(sorted(leaves), min(3, len(leaves)))
            held[link] -= set(gone)
            event = KVEvent(REMOVED, b"".join(key(*one) for one in gone))
        else:
            if choice == 3 or not under_way:
                under_way.append((link, path, f"r{number}"))
                index.expect(link, f"r{number}", keys(path))
            else:
                _, _, name = under_way.pop(random.randrange(len(under_way)))
                index.settle(name)
            continue
        assert told(link, index, event, seq=seqs[link])
        seqs[link] += 1
        index.check()
        for path in paths:
            wanted = {}
            for link in held:
                expected = [given for other, given, _ in under_way if other == link]
                there = [
                    any(one[: end + 1] == path[: end + 1] for one in expected if len(one) // STRIDE * STRIDE > end)
                    or path[: end + 1] in held[link]
                    for end in range(STRIDE - 1, len(path), STRIDE)
                ]
                if any(there):
                    wanted[link] = STRIDE * max(at + 1 for at, is_there in enumerate(there) if is_there)
            assert hits(index, path) == wanted


def test_who_leaves_holds_nothing_and_what_is_told_of_it_is_not_taken() -> None:
    index, path = joined(0, 1), tuple(range(8))
    for link in (0, 1):
        told(link, index, KVEvent(STORED, keys(path)), seq=1)
    index.leave(0)
    assert told(0, index, KVEvent(STORED, keys(path)), seq=2), "nothing is to be done about it"
    assert hits(index, path) == {1: 8}
    index.leave(1)
    assert not hits(index, path) and not len(index)


def test_after_a_gap_nothing_counts_until_all_has_been_told_again() -> None:
    index, path = joined(0), tuple(range(8))
    told(0, index, KVEvent(STORED, keys(path[:4])), seq=1)
    assert not told(0, index, KVEvent(REMOVED, keys(path[:4])), seq=3), "one is missing: to be asked anew"
    assert told(0, index, KVEvent(STORED, keys(path)), seq=4), "asked already"
    assert hits(index, path) == {0: 4}
    assert told(0, index, KVEvent(CLEARED), KVEvent(STORED, keys(path)), seq=5)
    assert hits(index, path) == {0: 8}
    assert told(0, index, KVEvent(REMOVED, keys(path)[4 * KEY_BYTES :]), seq=6)
    assert hits(index, path) == {0: 4}


def test_before_its_snapshot_an_engine_holds_nothing() -> None:
    index, path = PrefixIndex(), tuple(range(4))
    index.join(0)
    assert told(0, index, KVEvent(STORED, keys(path)), seq=7) and not hits(index, path)


def test_the_events_of_a_tree_tell_what_it_holds() -> None:
    """A pool that runs over: what its listener hears is what it has."""
    heard: dict[bytes, tuple[bytes, int]] = {}

    class Listener:
        def stored(self, key: bytes, parent: bytes, depth: int) -> None:
            assert key not in heard and (not parent or heard[parent][1] == depth - 1)
            heard[key] = parent, depth

        def removed(self, key: bytes) -> None:
            del heard[key]

    random, pool = Random(1), BlockManager(24)
    pool.listeners.append(Listener())
    for _ in range(200):
        path = tuple(random.randrange(2) for _ in range(random.randrange(1, 12)))
        names = [key(*path[: end + 1]) for end in range(len(path))]
        matched = pool.match(names, 0, len(names))
        pool.adopt(matched)
        blocks = [*matched, *pool.reserve(len(names) - len(matched))]
        pool.publish(names, blocks, len(matched), len(names))
        pool.release(blocks, -1)
        assert {name: heard[name] for name in heard} == {
            node.key: (b"" if node.parent is None else node.parent.key, node.depth) for node in pool.nodes()
        }
    assert heard


def test_a_block_that_is_held_takes_less_than_100_bytes() -> None:
    """A thousand engines, a quarter of a million blocks, a third of them held by two."""
    num_links, per_link = 1000, 248
    index = joined(*range(num_links))
    gc.collect()
    tracemalloc.start()
    for link in range(num_links):
        own, shared = tuple(range(link * 1000, link * 1000 + per_link)), link // 2
        if link % 3 == 0:
            own = tuple(range(shared * 1000, shared * 1000 + per_link))
        told(link, index, KVEvent(STORED, keys(own)), seq=1)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_held = sum(index.num_blocks_of(link) for link in range(num_links))
    assert num_held == num_links * per_link
    assert size / num_held < 100, size / num_held
