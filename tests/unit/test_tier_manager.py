"""What the manager of a KV store says and asks for, one rule after the other."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tier_rig import Rig, block, chain, content_of, entries, key, names, sum_of
from tokenmill.core.block import split_keys
from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import (
    DISK,
    HOST,
    NO_PLACE,
    PEER,
    REMOTE,
    BlockFacts,
    Drop,
    Fetched,
    Find,
    Found,
    HostResized,
    Inquire,
    Join,
    Joined,
    Leased,
    LoadFrom,
    LookIn,
    NoteCosts,
    Pin,
    Promote,
    SaveTo,
    Stored,
    TierEvent,
    TierEvents,
    TierJobEnded,
    TierOpened,
    Told,
    WatchTiers,
    Written,
)
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.kv.tiers.policies.admissions import Seen
from tokenmill.kv.tiers.replacement import BlockKind, Costs, TierBlock


def clear(rig: Rig, tier: str) -> None:
    assert not rig.inquire("clear", json.dumps({"tier": tier})).error
    rig.run_all()


def stat(rig: Rig) -> Any:
    return json.loads(rig.inquire("stat").answer)


def test_what_was_stored_is_found_and_leased() -> None:
    """A block is in host memory once its client has written it, and not before."""
    rig = Rig()
    blocks = chain("a", 3)
    number, offsets = rig.begin_store(blocks)
    assert NO_PLACE not in offsets and len(set(offsets)) == 3
    assert rig.find(names(blocks)) == "000"
    rig.write(number, blocks, offsets)
    assert rig.hear(Stored) == [Stored(number, True)]
    assert rig.find([*names(blocks), block("b")]) == "1110"
    assert rig.fetch([*names(blocks), block("b")]) == {0, 1, 2}


def test_what_is_given_up_by_host_memory_comes_back_from_the_disk() -> None:
    """Blocks are written to disk as they come, and loaded from there when host memory has given them up."""
    rig = Rig(DISK, num_slots=16)
    prompts = [chain(name, 4) for name in "abcdefgh"]
    for prompt in prompts:
        assert rig.store(prompt)
    assert len(rig.kept[DISK]) == 32
    assert "2" in rig.find(names(prompts[0]))
    for prompt in prompts:
        assert rig.fetch(names(prompt)) == {0, 1, 2, 3}


def test_a_leased_slot_is_not_used_again() -> None:
    """What is leased stays where it is, whatever is stored meanwhile, until the fetch is over or its client gone."""
    for is_gone in (False, True):
        rig = Rig(num_slots=16, grant_share=1.0)
        blocks = chain("a", 4)
        rig.store(blocks)
        number = rig.begin_fetch(names(blocks), client=2)
        (leased,) = rig.hear(Leased, 2)
        held = {lease.offset for lease in leased.leases}
        for name in "bcdef":
            other = chain(name, 8)
            number_, offsets = rig.begin_store(other)
            assert not held & set(offsets)
            rig.write(number_, other, offsets)
        assert [rig.arena[lease.offset] for lease in leased.leases] == [content_of(one) for one in names(blocks)]
        rig.gone(2) if is_gone else rig.say(Fetched(number), 2)
        taken: set[int] = set()
        for name in "ghij":
            other = chain(name, 8)
            number_, offsets = rig.begin_store(other)
            taken |= set(offsets)
            rig.write(number_, other, offsets)
        assert held <= taken


def test_a_writer_that_goes_has_stored_nothing() -> None:
    """Slots that were granted to it are free, and what it says later is not heard."""
    rig = Rig(num_slots=16, grant_share=1.0, client_share=1.0)
    blocks = chain("a", 8)
    number, offsets = rig.begin_store(blocks)
    rig.gone(1)
    rig.write(number, blocks, offsets)
    rig.say(Written(number, (1,) * 8))
    assert not rig.hear(Stored)
    assert rig.find(names(blocks)) == "0" * 8
    assert not list(rig.manager.contents.slots.taken())


def test_equal_blocks_are_loaded_once() -> None:
    """Two clients who want the same block wait for one load."""
    rig = Rig(DISK)
    blocks = chain("a", 2)
    rig.store(blocks)
    rig.inquire("clear", '{"tier": "host"}')
    first, second = rig.begin_fetch(names(blocks), 1), rig.begin_fetch(names(blocks), 2)
    (job,) = rig.jobs_of(LoadFrom)
    assert [one for one, _, _ in job.blocks] == list(names(blocks))
    rig.run_all()
    assert rig.leased(first, names(blocks), 1) == ({0, 1}, set(), True)
    assert rig.leased(second, names(blocks), 2) == ({0, 1}, set(), True)


def test_a_failed_save_is_tried_again_and_costs_nothing_else() -> None:
    """What the disk did not take stays in host memory, and is written when it is used again."""
    rig = Rig(DISK, num_slots=64)
    blocks = chain("a", 2)
    number, offsets = rig.begin_store(blocks)
    rig.write(number, blocks, offsets)
    (job,) = rig.jobs_of(SaveTo)
    rig.fail(job)
    assert rig.hear(Stored) and rig.find(names(blocks)) == "11" and not rig.kept[DISK]
    rig.later(5)
    assert rig.fetch(names(blocks)) == {0, 1}
    assert len(rig.kept[DISK]) == 2


def test_a_client_holds_no_more_than_its_share() -> None:
    """A fetch of more gets as much as that, a second waits for the first, and another client does not."""
    rig = Rig(DISK, num_slots=32)
    blocks = chain("a", 24)
    for at in range(0, 24, 4):
        rig.store(blocks[at : at + 4])
    wanted = names(blocks)
    first, second = rig.begin_fetch(wanted), rig.begin_fetch(wanted[:4])
    rig.run_all()
    assert rig.leased(first, wanted) == (set(range(16)), set(range(16, 24)), True)
    other = rig.begin_fetch(wanted[:8], client=2)
    assert rig.leased(other, wanted, client=2)[0] == set(range(8))
    assert rig.leased(second, wanted) == (set(), set(), False)
    rig.say(Fetched(first))
    assert rig.leased(second, wanted)[0] == set(range(4))


def test_all_clients_together_leave_room() -> None:
    """What clients wait for each other for comes in turn, and none is passed over."""
    rig = Rig(DISK, num_slots=32)
    prompts = {client: chain(f"p{client}", 16) for client in (1, 2, 3)}
    for client, blocks in prompts.items():
        for at in range(0, 16, 4):
            rig.store(blocks[at : at + 4], client)
    numbers = {client: rig.begin_fetch(names(blocks), client) for client, blocks in prompts.items()}
    order = []
    for _ in range(3):
        rig.run_all()
        for client, number in list(numbers.items()):
            leases, missing, is_last = rig.leased(number, names(prompts[client]), client)
            if is_last:
                assert len(leases) == 16 and not missing
                order.append(client)
                rig.say(Fetched(numbers.pop(client)), client)
    assert order == [1, 2, 3]


def test_nobody_waits_for_ever() -> None:
    """A tier that does not end a job costs a Find and a Fetch a bounded time, and the slot is not used again before."""
    rig = Rig(REMOTE, PEER)
    rig.say(Find(7, names(chain("a", 2))))
    number = rig.begin_fetch(names(chain("a", 2)))
    assert len(rig.jobs_of(LookIn)) == 2 and not rig.hear(Found)
    rig.later(rig.config.find_timeout_s)
    assert rig.hear(Found) == [Found(7, "00")]
    rig.later(rig.config.fetch_timeout_s)
    assert rig.leased(number, names(chain("a", 2))) == (set(), {0, 1}, True)

    rig = Rig(DISK)
    rig.store(chain("a", 2))
    clear(rig, HOST)
    number = rig.begin_fetch(names(chain("a", 2)))
    rig.later(rig.config.fetch_timeout_s)
    assert rig.leased(number, names(chain("a", 2))) == (set(), {0, 1}, True)
    rig.say(Fetched(number))
    assert len(list(rig.manager.contents.slots.taken())) == 2
    rig.run_all()
    assert rig.find(names(chain("a", 2))) == "11"


def test_what_one_tier_lost_comes_from_the_next() -> None:
    """Disk, then remote, then peer; a failed job is no loss, and what is nowhere is missing."""
    rig = Rig(DISK, REMOTE, PEER)
    blocks = chain("a", 4)
    rig.store(blocks)
    rig.store(blocks)
    assert len(rig.kept[DISK]) == len(rig.kept[REMOTE]) == 4
    clear(rig, HOST)
    del rig.kept[DISK][rig.place_of(DISK, blocks[0].block)]
    for lost in (1, 2):
        for tier in (DISK, REMOTE):
            del rig.kept[tier][rig.place_of(tier, blocks[lost].block)]
    rig.put(PEER, blocks[1])
    assert rig.fetch(names(blocks)) == {0, 1, 3}
    assert rig.manager.contents.disk is not None
    assert [rig.manager.contents.disk.find(one) is not None for one in names(blocks)][1:] == [True, False, True]

    clear(rig, HOST)
    number = rig.begin_fetch(names(blocks[3:]))
    rig.fail(rig.jobs_of(LoadFrom)[0])
    rig.run_all()
    assert rig.leased(number, names(blocks[3:]))[0] == {0}
    assert rig.place_of(DISK, blocks[3].block) != NO_PLACE, "a disk that failed once keeps what it has"


def test_a_checksum_that_is_not_the_one_noted_is_a_miss() -> None:
    """The block is dropped from the disk, counted, and never leased."""
    rig = Rig(DISK)
    blocks = chain("a", 2)
    rig.store(blocks)
    clear(rig, HOST)
    place = rig.place_of(DISK, blocks[1].block)
    rig.kept[DISK][place] = (blocks[1], "other", sum_of(blocks[1].block, "other"))
    assert rig.fetch(names(blocks)) == {0}
    assert place not in rig.kept[DISK]
    assert stat(rig)["tiers"][DISK]["corrupt"] == 1
    assert rig.find(names(blocks)) == "10"


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_what_a_client_finds_wrong_counts_against_the_tier_that_it_came_from(tier: str) -> None:
    rig = Rig(DISK)
    blocks = chain("a", 2)
    rig.store(blocks)
    if tier == DISK:
        clear(rig, HOST)
    number = rig.begin_fetch(names(blocks), 1)
    rig.run_all()
    rig.say(Fetched(number, (1,)), 1)
    assert {each: stat(rig)["tiers"][each]["corrupt"] for each in (HOST, DISK)} == {HOST: 0, DISK: 0} | {tier: 1}


def test_a_block_that_a_client_finds_wrong_is_forgotten_here() -> None:
    """Also by others who hold it: its slot is free when the last has let it go. What machines share stays as it is, and
    is not asked, until the block has been computed and is written there anew."""
    rig = Rig(DISK, REMOTE)
    blocks = chain("a", 2)
    rig.store(blocks)
    first, second = rig.begin_fetch(names(blocks), 1), rig.begin_fetch(names(blocks), 2)
    (leased,) = rig.hear(Leased, 2)
    rig.say(Fetched(first, (1,)), 1)
    rig.run_all()
    assert {tier for tier, one, _ in rig.dropped if one == blocks[1].block} == {DISK}
    assert rig.find(names(blocks)) == "10"
    assert leased.leases[1].offset in dict(rig.manager.contents.slots.taken())
    rig.say(Fetched(second), 2)
    assert leased.leases[1].offset not in dict(rig.manager.contents.slots.taken())
    assert stat(rig)["tiers"][HOST]["corrupt"] == 1
    rig.store(blocks[1:])
    assert [kept[0].block for kept in rig.kept[REMOTE].values()].count(blocks[1].block) == 2
    assert rig.find(names(blocks)) == "11"


def test_who_wants_blocks_gone_says_from_where() -> None:
    """From all tiers, or, as one whose own disk is damaged, from host memory and the disk alone: others have them."""
    rig = Rig(DISK, REMOTE)
    near, all = chain("a", 2), chain("b", 2)
    rig.store(near)
    rig.store(all)
    rig.say(Drop(names(near), is_near=True))
    rig.say(Drop(names(all)))
    rig.run_all()
    assert {(tier, one) for tier, one, _ in rig.dropped} == {
        *((DISK, one) for one in names(near)),
        *((tier, one) for one in names(all) for tier in (DISK, REMOTE)),
    }
    assert rig.fetch(names(near)) == {0, 1}
    assert rig.find(names(all)) == "00"


def test_shared_tiers_are_asked_once_and_believed_for_a_while() -> None:
    """Who wants to know at the same time shares a look; what is not there is asked for again later; others come in."""
    rig = Rig(REMOTE)
    wanted = names(chain("a", 3))
    rig.say(Find(1, wanted), 1)
    rig.say(Find(2, wanted[1:]), 2)
    (look,) = rig.jobs_of(LookIn)
    assert look.wanted == wanted
    rig.run_all()
    assert rig.hear(Found, 1) == [Found(1, "000")] and rig.hear(Found, 2) == [Found(2, "00")]
    rig.put(REMOTE, chain("a", 3)[0])
    assert rig.find(wanted) == "000"
    rig.later(rig.config.absent_s)
    assert rig.find(wanted) == "300"
    assert rig.fetch(wanted) == {0}


def test_a_store_that_answers_another_looks_at_home_only() -> None:
    """Near: neither a look, nor a load from where others write, nor a wait for one that is under way."""
    rig = Rig(DISK, REMOTE)
    blocks = chain("a", 2)
    rig.put(REMOTE, blocks[0])
    assert rig.find(names(blocks), is_near=True) == "00"
    assert rig.fetch(names(blocks), is_near=True) == set()
    assert stat(rig)["tiers"][REMOTE]["looks"] == 0
    assert rig.find(names(blocks)) == "30"
    far = rig.begin_fetch(names(blocks), client=1)
    near = rig.begin_fetch(names(blocks), client=2, is_near=True)
    assert rig.leased(near, names(blocks), 2) == (set(), {0, 1}, True)
    rig.run_all()
    assert rig.leased(far, names(blocks))[0] == {0}
    assert rig.fetch(names(blocks), client=2, is_near=True) == {0}


def test_who_may_look_further_does_where_another_may_not() -> None:
    """Two wait for the disk, which has lost the block: one has missed it, the other gets it from the remote store."""
    rig = Rig(DISK, REMOTE)
    blocks = chain("a", 1)
    rig.store(blocks)
    clear(rig, HOST)
    del rig.kept[DISK][rig.place_of(DISK, blocks[0].block)]
    near = rig.begin_fetch(names(blocks), client=1, is_near=True)
    far = rig.begin_fetch(names(blocks), client=2)
    rig.run_all()
    assert rig.leased(near, names(blocks), 1) == (set(), {0}, True)
    assert rig.leased(far, names(blocks), 2) == ({0}, set(), True)


def test_prompts_that_come_once_are_not_written() -> None:
    """The second use is, also where the block was given up between the two."""
    rig = Rig(DISK, admissions={DISK: "second-use"})
    blocks = chain("a", 3)
    rig.store(blocks)
    assert not rig.kept[DISK] and stat(rig)["tiers"][DISK]["refused"] == 3
    rig.fetch(names(blocks[:1]))
    assert [kept[0].block for kept in rig.kept[DISK].values()] == [blocks[0].block]
    rig.later(60)
    rig.store(blocks[1:2])
    assert len(rig.kept[DISK]) == 2, "a block that is stored again is used"
    clear(rig, HOST)
    rig.store(blocks[2:])
    assert len(rig.kept[DISK]) == 3, "a block is known after it was given up"


def test_a_disk_with_room_takes_all() -> None:
    """Nothing has to go for what comes once; when the disk is full, it is not written."""
    rig = Rig(DISK, admissions={DISK: "second-use"}, fills_disk=True, num_slots=64, num_on_disk=8)
    rig.store(chain("a", 6))
    assert len(rig.kept[DISK]) == 6
    rig.store(chain("b", 6))
    assert [rig.place_of(DISK, one) != NO_PLACE for one in names(chain("b", 6))] == [True] * 2 + [False] * 4
    assert all(rig.place_of(DISK, one) != NO_PLACE for one in names(chain("a", 6)))
    rig.fetch(names(chain("b", 6)))
    assert all(rig.place_of(DISK, one) != NO_PLACE for one in names(chain("b", 6)))


def test_ghosts_forget_the_oldest() -> None:
    """At least so many are remembered, and no more than twice as many."""
    seen, rng = Seen(1000), random.Random(1)
    first = [(0, rng.randbytes(16)) for _ in range(1000)]
    assert sum(map(seen.note, first)) < 50
    assert all(map(seen.note, first))
    for _ in range(2001):
        seen.note((0, rng.randbytes(16)))
    assert sum(map(seen.note, first)) < 50


def test_writing_is_held_to_its_rate() -> None:
    """So many bytes a second; what waits is asked for by a time, and a hand-over does not wait."""
    rig = Rig(DISK, num_slots=64, write_bytes_s={DISK: 200.0}, burst_s=1.0, job_bytes=100)
    blocks = chain("a", 8)
    rig.store(blocks)
    assert len(rig.kept[DISK]) == 2
    for seconds in range(1, 4):
        next_s = rig.manager.next_s
        assert next_s is not None and next_s > rig.now
        rig.later(1.0)
        rig.run_all()
        assert 2 * seconds <= len(rig.kept[DISK]) <= 2 * seconds + 2
    other = chain("b", 2)
    assert rig.store(other, is_shared=True)
    assert all(rig.place_of(DISK, one) != NO_PLACE for one in names(other))


def test_the_end_of_a_prompt_goes_before_its_head() -> None:
    """Whatever came first, and although engines ask for the end alone: the head was used with it."""
    rig = Rig(num_slots=16)
    blocks = chain("a", 12)
    for nth in range(0, 12, 4):
        rig.store(blocks[nth : nth + 4])
    rig.later(60)
    rig.store(chain("b", 4))
    rig.later(60)
    rig.fetch(names(blocks[11:]))
    rig.later(60)
    rig.store(chain("c", 4))
    assert rig.find(names(chain("b", 4))) == "0000", "it was used longest ago"
    rig.store(chain("d", 4))
    assert rig.find(names(blocks)) == "111111110000"


def test_pinned_blocks_are_kept_until_their_time_is_over() -> None:
    """Also such as come later; they are written to disk though they would not be admitted."""
    rig = Rig(DISK, admissions={DISK: "second-use"}, num_slots=16)
    blocks = chain("a", 4)
    rig.store(blocks[:2])
    rig.say(Pin(names(blocks), 100.0, "x"))
    rig.run_all()
    rig.store(blocks[2:])
    assert len(rig.kept[DISK]) == 4
    for name in "bcdefgh":
        rig.store(chain(name, 4))
    assert rig.find(names(blocks)) == "1111"
    pins = json.loads(rig.inquire("pins").answer)
    assert pins["num"] == 4 and pins["pins"][0]["owner"] == "x" and pins["pins"][0]["seconds"] == 100
    assert rig.manager.next_s == 100.0
    rig.later(100)
    for name in "bcdefgh":
        rig.store(chain(name + "2", 4))
    assert rig.find(names(blocks)) == "2222"
    assert json.loads(rig.inquire("pins").answer)["num"] == 0


def test_a_pin_for_a_while_does_not_end_one_that_lasts_longer() -> None:
    """Say a client's, of a conversation that begins with the system prompt that an operator has pinned."""
    rig = Rig(DISK, num_slots=16)
    blocks = chain("a", 4)
    rig.say(Pin(names(blocks[:2]), -1, "operator"))
    rig.say(Pin(names(blocks), 60.0, "client"))
    rig.say(Pin(names(blocks), 5.0, "client"))
    pins = json.loads(rig.inquire("pins").answer)
    assert [(each["owner"], each["seconds"]) for each in pins["pins"]] == [("operator", None)] * 2 + [
        ("client", 60)
    ] * 2
    rig.later(61)
    assert json.loads(rig.inquire("pins").answer)["num"] == 2
    rig.say(Pin(names(blocks), 0.0))
    assert json.loads(rig.inquire("pins").answer)["num"] == 0, "to unpin ends both"


def test_pins_take_no_more_than_their_share() -> None:
    """What is pinned beyond it is kept as anything else is, and the tier never jams."""
    rig = Rig(num_slots=16, pinned_share=0.5)
    for name in "abcd":
        blocks = chain(name, 4)
        rig.say(Pin(names(blocks), -1))
        rig.store(blocks)
    assert stat(rig)["tiers"][HOST]["pinned_bytes"] == 800
    for name in "efgh":
        assert rig.store(chain(name, 4))
    assert [rig.find(names(chain(name, 4))) for name in "abcd"] == ["1111", "1111", "0000", "0000"]
    rig.say(Pin(names(chain("a", 4)), 0))
    for name in "ijk":
        rig.store(chain(name, 4))
    assert rig.find(names(chain("a", 4))) == "0000" and rig.find(names(chain("b", 4))) == "1111"


def test_pins_for_ever_go_before_those_for_a_while() -> None:
    """So that no client can keep an operator from pinning, however much it pins itself."""
    rig = Rig(num_slots=16, pinned_share=0.5)
    wanted = chain("b", 4)
    rig.say(Pin(names(chain("a", 8)), 100.0, "client"))
    rig.store(chain("a", 8))
    rig.store(wanted)
    rig.say(Pin(names(wanted), 100.0, "client"))
    assert stat(rig)["tiers"][HOST]["pinned_bytes"] == 800
    rig.say(Pin(names(wanted), -1, "operator"))
    assert stat(rig)["tiers"][HOST]["pinned_bytes"] == 800, "as many others are free to go"
    for name in "cdef":
        rig.store(chain(name, 8))
    assert rig.find(names(wanted)) == "1111" and rig.find(names(chain("a", 8))).count("0") >= 4


def test_an_owner_beyond_its_quota_gives_up_its_own() -> None:
    """In host memory and on disk; others keep theirs, and "" has no limit."""
    rig = Rig(DISK, num_slots=32, quotas={HOST: {"a": 400}, DISK: {"*": 600}})
    rig.store(chain("other", 4, "b"))
    rig.store(chain("all", 8))
    for nth in range(4):
        rig.later(1)
        rig.store(chain(f"mine{nth}-", 4, "a"))
    told = stat(rig)["owners"]
    assert told["a"][HOST]["bytes"] == 400 and told["a"][DISK]["bytes"] == 600
    assert told["b"][HOST]["bytes"] == 400 and told[""][DISK]["bytes"] == 800
    assert rig.find(names(chain("mine3-", 4))) == "1111"
    assert rig.find(names(chain("mine0-", 4))) == "0000"
    assert not rig.inquire("quota", json.dumps({"owner": "b", "bytes": 100})).error
    rig.run_all()
    told = stat(rig)["owners"]
    assert told["b"][HOST]["bytes"] == told["b"][DISK]["bytes"] == 100
    assert sum(kept[0].owner == "b" for kept in rig.kept[DISK].values()) == 1
    assert not rig.inquire("quota", json.dumps({"owner": "b", "bytes": None, "tier": HOST})).error
    rig.store(chain("other", 4, "b"))
    assert stat(rig)["owners"]["b"][HOST]["bytes"] == 400


def test_a_shared_store_ends_when_others_find_its_blocks() -> None:
    """In the remote store where there is one, else on disk; also what was here already, and what is on disk alone."""
    rig = Rig(DISK, REMOTE, admissions={DISK: "all", REMOTE: "second-use"}, num_slots=64)
    blocks = chain("a", 4)
    rig.store(blocks[:3])
    clear(rig, HOST)
    rig.store(blocks[1:2])
    number, offsets = rig.begin_store(blocks, is_shared=True)
    rig.write(number, blocks, offsets)
    assert not rig.hear(Stored)
    rig.run_all()
    assert rig.hear(Stored) == [Stored(number, True)]
    assert {kept[0].block for kept in rig.kept[REMOTE].values()} == set(names(blocks))

    rig = Rig(DISK, num_slots=64)
    number, offsets = rig.begin_store(blocks, is_shared=True)
    rig.write(number, blocks, offsets)
    rig.fail(rig.jobs_of(SaveTo)[0])
    assert rig.hear(Stored) == [Stored(number, False)]
    rig.later(60)
    number, offsets = rig.begin_store(blocks, is_shared=True)
    rig.write(number, blocks, offsets)
    rig.later(rig.config.fetch_timeout_s)
    assert rig.hear(Stored) == [Stored(number, False)], "a tier that does not say so has not got it"


def test_host_memory_shrinks_and_grows() -> None:
    """What it may not take any more goes back to the system; what is leased stays until it is let go."""
    rig = Rig(num_slots=64, grant_share=1.0)
    for name in "abcdefgh":
        rig.store(chain(name, 8))
    number = rig.begin_fetch(names(chain("h", 4)), client=2)
    held = {lease.offset for message in rig.hear(Leased, 2) for lease in message.leases}
    rig.handle(HostResized(800))
    taken = sum(size for _, size in rig.manager.contents.slots.taken())
    freed = {offset for at, size in rig.freed for offset in range(at, at + size, 100)}
    assert taken + 100 * len(freed) == 6400 and not held & freed and 400 <= taken <= 1200
    rig.say(Fetched(number), 2)
    rig.handle(HostResized(800))
    assert sum(size for _, size in rig.manager.contents.slots.taken()) <= 800
    assert sum(size for _, size in rig.freed) >= 5600
    for name in "xyz":
        rig.store(chain(name, 8))
    assert sum(size for _, size in rig.manager.contents.slots.taken()) <= 800
    rig.handle(HostResized(6400))
    for name in "abcdefgh":
        rig.store(chain(name, 8))
    assert rig.find(names(chain("a", 8))) == "1" * 8


def test_blocks_are_promoted_ahead_of_a_fetch() -> None:
    """They come into host memory while nobody waits, as far as the share for it goes."""
    rig = Rig(DISK, num_slots=64)
    for at in range(0, 24, 8):
        rig.store(chain("a", 24)[at : at + 8])
    clear(rig, HOST)
    wanted = names(chain("a", 24))
    rig.say(Promote(wanted))
    assert sum(len(job.blocks) for job in rig.jobs_of(LoadFrom)) == 8
    number = rig.begin_fetch(wanted[:8])
    assert sum(len(job.blocks) for job in rig.jobs_of(LoadFrom)) == 8, "a fetch waits for what is on its way"
    rig.run_all()
    assert rig.leased(number, wanted)[0] == set(range(8))
    assert stat(rig)["tiers"][HOST]["promotes_refused"] == 16


def test_what_is_dropped_on_its_way_does_not_arrive() -> None:
    """Neither from a tier nor from a client that is writing it."""
    rig = Rig(DISK)
    blocks = chain("a", 2)
    rig.store(blocks)
    clear(rig, HOST)
    number = rig.begin_fetch(names(blocks))
    rig.say(Drop(names(blocks)))
    assert rig.leased(number, names(blocks)) == (set(), {0, 1}, True)
    rig.run_all()
    assert rig.find(names(blocks)) == "00" and not list(rig.manager.contents.slots.taken())
    number, offsets = rig.begin_store(blocks)
    rig.say(Drop(names(blocks[:1])))
    rig.write(number, blocks, offsets)
    rig.run_all()
    assert rig.find(names(blocks)) == "01" and rig.hear(Stored) == [Stored(number, False)]


def test_what_is_dropped_while_it_is_saved_is_not_kept() -> None:
    """The tier is told to forget it as soon as it has it."""
    for tier in (DISK, REMOTE):
        rig = Rig(tier, num_slots=64)
        blocks = chain("a", 2)
        number, offsets = rig.begin_store(blocks)
        rig.write(number, blocks, offsets)
        assert rig.jobs_of(SaveTo)
        rig.say(Drop(names(blocks)))
        assert dict(rig.manager.contents.slots.taken()).keys() == set(offsets), "slots are being read"
        rig.run_all()
        assert not rig.kept[tier] and not list(rig.manager.contents.slots.taken())
        assert rig.find(names(blocks)) == "00"


def test_a_writer_makes_others_wait_or_look_elsewhere() -> None:
    """Who fetches what is being written has it when it is; where the writer goes, there is nothing to wait for."""
    rig = Rig()
    blocks = chain("a", 2)
    number, offsets = rig.begin_store(blocks, client=1)
    assert rig.begin_store(blocks, client=2)[1] == (NO_PLACE, NO_PLACE)
    first = rig.begin_fetch(names(blocks), client=3)
    rig.write(number, blocks, offsets, client=1)
    assert rig.leased(first, names(blocks), 3) == ({0, 1}, set(), True)
    others = chain("b", 2)
    rig.begin_store(others, client=1)
    second = rig.begin_fetch(names(others), client=3)
    rig.gone(1)
    assert rig.leased(second, names(others), 3) == (set(), {0, 1}, True)


def test_watchers_are_told_all_there_is_and_what_changes() -> None:
    """Blocks that follow each other are one event; messages have no gaps."""
    rig = Rig(DISK)
    rig.store(chain("a", 3))
    rig.say(WatchTiers(True), 5)
    (first,) = rig.hear(TierEvents, 5)
    joined = key("a0") + key("a1") + key("a2")
    assert first == TierEvents(
        0, (TierEvent("cleared"), TierEvent("stored", HOST, joined), TierEvent("stored", DISK, joined))
    )
    rig.store(chain("a", 4)[3:])
    rig.say(Drop(names(chain("a", 2))))
    told = rig.hear(TierEvents, 5)
    assert [message.seq for message in told] == [1, 2, 3]
    assert told[0].events == (TierEvent("stored", HOST, key("a3"), key("a2"), 3),)
    assert told[1].events == (TierEvent("stored", DISK, key("a3"), key("a2"), 3),)
    assert {(event.kind, event.tier, event.keys) for event in told[2].events} == {
        ("removed", tier, key(name)) for tier in (HOST, DISK) for name in ("a0", "a1")
    }
    rig.say(WatchTiers(False), 5)
    rig.store(chain("b", 1))
    assert not rig.hear(TierEvents, 5)


def test_watchers_of_much_are_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among what changes meanwhile, and as soon as it can be; what has gone by then is not told of."""
    monkeypatch.setattr("tokenmill.kv.tiers.events.MOST_KEYS", 4)
    rig = Rig(num_slots=64)
    for name in "abc":
        rig.store(chain(name, 4))
    rig.say(WatchTiers(True), 5)
    assert rig.manager.next_s == rig.now
    rig.say(Drop(names(chain("b", 2))))
    rig.store(chain("d", 1))
    while rig.manager.next_s is not None:
        rig.later(0.001)
    held: set[bytes] = set()
    for message in rig.hear(TierEvents, 5):
        for event in message.events:
            held = (
                (held | set(split_keys(event.keys))) if event.kind == "stored" else held - set(split_keys(event.keys))
            )
    assert held == set(rig.manager.contents.host.blocks[0]) and len(held) == 11


def test_operators_see_and_empty_the_tiers() -> None:
    """stat, list, clear, evict; what cannot be is said in words."""
    rig = Rig(DISK, num_slots=64)
    rig.store(chain("a", 3, "x"))
    rig.store(chain("b", 2))
    rig.fetch(names(chain("a", 3)))
    told = stat(rig)
    assert told["tiers"][HOST]["bytes"] == told["tiers"][DISK]["bytes"] == 500
    assert told["tiers"][HOST]["hits"] == told["tiers"][HOST]["loads"] == 3
    assert told["owners"]["x"][HOST] == {"bytes": 300, "blocks": 3, "hits": 3, "quota": None}
    listed = json.loads(rig.inquire("list", json.dumps({"owner": "x", "limit": 2})).answer)
    assert listed["more"] and [one["depth"] for one in listed["blocks"]] == [0, 1]
    assert listed["blocks"][1]["tiers"] == [HOST, DISK] and listed["blocks"][1]["uses"] == 2
    assert not json.loads(rig.inquire("list", json.dumps({"prefix": key("b1").hex()})).answer)["more"]
    assert json.loads(rig.inquire("clear", json.dumps({"owner": "x", "tier": DISK})).answer) == {"blocks": 3}
    rig.run_all()
    assert len(rig.kept[DISK]) == 2
    assert json.loads(rig.inquire("evict", json.dumps({"bytes": 150, "tier": HOST})).answer) == {"blocks": 2}
    for what, argument in (
        ("nonsense", ""),
        ("list", "["),
        ("clear", '{"tier": "moon"}'),
        ("evict", "{}"),
        ("stat", "3"),
    ):
        assert rig.inquire(what, argument).error


def test_before_host_memory_goes_all_is_written() -> None:
    """A flush is answered when the disk has what host memory has, whatever the rate and the admission."""
    rig = Rig(DISK, num_slots=64, admissions={DISK: "second-use"}, write_bytes_s={DISK: 1.0})
    rig.store(chain("a", 4))
    rig.fetch(names(chain("a", 2)))
    rig.say(Inquire(7, "flush"), 9)
    assert not rig.hear(Told, 9)
    rig.run_all()
    assert rig.hear(Told, 9) == [Told(7, "{}")]
    assert len(rig.kept[DISK]) == 4


def test_clients_of_another_model_are_refused() -> None:
    """In words that tell why; one who only asks is not."""
    rig = Rig(DISK)
    rig.say(Join("numerics", (100,)))
    rig.say(Join("other", (100,)))
    rig.say(Join("numerics", (100, 60)))
    rig.say(Join("", ()))
    good, other, sizes, asks = rig.hear(Joined)
    assert not good.error and not asks.error and [facts.name for facts in good.tiers] == [HOST, DISK]
    assert "other" in other.error and "(100, 60)" in sizes.error


def test_a_disk_that_takes_less_than_it_should_is_not_asked_for_more() -> None:
    """What it holds is taken for its size: room is made, and it fills no further."""
    rig = Rig(DISK, num_slots=64, num_on_disk=100, job_bytes=100)

    def run_with_room_for(num: int) -> None:
        while rig.jobs:
            job = rig.jobs[0]
            if isinstance(job, SaveTo) and len(rig.kept[DISK]) >= num:
                rig.jobs.remove(job)
                rig.handle(TierJobEnded(job, (NO_PLACE,) * len(job.blocks)))
            else:
                rig.run(job)

    for name in "abcdef":
        blocks = chain(name, 4)
        number, offsets = rig.begin_store(blocks)
        rig.write(number, blocks, offsets)
        run_with_room_for(8)
        rig.later(100)
        run_with_room_for(8)
    assert 6 <= len(rig.kept[DISK]) <= 8
    assert rig.find(names(chain("f", 4))) == "1111"
    assert any(rig.place_of(DISK, one) != NO_PLACE for one in names(chain("f", 4))), "old blocks have made room"


def test_a_disk_that_was_kept_is_known_again() -> None:
    """What it has twice, or cannot be, is dropped there; so is what there is no room for any more."""
    rig = Rig(num_slots=16)
    rig = Rig(DISK, num_slots=16, num_on_disk=6)
    kept = entries(chain("a", 8)) + entries(chain("a", 1)) + entries((BlockFacts((3, key("x"))),))
    rig.handle(TierOpened(DISK, tuple(entry._replace(place=nth) for nth, entry in enumerate(kept))))
    for nth, entry in enumerate(kept[:8]):
        rig.kept[DISK][nth] = entry.facts, content_of(entry.facts.block), entry.sum
    rig.run_all()
    assert {place for _, _, place in rig.dropped} == {6, 7, 8, 9}
    assert rig.find(names(chain("a", 8))) == "22222200"
    assert rig.fetch(names(chain("a", 6))) == set(range(6))


def test_nothing_is_written_to_a_tier_that_is_not_ready() -> None:
    """What was admitted meanwhile is written when it is."""
    rig = Rig(num_slots=64)
    rig.config = TierConfig("numerics", (100,), 6400, (DISK,), 6400, slot_align=1, admissions={DISK: "all"})
    rig.manager = type(rig.manager)(rig.config)
    rig.kept[DISK] = {}
    rig.store(chain("a", 2))
    assert not rig.kept[DISK]
    rig.handle(TierOpened(DISK))
    rig.run_all()
    assert len(rig.kept[DISK]) == 2


def test_groups_with_blocks_of_other_sizes_share_host_memory() -> None:
    """An extent changes hands when nothing is left in it, so that neither group starves the other."""
    rig = Rig(block_bytes=(100, 60), host_bytes=3200)
    for nth in range(12):
        rig.store(chain(f"a{nth}", 4))
    for nth in range(12):
        assert rig.store(chain(f"b{nth}", 4, group=1))
    for nth in range(12):
        assert rig.store(chain(f"c{nth}", 4))
        assert rig.store(chain(f"d{nth}", 4, group=1))
    assert rig.find(names(chain("c11", 4))) == rig.find(names(chain("d11", 4, group=1))) == "1111"


def test_blocks_of_another_size_do_not_drive_out_pinned_ones() -> None:
    """An extent that is emptied for them keeps what is pinned in it."""
    rig = Rig(block_bytes=(100, 60), host_bytes=6400)
    pinned = [chain(f"a{nth}", 4)[0] for nth in range(0, 12, 4)]
    rig.say(Pin(names(pinned), -1))
    for nth in range(16):
        rig.store(chain(f"a{nth}", 4))
    for nth in range(40):
        rig.store(chain(f"b{nth}", 4, group=1))
    assert rig.find(names(pinned)) == "111"


def test_a_block_is_worth_what_computing_it_takes() -> None:
    """Its tokens, and the positions that they attend to; a KV group's share is by bytes."""
    rig = Rig(block_bytes=(100, 60), host_bytes=3200)
    rig.say(NoteCosts(0.001, 0.00001))
    rig.store(chain("a", 3))
    blocks = [rig.manager.contents.host.find(one) for one in names(chain("a", 3))]
    assert blocks[2] is not None and blocks[0] is not None
    assert blocks[2].recompute_s == pytest.approx(100 / 160 * 16 * (0.001 + 0.00001 * 2.5 * 16))
    assert blocks[0].recompute_s < blocks[2].recompute_s


def test_a_block_keeps_all_that_is_known_of_it() -> None:
    """Place, depth and checksum lie in one number, up to their ends."""
    kind = BlockKind(0, 100, 1.0, Costs(16, 0.001, 0.0))
    for place, depth, sum in ((0, 0, 0), (NO_PLACE, 5, 2**63 - 1), (2**40, 2**24 - 1, 1), (7, 2**24 + 3, 3)):
        made = TierBlock(kind, BlockFacts((0, key("a")), b"", depth), place, sum, 0.0)
        assert (made.place, made.depth, made.sum) == (place, min(depth, 2**24 - 1), sum)


def test_settings_that_cannot_be_are_refused() -> None:
    """Before anything is kept."""
    with pytest.raises(ConfigError, match="kv_host"):
        TierConfig("n", (100,), 50)
    with pytest.raises(ConfigError, match="kv_disk"):
        TierConfig("n", (100,), 10_000, (DISK,))
    with pytest.raises(ConfigError, match="nearest first"):
        TierConfig("n", (100,), 10_000, (REMOTE, DISK), 10_000)
    with pytest.raises(ConfigError, match="kv_tier_policy"):
        TierConfig("n", (100,), 10_000, policies={HOST: "lri"})
