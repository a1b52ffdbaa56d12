"""What a store tells of its blocks reaches the front ends that asked, each of them once, and never the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tokenmill.core.events import Drain
from tokenmill.core.kv_events import CLEARED, STORED
from tokenmill.core.tiers import HOST, TierEvent, TierEvents, WatchTiers
from tokenmill.engine.build import local_link
from tokenmill.kv.events.relay import MOST_BEHIND, TierEventRelay

FIRST = TierEvent(STORED, HOST, b"k" * 16)


class Store:
    """The client's side: who hears, and how often it was asked to tell all."""

    def __init__(self) -> None:
        self.hear: Callable[[TierEvents], None] | None = None
        self.num_asked = self.seq = 0

    def watch(self, hear: Callable[[TierEvents], None] | None) -> None:
        self.hear = hear
        if hear is not None:
            self.num_asked += 1
            self.tell(TierEvent(CLEARED), FIRST)

    def tell(self, *events: TierEvent) -> None:
        assert self.hear is not None
        self.hear(TierEvents(self.seq, events))
        self.seq += 1


def test_two_front_ends_hear_the_same_and_the_engine_nothing() -> None:
    async def main() -> None:
        store = Store()
        relay = TierEventRelay(store.watch)
        (end_a, front_a), (end_b, front_b) = local_link(), local_link()
        over_a, over_b = relay.over(end_a), relay.over(end_b)
        await front_a.send(WatchTiers(True))
        await front_a.send(Drain())
        assert await over_a.receive() == Drain()
        assert await front_a.receive() == TierEvents(0, (TierEvent(CLEARED), FIRST))
        await front_b.send(WatchTiers(True))
        await front_b.send(Drain())
        assert await over_b.receive() == Drain()
        store.tell(FIRST)
        for front in (front_a, front_b):
            assert await front.receive() == TierEvents(1, (TierEvent(CLEARED), FIRST))
            assert await front.receive() == TierEvents(2, (FIRST,))
        front_a.close()
        with pytest.raises(EOFError):
            await over_a.receive()
        store.tell(FIRST)
        assert await front_b.receive() == TierEvents(3, (FIRST,))
        await front_b.send(WatchTiers(False))
        await front_b.send(Drain())
        await over_b.receive()
        assert store.hear is None and store.num_asked == 2

    asyncio.run(main())


def test_who_does_not_read_finds_a_gap_in_the_numbers() -> None:
    async def main() -> None:
        store = Store()
        end, front = local_link()
        over = TierEventRelay(store.watch).over(end)
        await front.send(WatchTiers(True))
        await front.send(Drain())
        await over.receive()
        for _ in range(MOST_BEHIND):  # the writer has had no turn yet
            store.tell(FIRST)
        first = await front.receive()
        assert isinstance(first, TierEvents) and first.seq == MOST_BEHIND
        over.close()

    asyncio.run(main())


def test_a_worker_without_a_store_tells_nothing() -> None:
    async def main() -> None:
        end, front = local_link()
        over = TierEventRelay().over(end)
        await front.send(WatchTiers(True))
        await front.send(Drain())
        assert await over.receive() == Drain()
        over.close()

    asyncio.run(main())
