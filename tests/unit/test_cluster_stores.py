"""What is known of the tiers of KV stores is what they told, each once, and requests go where loading is soonest."""

from __future__ import annotations

from random import Random

import pytest

from tokenmill.cluster.entry import Entry
from tokenmill.cluster.index import PrefixIndex
from tokenmill.cluster.keys import with_keys
from tokenmill.cluster.kv_aware import KVAware
from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.router import Router
from tokenmill.cluster.stores import STRIDE, Stores
from tokenmill.core.block import KEY_BYTES
from tokenmill.core.cost import Costs
from tokenmill.core.events import EngineStats, Ready, WorkerFacts
from tokenmill.core.kv_events import CLEARED, REMOVED, STORED, KVEvent, KVEvents, WatchKV
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.tiers import DISK, HOST, PEER, REMOTE, USUAL_FACTS, TierEvent, TierEvents, TierFacts, WatchTiers

BLOCK = 4
COSTS = Costs(step_s=1e-3, row_s=1e-5, token_s=1e-4, position_s=1e-9, context_s=1e-9)
FACTS = (TierFacts(HOST, 1 << 30, 1e-4, 1e9), TierFacts(DISK, 1 << 40, 1e-3, 1e8))
BLOCK_BYTES = 10_000


def ready(store: str, tiers: tuple[TierFacts, ...] = FACTS) -> Ready:
    worker = WorkerFacts(id="w", kv_store=store)
    return Ready(
        "m", 2**20, 100, (2,), "id", BLOCK, 0, worker=worker, tiers=tiers, block_bytes=BLOCK_BYTES, max_num_seqs=8,
        max_num_batched_tokens=256,
    )  # fmt: skip


def prefix(num_blocks: int, name: int = 0) -> bytes:
    return Random(name).randbytes(num_blocks * KEY_BYTES)


def stored(tier: str, keys: bytes, depth: int = 0) -> TierEvent:
    return TierEvent(STORED, tier, keys, b"", depth)


class EngineMessage:
    """Stores whose workers say what they are asked."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.seqs: dict[int, int] = {}

    def say(self, link: int, *events: TierEvent) -> None:
        seq = self.seqs.get(link, 0)
        if not seq:
            events = (TierEvent(CLEARED), *events)
        assert self.stores.hear(link, TierEvents(seq, events)) == []
        self.seqs[link] = seq + 1
        self.stores.check()


def held(stores: Stores, keys: bytes) -> dict[int, int]:
    return {store: level.num_blocks for level in stores.levels(keys) for store in level.links}


def test_one_worker_of_a_store_tells_and_another_when_it_has_gone() -> None:
    stores = Stores()
    assert stores.join(0, ready("a")) == [(0, WatchTiers(True))]
    assert stores.join(1, ready("a")) == [] and stores.join(2, ready("b")) == [(2, WatchTiers(True))]
    assert stores.join(3, ready("")) == [], "it has no store"
    told, keys = EngineMessage(stores), prefix(16)
    told.say(0, stored(HOST, keys))
    assert stores.hear(1, TierEvents(0, (TierEvent(CLEARED),))) == [] and held(stores, keys) == {0: 16}, "not asked"
    assert stores.leave(0) == [(1, WatchTiers(True))]
    assert held(stores, keys) == {0: 16}, "it is what is known until the next one has told"
    told.say(1, stored(DISK, keys[: 8 * KEY_BYTES]))
    assert held(stores, keys) == {0: 8} and stores.num_blocks() == {"a": {DISK: 8}, "b": {}}
    assert stores.leave(1) == [] and not stores.is_known and stores.leave(3) == []
    stores.check()


def test_after_a_gap_all_is_told_again() -> None:
    stores = Stores()
    stores.join(0, ready("a"))
    told, keys = EngineMessage(stores), prefix(8)
    told.say(0, stored(HOST, keys))
    assert stores.hear(0, TierEvents(5, (TierEvent(REMOVED, HOST, keys),))) == [(0, WatchTiers(True))]
    assert stores.hear(0, TierEvents(6, (TierEvent(REMOVED, HOST, keys),))) == [] and held(stores, keys) == {0: 8}
    assert stores.hear(0, TierEvents(7, (TierEvent(CLEARED),))) == [] and not stores.is_known
    stores.check()


def test_a_block_is_there_until_its_last_tier_has_given_it_up() -> None:
    stores = Stores()
    stores.join(0, ready("a"))
    told, keys = EngineMessage(stores), prefix(24)
    told.say(0, stored(HOST, keys), stored(DISK, keys[: 16 * KEY_BYTES]), stored("tape", prefix(8, 1)))
    told.say(0, TierEvent(REMOVED, HOST, keys[8 * KEY_BYTES :]))
    assert held(stores, keys) == {0: 16} and not held(stores, prefix(8, 1))
    host, disk = stores.stops(0, keys[: 16 * KEY_BYTES], 0)
    assert (host.end, host.tier, disk.end, disk.tier) == (8, HOST, 16, DISK)
    assert host.load_s == pytest.approx(1e-4 + 8 * BLOCK_BYTES / 1e9)
    assert disk.load_s == pytest.approx(host.load_s + 1e-3 + 8 * BLOCK_BYTES / 1e8)
    (alone,) = stores.stops(0, keys[: 16 * KEY_BYTES], 10)
    assert alone.end == 16 and alone.load_s == pytest.approx(1e-3 + 6 * BLOCK_BYTES / 1e8)
    assert stores.stops(0, keys[: 16 * KEY_BYTES], 16) == () == stores.stops(9, keys, 0)


def test_loads_from_tiers_that_have_said_nothing_of_themselves_are_not_free() -> None:
    """A worker that joined its store late has said nothing when it began, and takes nothing from what others said."""
    keys = prefix(8)
    for tiers in ((), (TierFacts(HOST, 1 << 30),)):
        stores = Stores()
        stores.join(0, ready("a", tiers))
        EngineMessage(stores).say(0, stored(HOST, keys))
        (stop,) = stores.stops(0, keys, 0)
        usual = USUAL_FACTS[HOST]
        assert stop.load_s == pytest.approx(usual.latency_s + 8 * BLOCK_BYTES / usual.bytes_s) and stop.load_s > 0
    stores.join(1, ready("a"))
    stores.join(2, ready("a", ()))
    (stop,) = stores.stops(2, keys, 0)
    assert stop.load_s == pytest.approx(1e-4 + 8 * BLOCK_BYTES / 1e9)


def test_what_other_stores_have_counts_where_they_are_reached() -> None:
    stores = Stores()
    far = (*FACTS, TierFacts(REMOTE, 0, 5e-3, 5e7), TierFacts(PEER, 0, 2e-3, 1e8))
    for link, tiers in enumerate((far, far, FACTS)):
        stores.join(link, ready("abc"[link], tiers))
    told, keys, other = EngineMessage(stores), prefix(16), prefix(16, 1)
    told.say(0, stored(HOST, keys), stored(REMOTE, other))
    told.say(1, stored(HOST, keys[: 8 * KEY_BYTES]))
    host, peer = stores.stops(1, keys, 0)
    assert (host.end, host.tier, peer.end, peer.tier) == (8, HOST, 16, PEER)
    (remote,) = stores.stops(1, other, 0)
    assert (remote.end, remote.tier) == (16, REMOTE)
    assert stores.stops(2, keys, 0) == () == stores.stops(2, other, 0), "it reaches neither"


@pytest.mark.parametrize("num_blocks", (8, 104, 1000))
def test_the_end_of_a_long_prefix_is_found_to_the_block_that_is_kept(num_blocks: int) -> None:
    stores = Stores()
    stores.join(0, ready("a"))
    keys = prefix(2000)
    EngineMessage(stores).say(0, stored(DISK, keys[: num_blocks * KEY_BYTES]))
    assert [stop.end for stop in stores.stops(0, keys, 0)] == [num_blocks // STRIDE * STRIDE]


class Scene:
    """Engines, two of each machine, and what their stores have told."""

    def __init__(self, num_stores: int, tiers: tuple[TierFacts, ...] = FACTS) -> None:
        self.index, self.stores = PrefixIndex(), Stores()
        self.policy = KVAware(self.index, self.stores)
        self.told = EngineMessage(self.stores)
        self.links: dict[int, EngineLink] = {}
        self.number = 0
        for number in range(2 * num_stores):
            facts = ready(f"s{number // 2}", tiers)
            self.links[number] = EngineLink(number, facts, "mixed", EngineStats(costs=COSTS))
            self.index.join(number)
            self.index.apply(number, KVEvents(0, (KVEvent(CLEARED),)))
            self.stores.join(number, facts)

    def request(self, prompt: tuple[int, ...]) -> Request:
        self.number += 1
        made = Request(f"r{self.number}", prompt, SamplingParams(), 8, 0)
        return with_keys([made], self.links[0].ready)[0]

    def give(self, link: int, num_tokens: int) -> None:
        self.links[link].give(Entry(self.request(tuple(range(5000, 5000 + num_tokens)))), 0)


def test_a_request_goes_to_a_machine_whose_store_has_its_prefix_unless_waiting_there_takes_longer() -> None:
    scene = Scene(3)
    request = scene.request(tuple(range(4096)))
    scene.told.say(2, stored(HOST, request.keys))
    route = scene.policy.choose(request, scene.links, 0.0)
    assert (route.link.number, route.reason, route.num_hit) == (2, HOST, 4095)
    scene.give(2, 64)
    route = scene.policy.choose(request, scene.links, 0.0)
    assert (route.link.number, route.reason) == (3, HOST), "the other worker of that store is idle"
    for link in (2, 3):
        scene.give(link, 20_000)
    route = scene.policy.choose(request, scene.links, 0.0)
    assert (route.link.number, route.reason, route.num_hit) == (0, "load", 0)


def test_what_takes_longer_to_load_than_to_compute_is_not_waited_for() -> None:
    slow = (TierFacts(HOST, 1 << 30, 1e-4, 1e9), TierFacts(DISK, 1 << 40, 1e-3, 1e6))
    scene = Scene(2, slow)
    request = scene.request(tuple(range(2048)))
    scene.told.say(2, stored(DISK, request.keys), stored(HOST, request.keys[: 256 * KEY_BYTES]))
    route = scene.policy.choose(request, scene.links, 0.0)
    assert (route.link.number, route.reason, route.num_hit) == (2, HOST, 1024), "the rest is computed"


def test_a_pool_that_has_it_comes_before_a_store_that_has_it() -> None:
    scene = Scene(2)
    request = scene.request(tuple(range(1024)))
    scene.told.say(2, stored(HOST, request.keys))
    scene.index.apply(1, KVEvents(1, (KVEvent(STORED, request.keys),)))
    route = scene.policy.choose(request, scene.links, 0.0)
    assert (route.link.number, route.reason) == (1, "prefix")


@pytest.mark.parametrize("seed", range(40))
def test_no_engine_would_have_been_sooner(seed: int) -> None:
    """Random loads, pools and tiers of up to six machines, against scoring every engine and every end of a load."""
    random = Random(seed)
    scene = Scene(random.choice((1, 2, 6)), random.choice((FACTS, (*FACTS, TierFacts(PEER, 0, 2e-3, 2e8)))))
    base = tuple(range(1200))
    for number in scene.links:
        if random.random() < 0.6:
            scene.give(number, random.randrange(1, 3000))
        if random.random() < 0.3:
            keys = scene.request(base[: random.randrange(64, 1200)]).keys
            scene.index.apply(number, KVEvents(1, (KVEvent(STORED, keys),)))
    for store in range(len(scene.links) // 2):
        events = [
            stored(tier, scene.request(base[: random.randrange(64, 1200)]).keys)
            for tier in (HOST, DISK)
            if random.random() < 0.6
        ]
        scene.told.say(2 * store, *events)
    request = scene.request((*base[: random.randrange(300, 1200)], *range(3000, 3100)))
    route = scene.policy.choose(request, scene.links, 0.0)
    num_tokens, best_s = len(request.prompt_tokens), scene.policy.score_all(request, scene.links).cost_s
    hits = {number: level.num_blocks for level in scene.index.levels(request.keys) for number in level.links}
    for number in scene.links:
        for stop in scene.stores.stops(number, request.keys, hits.get(number, 0)):
            cost_s = scene.policy._score(number, min(stop.end * BLOCK, num_tokens - 1), num_tokens).cost_s + stop.load_s
            best_s = min(best_s, cost_s)
    chosen = scene.policy._score(route.link.number, route.num_hit, num_tokens).cost_s
    if route.reason in (HOST, DISK, PEER):
        start = hits.get(route.link.number, 0)
        stops = scene.stores.stops(route.link.number, request.keys, start)
        chosen += next(stop.load_s for stop in stops if min(stop.end * BLOCK, num_tokens - 1) == route.num_hit)
    assert chosen == pytest.approx(best_s)


def test_stores_are_asked_where_there_is_a_choice_of_engines() -> None:
    links = Scene(2).links
    router = Router("kv_aware")
    assert router.join({0: links[0]}) == []
    asks = router.join({number: links[number] for number in (0, 1)})
    assert asks == [(0, WatchKV(True)), (1, WatchKV(True)), (0, WatchTiers(True))]
    assert router.join(links) == [(2, WatchKV(True)), (3, WatchKV(True)), (2, WatchTiers(True))]
    assert router.leave(0) == [(1, WatchTiers(True))]
    assert Router("least_load").join(links) == []

    assert router.hear(3, TierEvents(0, (TierEvent(CLEARED),))) == []
