"""Hot prefixes are copied to further engines, within bounds, and each offer of their KV is released."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenmill.cluster.events import Effects, EngineMessage, GivenUp, Joined, Left, Opened, Stepped, Ticked
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.keys import with_keys
from tokenmill.cluster.replication import HotPrefixes
from tokenmill.core.block import KEY_BYTES
from tokenmill.core.cost import Costs
from tokenmill.core.events import EngineStats, Output, Ready, StepOutputs, WorkerFacts
from tokenmill.core.kv_events import CLEARED, STORED, KVEvent, KVEvents
from tokenmill.core.moves import Offer, Prefetch, Prefetched, Release
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.tiers import HOST, TierEvent, TierEvents, TierFacts

BLOCK, NUM_PREFIX = 16, 64
COSTS = Costs(step_s=1e-2, row_s=1e-5, token_s=1e-4)
READY = Ready("m", 2**20, 100, (2,), "id", BLOCK, 10_000, max_num_seqs=16, max_num_batched_tokens=512,
              stats=EngineStats(costs=COSTS))  # fmt: skip


class Scene:
    """A gateway whose first engine has a prefix of 1,024 tokens cached."""

    def __init__(self, num_engines: int, **facts: object) -> None:
        tickets = iter(range(1000))
        self.gateway = Gateway(new_ticket=lambda: f"t{next(tickets)}")
        self.gateway.router.choose_by("prefix_affinity")
        self.gateway.reviews.replication = HotPrefixes()
        self.offers: dict[str, int] = {}
        self.copies: list[tuple[int, int, int]] = []
        self.num_requests = 0
        for number in range(num_engines):
            worker = WorkerFacts(f"w{number}", "life", 1, "mixed", "here", f"kv{number}")
            self.handle(Joined(number, replace(READY, worker=worker, **facts)), 0.0)  # type: ignore[arg-type]
        for number in range(num_engines):
            self.handle(EngineMessage(number, KVEvents(0, (KVEvent(CLEARED),))), 0.0)
        self.keys = self.request("a").keys[: NUM_PREFIX * KEY_BYTES]
        self.handle(EngineMessage(0, KVEvents(1, (KVEvent(STORED, self.keys),))), 0.0)

    def request(self, prefix: str) -> Request:
        self.num_requests += 1
        prompt = (*(ord(prefix),) * (NUM_PREFIX * BLOCK), *(1000 * self.num_requests + each for each in range(200)))
        made = Request(f"r{self.num_requests}", prompt, SamplingParams(), 64, seed=1)
        return with_keys([made], READY)[0]

    def handle(self, event: object, now: float) -> Effects:
        effects = self.gateway.handle(event, now)  # type: ignore[arg-type]
        self.gateway.check()
        for link, message in effects.tells:
            if isinstance(message, Offer):
                self.offers[message.ticket] = link
            elif isinstance(message, Release):
                assert self.offers.pop(message.ticket) == link, "released once, by its engine"
            elif isinstance(message, Prefetch):
                assert b"".join(message.keys) == self.keys
                source = message.source
                assert source is None or source.ticket in self.offers
                self.copies.append((message.number, -1 if source is None else self.offers[source.ticket], link))
        return effects

    def ask(self, per_s: float, for_s: float = 3.0, begun_s: float = 0.0, num_open: int = 2) -> Effects:
        """So many requests a second for the prefix, and so many of them open at a time."""
        effects = Effects()
        for number in range(int(per_s * for_s)):
            now = begun_s + number / per_s
            effects = self.handle(Opened([self.request("a")]), now)
            due_s = self.gateway.next_due_s
            if due_s is not None and due_s <= now:
                effects = self.handle(Ticked(), now)
            entries = list(self.gateway._entries.values())
            if len(entries) > num_open:
                output = Output(entries[0].request.id, (5,), num_output=1, finish_reason="stop")
                assert entries[0].link is not None
                stats = self.gateway._links[entries[0].link].stats
                self.handle(Stepped(entries[0].link, StepOutputs((output,), stats, now)), now)
        return effects


def test_a_prefix_that_is_asked_for_more_than_its_engine_can_serve_is_copied_once_to_an_idle_one() -> None:
    scene = Scene(2)
    scene.ask(8.0)
    ((number, source, target),) = scene.copies
    assert (source, target) == (0, 1) and list(scene.offers.values()) == [0]
    effects = scene.handle(EngineMessage(1, Prefetched(number, NUM_PREFIX)), 3.0)
    ((copied_from, copied_to, num_tokens, error, _),) = effects.copied
    assert (copied_from, copied_to, num_tokens, error) == (0, 1, NUM_PREFIX * BLOCK, "") and not scene.offers
    scene.handle(EngineMessage(1, KVEvents(1, (KVEvent(STORED, scene.keys),))), 3.0)
    scene.ask(8.0, begun_s=4.0)
    assert len(scene.copies) == 1, "all that could have it have it"
    assert not scene.handle(EngineMessage(1, Prefetched(number, NUM_PREFIX)), 9.0).copied, "said once"


def test_a_prefix_that_its_engine_can_serve_is_not_copied() -> None:
    scene = Scene(2)
    scene.ask(0.5, 40.0)
    assert not scene.copies


@pytest.mark.parametrize("why", ["room", "address", "cheap", "pool", "unknown"])
def test_nothing_is_copied_where_it_would_not_fit_or_could_not_be_had_or_is_not_worth_it(why: str) -> None:
    facts: dict[str, object] = {"room": {"num_blocks": 8 * NUM_PREFIX - 1}, "unknown": {"stats": EngineStats()}}.get(
        why, {}
    )
    if why == "cheap":
        facts = {"stats": EngineStats(costs=COSTS._replace(token_s=1e-7))}
    scene = Scene(2, **facts)
    for link in scene.gateway._links.values():
        if why == "address":
            link.ready = replace(link.ready, worker=link.ready.worker._replace(kv_address=""))
        if why == "pool" and link.number:
            link.pool = "decode"
    scene.ask(8.0)
    assert not scene.copies


def test_a_copy_is_released_when_its_target_goes_and_when_it_takes_too_long_and_not_by_a_source_that_has_gone() -> None:
    for how in ("target", "time", "source"):
        scene = Scene(2)
        scene.ask(8.0)
        ((number, _, _),) = scene.copies
        if how == "target":
            effects = scene.handle(Left(1), 3.0)
        elif how == "time":
            effects = scene.handle(Ticked(), 40.0)
        else:
            scene.handle(Left(0), 3.0)
            scene.offers.clear()
            effects = scene.handle(EngineMessage(1, Prefetched(number, 0, "w0 is gone")), 3.0)
        assert len(effects.copied) == 1 and effects.copied[0].error and not scene.offers
        assert not len(scene.gateway._placing.copies)


def test_a_prefix_spreads_from_one_engine_to_the_next_as_far_as_it_is_asked_for() -> None:
    scene, answered = Scene(5), 0
    for number in range(100):
        now = number / 10
        scene.ask(30.0, 0.1, now, num_open=12)
        for copy, _, target in scene.copies[answered:]:
            scene.handle(EngineMessage(target, Prefetched(copy, NUM_PREFIX)), now + 0.1)
            scene.handle(EngineMessage(target, KVEvents(1, (KVEvent(STORED, scene.keys),))), now + 0.1)
        answered = len(scene.copies)
    assert sorted(target for _, _, target in scene.copies) == [1, 2, 3, 4]


def test_copies_that_take_longer_than_to_compute_the_prefix_are_not_made_again() -> None:
    scene = Scene(5)
    scene.ask(30.0, 2.0, num_open=12)
    ((number, _, target),) = scene.copies
    scene.handle(EngineMessage(target, Prefetched(number, NUM_PREFIX)), 2.0)
    scene.handle(EngineMessage(target, KVEvents(1, (KVEvent(STORED, scene.keys),))), 2.0)
    scene.ask(30.0, 6.0, 4.0, num_open=12)
    assert len(scene.copies) == 1


def test_a_copy_that_fails_is_not_tried_again_at_once_and_counts_end_with_requests() -> None:
    scene = Scene(2)
    scene.ask(8.0)
    ((number, _, _),) = scene.copies
    assert scene.handle(EngineMessage(1, Prefetched(number, 0, "There is no room for it.")), 3.0).copied[0].error
    scene.ask(8.0, 10.0, 4.0)
    assert len(scene.copies) == 1
    scene.ask(8.0, 10.0, 40.0)
    assert len(scene.copies) == 2
    for name in list(scene.gateway._entries):
        scene.handle(GivenUp(name, "abort"), 60.0)
    scene.handle(Ticked(), 100.0)
    assert not scene.gateway._placing.copies.is_wanted and not scene.offers


@pytest.mark.parametrize("how", ["no address", "sooner", "later", "half"])
def test_a_hot_prefix_comes_from_the_tiers_of_the_target_where_that_is_sooner(how: str) -> None:
    scene = Scene(2, tiers=(TierFacts(HOST, 1 << 30, 1e-4 if how != "later" else 1.0),))
    gateway = scene.gateway
    for link in gateway._links.values():
        worker = link.ready.worker._replace(kv_store=f"s{link.number}")
        link.ready = replace(link.ready, worker=worker._replace(kv_address="" if how == "no address" else "somewhere"))
        gateway.router.stores.join(link.number, link.ready)
    keys = scene.keys[: len(scene.keys) // (2 if how == "half" else 1)]
    scene.handle(EngineMessage(1, TierEvents(0, (TierEvent(CLEARED), TierEvent(STORED, HOST, keys)))), 0.0)
    scene.ask(8.0)
    ((number, source, target),) = scene.copies
    assert (source, target) == ((-1, 1) if how in ("no address", "sooner") else (0, 1))
    effects = scene.handle(EngineMessage(1, Prefetched(number, NUM_PREFIX)), 3.0)
    ((copied_from, copied_to, num_tokens, error, _),) = effects.copied
    assert (copied_from, copied_to) == (None if source < 0 else 0, 1)
    assert (num_tokens, error) == (NUM_PREFIX * BLOCK, "") and not scene.offers
