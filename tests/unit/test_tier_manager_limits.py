"""What the manager of a KV store does where host memory shrinks, clients say what cannot be, or somebody asks for more
than its part: nobody waits for it, and nobody else loses by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tier_rig import Rig, chain, content_of, names, sum_of
from tokenmill.core.tiers import (
    DISK,
    HOST,
    NO_PLACE,
    BlockFacts,
    Fetched,
    HostResized,
    Leased,
    Pin,
    SaveTo,
    Stored,
    Written,
)


def stat(rig: Rig) -> Any:
    return json.loads(rig.inquire("stat").answer)


def on_disk_alone(num: int) -> Rig:
    rig = Rig(DISK, num_slots=64)
    for at in range(0, num, 8):
        assert rig.store(chain("a", num)[at : at + 8])
    rig.inquire("clear", json.dumps({"tier": HOST}))
    rig.run_all()
    return rig


def test_a_fetch_is_cut_to_host_memory_as_it_is_now() -> None:
    """What a client may not hold any more is missing at once, and not when the time for a fetch is over."""
    rig = on_disk_alone(32)
    wanted = names(chain("a", 32))
    first = rig.begin_fetch(wanted[:20])
    later = rig.begin_fetch(wanted)
    rig.run_all()
    assert rig.leased(first, wanted)[0] == set(range(20))
    rig.handle(HostResized(800))
    rig.say(Fetched(first))
    rig.run_all()
    leases, missing, is_last = rig.leased(later, wanted)
    assert is_last and leases == {0, 1, 2, 3} and missing == set(range(4, 32))
    rig.say(Fetched(later))
    assert rig.fetch(wanted) == {0, 1, 2, 3}
    rig.handle(HostResized(6400))
    assert rig.fetch(wanted) == set(range(32))


def test_pins_do_not_fill_host_memory_that_has_shrunk() -> None:
    """They keep their share of what is left; the rest of it takes what is new."""
    rig = Rig(num_slots=64)
    pinned = chain("p", 30)
    rig.store(pinned[:15])
    rig.store(pinned[15:])
    rig.say(Pin(names(pinned), -1))
    assert stat(rig)["tiers"][HOST]["pinned_bytes"] == 3000
    rig.handle(HostResized(1600))
    assert stat(rig)["tiers"][HOST]["pinned_bytes"] <= 800
    assert rig.store(chain("n", 4))
    assert rig.fetch(names(chain("n", 4))) == {0, 1, 2, 3}


def test_pins_are_within_the_quota_of_their_owner() -> None:
    """Nobody has more than its quota by pinning it, whether before the blocks come or after."""
    rig = Rig(DISK, num_slots=64, quotas={HOST: {"t": 400}, DISK: {"t": 600}})
    blocks = chain("a", 12, "t")
    rig.say(Pin(names(blocks[:6]), -1, "t"))
    for at in range(0, 12, 2):
        rig.store(blocks[at : at + 2])
    rig.say(Pin(names(blocks), -1, "t"))
    for tier, most in ((HOST, 400), (DISK, 600)):
        assert stat(rig)["owners"]["t"][tier]["bytes"] <= most
        assert 0 < stat(rig)["tiers"][tier]["pinned_bytes"] <= most
    rig.say(Pin(names(blocks), 0))
    assert stat(rig)["tiers"][HOST]["pinned_bytes"] == stat(rig)["tiers"][DISK]["pinned_bytes"] == 0
    other = chain("b", 4)
    assert rig.store(other) and rig.find(names(other)) == "1111"


@pytest.mark.parametrize("sum", [-5, 1 << 63, (1 << 64) - 1])
def test_what_is_no_checksum_is_not_kept(sum: int) -> None:
    rig = Rig()
    (facts,) = chain("a", 1)
    number, _ = rig.begin_store([facts])
    rig.say(Written(number, (sum,)))
    assert rig.hear(Stored) == [Stored(number, False)]
    assert rig.find([facts.block]) == "0" and rig.store([facts])


def test_numbers_that_cannot_be_end_nothing() -> None:
    """The store goes on after each of them."""
    rig = Rig(DISK)
    (facts,) = chain("a", 1)
    below = BlockFacts(facts.block, depth=-7)
    assert rig.store([below]) and rig.fetch([facts.block]) == {0}
    for what, argument in (("evict", '{"bytes": 1e999}'), ("quota", '{"owner": "x", "bytes": 1e999}')):
        assert rig.inquire(what, argument).error
    assert rig.inquire("list", '{"limit": 1e999}').error
    rig.say(Pin((facts.block,), float("nan")))
    assert stat(rig)["pins"] == 0 and rig.manager.next_s is None
    rig.say(Pin((facts.block,), float("inf")))
    assert stat(rig)["pins"] == 1


def test_a_hand_over_through_a_tier_that_is_not_there_fails_at_once() -> None:
    """Its blocks are host memory's, and may be given up there like others."""
    rig = Rig(DISK, num_slots=16)
    rig.manager.savers[DISK].is_open = False
    blocks = chain("a", 4)
    number, offsets = rig.begin_store(blocks, is_shared=True)
    rig.write(number, blocks, offsets)
    assert rig.hear(Stored) == [Stored(number, False)] and not rig.jobs
    for name in "bcdef":
        assert rig.store(chain(name, 4))
    assert rig.find(names(blocks)) == "0000"


def test_what_comes_once_is_not_in_the_way_of_what_comes_again() -> None:
    """A disk with room takes all as fast as it may; where it may take no more, what is worth it goes on."""
    rig = Rig(
        DISK, admissions={DISK: "second-use"}, fills_disk=True, num_slots=64, write_bytes_s={DISK: 100.0}, burst_s=1.0,
        job_bytes=100,
    )  # fmt: skip
    for name in "abcd":
        rig.store(chain(name, 8))
    rig.fetch(names(chain("d", 8)[:2]))
    for _ in range(12):
        rig.later(1.0)
        rig.run_all()
    assert all(rig.place_of(DISK, one) != NO_PLACE for one in names(chain("d", 8)[:2]))


def test_who_was_given_up_for_gone_and_writes_after_all_is_found_out() -> None:
    """Its slot is another's by then: the checksum of what lies there is that of what should."""
    rig = Rig(DISK, num_slots=16)
    mine, others = chain("a", 1), chain("b", 1)
    _, (offset,) = rig.begin_store(mine, client=1)
    rig.gone(1)
    number, (again,) = rig.begin_store(others, client=2)
    assert again == offset
    rig.write(number, others, (again,), client=2)
    assert not [job for job in rig.jobs if not isinstance(job, SaveTo)]
    rig.arena[offset] = content_of(mine[0].block)
    rig.run_all()
    for tier in (HOST, DISK):
        assert rig.kept[DISK]
        number = rig.begin_fetch(names(others), client=3)
        rig.run_all()
        (lease,) = [lease for message in rig.hear(Leased, 3) for lease in message.leases]
        assert lease.sum == sum_of(others[0].block, content_of(others[0].block))
        assert lease.sum != sum_of(others[0].block, rig.arena[lease.offset]), "nobody would know"
        if tier == HOST:
            rig.say(Fetched(number), 3)
            rig.inquire("clear", json.dumps({"tier": HOST}))
    rig.say(Fetched(number, (0,)), 3)
    rig.run_all()
    assert rig.find(names(others)) == "0" and not rig.kept[DISK]
