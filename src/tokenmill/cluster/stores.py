"""Which KV store has which prefix in which tier, as the stores have told, and what it takes to load it. Pure.

    a worker of the store  <-- WatchTiers   one of those that use it, the first to join; another, when that one leaves
                           --> TierEvents   each block once in all, however many workers use the store

A key names all that comes before it: every eighth key is kept, with the tiers that have it. What workers tell counts
only if they have been asked. Messages are numbered without gaps; after a gap, or before the first snapshot, nothing is
taken until one begins with CLEARED. What a store that nobody uses any more held is forgotten.

One index over the pools of all workers and the tiers of all stores: the prompt tree of MemServe (Hu et al., 2024). What
is said here is a hint: a block that is not there any more is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.block import KEY_BYTES, BlockKey, split_keys
from ..core.events import Ready, ToEngine
from ..core.kv_events import CLEARED, REMOVED
from ..core.tiers import PEER, REMOTE, TIERS, USUAL_FACTS, TierEvents, TierFacts, WatchTiers
from .index import Holders, Level, kept
from .links import EngineLink
from .pools import DECODE

STRIDE = 8
"""One block in so many is kept."""
_LOOKS = 8
"""Of a run of blocks, so many slots are looked at."""
_OWN = sum(1 << nth for nth, tier in enumerate(TIERS) if tier not in (REMOTE, PEER))
_REMOTE = 1 << TIERS.index(REMOTE)

Asks = list[tuple[int, ToEngine]]
"""(worker, what it is to be told)."""


class Stop(NamedTuple):
    """Loading may end before block `end` of the prefix, after `load_s`; `tier` is the slowest that takes part."""

    end: int
    load_s: float
    tier: str


@dataclass(slots=True, eq=False)
class _Store:
    """links    workers that use it
    tiers   by place in TIERS; of a store that its workers joined after they had started they are not known
    held    key -> a bit for each tier that has it
    teller  who has been asked to tell; None: nobody
    next    number of the next message; None: a snapshot is awaited
    """

    links: set[int] = field(default_factory=set)
    tiers: dict[int, TierFacts] = field(default_factory=dict)
    held: dict[BlockKey, int] = field(default_factory=dict)
    teller: int | None = None
    next: int | None = None


class Stores:
    """Stores by number; links are workers' numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._stores: dict[int, _Store] = {}
        self._of_link: dict[int, int] = {}
        self._num_stores = 0
        self._holders = Holders(STRIDE)
        self._block_bytes = 0
        self._are_linked = False

    @property
    def is_known(self) -> bool:
        """Whether any store has told of anything."""
        return len(self._holders) > 0

    @property
    def are_linked(self) -> bool:
        """Whether a store may have blocks from elsewhere."""
        return self._are_linked

    def join(self, link: int, ready: Ready) -> Asks:
        """A worker has come, and is to tell of its store if nobody else does."""
        name = ready.worker.kv_store
        if not name or link in self._of_link:
            return []
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._num_stores
            self._stores[number] = _Store()
            self._num_stores += 1
        store = self._stores[number]
        store.links.add(link)
        store.tiers |= {TIERS.index(each.name): each for each in ready.tiers if each.name in TIERS}
        self._are_linked |= any(each.name in (REMOTE, PEER) for each in ready.tiers)
        self._of_link[link] = number
        self._block_bytes = self._block_bytes or ready.block_bytes
        return self._ask(store) if store.teller is None else []

    def leave(self, link: int) -> Asks:
        """A worker has gone; who is to tell in its place."""
        number = self._of_link.pop(link, None)
        if number is None:
            return []
        store = self._stores[number]
        store.links.discard(link)
        if not store.links:
            self._clear(number, store)
            del self._stores[number]
            self._numbers = {name: each for name, each in self._numbers.items() if each != number}
            return []
        return self._ask(store) if store.teller == link else []

    def hear(self, link: int, message: TierEvents) -> Asks:
        """What a worker says of its store; whom to ask anew."""
        number = self._of_link.get(link)
        if number is None or self._stores[number].teller != link:
            return []
        store = self._stores[number]
        if message.events and message.events[0].kind == CLEARED:
            store.next = message.seq
        if store.next is None:
            return []
        if message.seq != store.next:
            return self._ask(store)
        store.next = message.seq + 1
        for event in message.events:
            if event.kind == CLEARED:
                self._clear(number, store)
            elif event.tier in TIERS:
                bit = 1 << TIERS.index(event.tier)
                if event.kind == REMOVED:
                    self._remove(number, store, split_keys(event.keys), bit)
                else:
                    for key in kept(event.keys, event.depth, STRIDE):
                        before = store.held.get(key, 0)
                        store.held[key] = before | bit
                        if not before:
                            self._holders.add(number, key)
        return []

    def can_hand(self, link: EngineLink, others: Iterable[EngineLink]) -> bool:
        """Whether all engines that draw answers find in tiers what this one saves: in its store, or a remote one."""
        worker, is_remote = link.ready.worker, _has_remote(link)
        decodes = [each for each in others if each.pool == DECODE] or [each for each in others if each is not link]
        return bool(worker.kv_store and link.ready.tiers and decodes) and all(
            each.ready.worker.kv_store == worker.kv_store or (is_remote and _has_remote(each)) for each in decodes
        )

    def num_held(self, keys: bytes) -> int:
        """Of a prefix, so many blocks some store holds, as far as is known."""
        return self._holders.num_held(keys)

    def levels(self, keys: bytes) -> list[Level]:
        """Which stores hold how much of a prefix, most first."""
        return self._holders.levels(keys)

    def links_of(self, store: int) -> set[int]:
        return self._stores[store].links

    def store_of(self, link: int) -> int | None:
        return self._of_link.get(link)

    def num_blocks(self) -> dict[str, dict[str, int]]:
        """About so many blocks each store has in each tier; slow, for operators."""
        found = {}
        for name, number in self._numbers.items():
            masks = list(self._stores[number].held.values())
            counts = {tier: STRIDE * sum(mask >> nth & 1 for mask in masks) for nth, tier in enumerate(TIERS)}
            found[name] = {tier: count for tier, count in counts.items() if count}
        return found

    def stops(self, link: int, keys: bytes, start: int) -> tuple[Stop, ...]:
        """Where a load of a prefix by this worker may end, if its pool has the first `start` blocks: after each stretch
        that is in one tier. Blocks of other stores count where its own reaches them, as peers or in a remote store that
        both use."""
        number = self._of_link.get(link)
        if number is None:
            return ()
        store = self._stores[number]
        first, last = start // STRIDE, len(keys) // (STRIDE * KEY_BYTES)
        step = max(1, -(-(last - first) // _LOOKS))
        blocks: dict[int, int] = {}
        stops: list[Stop] = []
        at, before = first, -1
        while at < last:
            end = min(last, at + step)
            tier = self._tier(store, keys[(end * STRIDE - 1) * KEY_BYTES : end * STRIDE * KEY_BYTES])
            if tier < 0 and end - at > 1:  # it ends in between
                step = 1
                continue
            if tier != before and blocks:
                stops.append(self._stop(store, blocks, at * STRIDE))
            if tier < 0:
                return tuple(stops)
            blocks[tier] = blocks.get(tier, 0) + end * STRIDE - max(start, at * STRIDE)
            at, before = end, tier
        if blocks:
            stops.append(self._stop(store, blocks, last * STRIDE))
        return tuple(stops)

    def check(self) -> None:
        """Assert what must hold between calls; slow, for tests."""
        wanted: dict[BlockKey, set[int]] = {}
        for number, store in self._stores.items():
            assert store.links and store.teller in store.links, store
            for key in store.held:
                wanted.setdefault(key, set()).add(number)
        assert self._holders.all() == wanted
        assert set(self._numbers.values()) == set(self._stores)
        assert {link for store in self._stores.values() for link in store.links} == set(self._of_link)

    def _tier(self, store: _Store, key: BlockKey) -> int:
        """The nearest that has a block, by its place; -1: none."""
        mask = store.held.get(key, 0)
        if not mask:
            mask = self._reached(store, key)
        return (mask & -mask).bit_length() - 1

    def _reached(self, store: _Store, key: BlockKey) -> int:
        """As `held`, of a block that only other stores have."""
        mask = 0
        for nth, tier in ((TIERS.index(REMOTE), REMOTE), (TIERS.index(PEER), PEER)):
            if nth in store.tiers:
                for other in self._holders.of(key):
                    there = self._stores[other].held[key]
                    if there & (_REMOTE if tier == REMOTE else _OWN):
                        mask |= 1 << nth
                        break
        return mask

    def _stop(self, store: _Store, blocks: Mapping[int, int], end: int) -> Stop:
        load_s, tier = 0.0, ""
        for nth, count in sorted(blocks.items()):
            tier = TIERS[nth]
            usual = USUAL_FACTS[tier]
            facts = store.tiers.get(nth, usual)
            load_s += facts.latency_s or usual.latency_s
            load_s += count * self._block_bytes / (facts.bytes_s or usual.bytes_s)
        return Stop(end, load_s, tier)

    def _ask(self, store: _Store) -> Asks:
        store.teller, store.next = min(store.links), None
        return [(store.teller, WatchTiers(True))]

    def _clear(self, number: int, store: _Store) -> None:
        for key in store.held:
            self._holders.strike(number, key)
        store.held = {}

    def _remove(self, number: int, store: _Store, keys: Iterable[BlockKey], bit: int) -> None:
        for key in keys:
            before = store.held.get(key)
            if before is None:
                continue
            if after := before & ~bit:
                store.held[key] = after
            else:
                del store.held[key]
                self._holders.strike(number, key)


def _has_remote(link: EngineLink) -> bool:
    return any(each.name == REMOTE for each in link.ready.tiers)
