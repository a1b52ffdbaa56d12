"""Virtual tiers are tiers: they keep what they are given, take their time, survive a crash, and go wrong as asked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tokenmill.core.tiers import NO_PLACE, BlockFacts, DropFrom, LoadFrom, LookIn, SaveTo, Tier, TierEntry
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.tiers import GARBAGE, NO_FAULTS, Medium, Pace, TierFaults, VirtualTier

BLOCK = 1000


def facts_of(number: int) -> BlockFacts:
    return BlockFacts((0, b"key %d" % number), depth=number)


def medium_of(num_blocks: int = 100, **more: Any) -> Medium:
    return Medium(num_blocks * BLOCK, (BLOCK,), **more)


def saving(*numbers: int) -> SaveTo:
    return SaveTo(0, "disk", tuple((facts_of(number), number * 4096, 100 + number) for number in numbers))


def loading(places: dict[int, int]) -> LoadFrom:
    blocks = ((facts_of(number).block, place, (50 + number) * 4096) for number, place in places.items())
    return LoadFrom(1, "disk", tuple(blocks))


def tier_of(medium: Medium, faults: TierFaults = NO_FAULTS) -> tuple[VirtualTier, dict[int, Any]]:
    arena: dict[int, Any] = {number * 4096: f"bytes {number}" for number in range(10)}
    return VirtualTier(medium, arena, random.Random(1), faults), arena


def test_it_loads_what_it_saved_and_forgets_what_it_dropped() -> None:
    """Contents and checksums come back by place; a dropped block and another block's place are misses."""
    tier, arena = tier_of(medium_of())
    assert isinstance(tier, VirtualTier)

    async def main(tier: Tier) -> None:
        places = list(await tier.save(saving(1, 2)))
        assert await tier.load(loading({1: places[0], 2: places[1]})) == [101, 102]
        assert (arena[51 * 4096], arena[52 * 4096]) == ("bytes 1", "bytes 2")
        assert await tier.load(loading({1: places[1]})) == [NO_PLACE]
        await tier.drop(DropFrom(2, "disk", ((facts_of(1).block, places[0]),)))
        assert await tier.load(loading(dict(zip((1, 2), places, strict=True)))) == [NO_PLACE, 102]
        assert list(await tier.look(LookIn(3, "disk", (facts_of(1).block, facts_of(2).block)))) == [NO_PLACE, places[1]]

    VirtualLoop().run(main(tier))


def test_jobs_share_a_link() -> None:
    """Two loads at once take twice the bytes' time and one latency; slots hold garbage until then."""
    loop = VirtualLoop()
    tier, arena = tier_of(medium_of(pace=Pace(latency_s=0.5, bytes_s=BLOCK)))

    async def main() -> None:
        places = await tier.save(saving(1, 2, 3))
        assert loop.time() == pytest.approx(3.5)
        first = asyncio.ensure_future(tier.load(loading({1: places[0]})))
        second = asyncio.ensure_future(tier.load(loading({2: places[1]})))
        await asyncio.sleep(1.4)
        assert arena[51 * 4096] == GARBAGE
        await first
        assert loop.time() == pytest.approx(5.0)
        await second
        assert loop.time() == pytest.approx(6.0)

    loop.run(main())


def test_a_full_medium_keeps_no_more() -> None:
    tier, _ = tier_of(medium_of(2))

    async def main() -> None:
        places = await tier.save(saving(1, 2, 3))
        assert places[2] == NO_PLACE and NO_PLACE not in places[:2]
        assert await tier.save(saving(2)) == [places[1]]
        await tier.drop(DropFrom(2, "disk", ((facts_of(1).block, places[0]),)))
        assert NO_PLACE not in await tier.save(saving(3))

    VirtualLoop().run(main())
    assert tier.medium.used_bytes == 2 * BLOCK


def test_a_crash_keeps_what_was_saved_before() -> None:
    """What was under way is kept or not, and never wrong; a shared medium tells nobody what it has."""
    seen = set()
    for seed in range(20):
        medium = medium_of()
        arena: dict[int, Any] = {number * 4096: f"bytes {number}" for number in range(10)}
        tier = VirtualTier(medium, arena, random.Random(seed))

        async def main(medium: Medium = medium, arena: dict[int, Any] = arena, tier: VirtualTier = tier) -> None:
            await tier.save(saving(1, 2))
            late = asyncio.ensure_future(tier.save(saving(3, 4)))
            await asyncio.sleep(0)
            tier.crash()
            with pytest.raises(OSError):
                await late
            with pytest.raises(OSError):
                await tier.save(saving(5))
            entries = await VirtualTier(medium, arena, random.Random(0)).open()
            numbers = [entry.facts.depth for entry in entries]
            seen.add(tuple(numbers))
            assert numbers[:2] == [1, 2] and set(numbers) <= {1, 2, 3, 4}
            kept = [medium.kept[entry.place] for entry in entries]
            assert [
                entry == TierEntry(one.facts, entry.place, one.sum) for entry, one in zip(entries, kept, strict=True)
            ]
            assert [one.content for one in kept] == [f"bytes {number}" for number in numbers]
            medium.is_shared = True
            assert await VirtualTier(medium, arena, random.Random(0)).open() == ()

        VirtualLoop().run(main())
    assert len(seen) == 4


def test_faults_happen_at_their_rates() -> None:
    """Each kind of fault by itself: what is loaded then, and under which checksum."""
    good = medium_of()
    tier, _ = tier_of(good)
    places: list[int] = []

    async def save() -> None:
        places.extend(await tier.save(saving(*range(10))))

    VirtualLoop().run(save())

    def outcome(faults: TierFaults) -> list[tuple[Any, int]]:
        broken, arena = tier_of(good, faults)

        async def main() -> list[tuple[Any, int]]:
            sums = await broken.load(loading(dict(zip(range(10), places, strict=True))))
            return [(arena[(50 + number) * 4096], sum) for number, sum in zip(range(10), sums, strict=True)]

        return VirtualLoop().run(main())

    right = [(f"bytes {number}", 100 + number) for number in range(10)]
    assert outcome(TierFaults()) == right
    assert outcome(TierFaults(spoil=1.0)) == [(GARBAGE, 100 + number) for number in range(10)]
    assert all(one != other and one in right for one, other in zip(outcome(TierFaults(swap=1.0)), right, strict=True))
    assert {sum for _, sum in outcome(TierFaults(lose=1.0))} == {NO_PLACE}
    assert 0 < sum(one != other for one, other in zip(outcome(TierFaults(spoil=0.5)), right, strict=True)) < 10
    with pytest.raises(OSError):
        outcome(TierFaults(fail=1.0))


def test_a_slot_that_is_written_while_it_is_saved_is_found_out() -> None:
    tier, arena = tier_of(medium_of())

    async def main() -> None:
        save = asyncio.ensure_future(tier.save(saving(1)))
        await asyncio.sleep(0)
        arena[4096] = "others"
        await save

    with pytest.raises(AssertionError, match="written while it was saved"):
        VirtualLoop().run(main())
