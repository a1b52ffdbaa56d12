"""Random clients, tiers that fail, lose and lie, resizes and time against the manager of a KV store, with what must
always hold checked after each input.

    python tests/property/test_tiering.py SEED     replays one
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tier_rig import ALL_TIERS, Rig, chain, content_of, sum_of
from tokenmill.core.block import split_keys
from tokenmill.core.kv_events import CLEARED, STORED
from tokenmill.core.tiers import (
    DISK,
    HOST,
    NO_PLACE,
    REMOTE,
    BlockFacts,
    Drop,
    DropFrom,
    Fetch,
    Fetched,
    Find,
    Found,
    Granted,
    HostResized,
    Inquire,
    Leased,
    LoadFrom,
    LookIn,
    NoteCosts,
    Pin,
    Promote,
    Said,
    SaveTo,
    Store,
    Stored,
    TierEvents,
    TierInput,
    TierJob,
    TierJobEnded,
    TierKey,
    WatchTiers,
    Written,
)
from tokenmill.kv.tiers.policies import ADMISSIONS, REPLACEMENTS

NUM_SEEDS = 300
WATCHER = 0
PROMPTS, BLOCKS = 8, 6
OWNERS = ("", "a", "b")


class Fetching:
    """seen: place -> offset and what lay there as it was leased."""

    def __init__(self, wanted: tuple[TierKey, ...]) -> None:
        self.wanted = wanted
        self.seen: dict[int, tuple[int, object, int]] = {}
        self.missing: set[int] = set()
        self.is_last = False


class Storing:
    def __init__(self, blocks: tuple[BlockFacts, ...]) -> None:
        self.blocks = blocks
        self.offsets: tuple[int, ...] | None = None
        self.is_written = False


class Client:
    def __init__(self) -> None:
        self.finds: dict[int, int] = {}
        self.fetches: dict[int, Fetching] = {}
        self.stores: dict[int, Storing] = {}


class Storm(Rig):
    """A rig whose tiers and clients do what chance wants. Clients check what they hear, `check` all the rest."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        tiers = tuple(tier for tier in ALL_TIERS if rng.random() < 0.6)
        admission = rng.choice(sorted(ADMISSIONS))
        self.fault_rate = rng.choice((0.0, 0.02, 0.2))
        self.clients: dict[int, Client] = {}
        self.num_clients = 1
        self.saved_content: dict[int, list[object]] = {}
        self.mirror: dict[str, set[bytes]] = {HOST: set(), DISK: set()}
        self.is_mirrored = False
        self.seq: int | None = None
        quotas = {tier: {"a": 700, "*": 900} for tier in (HOST, DISK)} if rng.random() < 0.4 else {}
        super().__init__(
            *tiers,
            num_slots=rng.choice((16, 24, 60)),
            num_on_disk=rng.choice((4, 10, 100)),
            block_bytes=rng.choice(((100,), (100, 60), (64, 100, 100))),
            fills_disk=rng.random() < 0.5,
            admissions=dict.fromkeys((DISK, REMOTE), admission),
            policies=dict.fromkeys((HOST, DISK), rng.choice(sorted(REPLACEMENTS))),
            quotas=quotas,
            write_bytes_s={DISK: 500.0} if rng.random() < 0.3 else {},
            burst_s=1.0,
            num_remembered=20,
            job_bytes=rng.choice((100, 400, 10_000)),
            pinned_share=rng.choice((0.2, 0.5)),
            lease_share=rng.choice((0.5, 0.75, 1.0)),
        )

    # ---- what the manager asks for ----

    def handle(self, event: TierInput) -> None:
        num_jobs = len(self.jobs)
        super().handle(event)
        for job in self.jobs[num_jobs:]:
            if isinstance(job, LoadFrom):
                for _, _, offset in job.blocks:
                    self.arena[offset] = ("filling", job.number)
            elif isinstance(job, SaveTo):
                self.saved_content[job.number] = [self.arena[offset] for _, offset, _ in job.blocks]
        self.check_answers()
        self.check()

    def end(self, job: TierJob) -> None:
        """As the tier of the job does it, or does not."""
        rng, kept, rate = self.rng, self.kept[job.tier], self.fault_rate
        self.jobs.remove(job)
        if rng.random() < rate:
            self.handle(TierJobEnded(job, (), "failed"))
            return
        result: list[int] = []
        match job:
            case LookIn():
                result = [self.place_of(job.tier, wanted) for wanted in job.wanted]
                result = [rng.choice((NO_PLACE, 3)) if rng.random() < rate else place for place in result]
            case LoadFrom():
                result = [self.load(kept, wanted, place, offset) for wanted, place, offset in job.blocks]
            case SaveTo():
                contents = [self.arena[offset] for _, offset, _ in job.blocks]
                assert contents == self.saved_content.pop(job.number), "a slot was written while it was saved"
                result = [self.save(job.tier, facts, offset, sum) for facts, offset, sum in job.blocks]
            case DropFrom():
                for wanted, place in job.blocks:
                    if place in kept and kept[place][0].block == wanted:
                        del kept[place]
        self.handle(TierJobEnded(job, tuple(result)))

    def load(self, kept: dict[int, Any], wanted: TierKey, place: int, offset: int) -> int:
        facts, content, sum = kept.get(place, (None, None, NO_PLACE))
        if facts is None or facts.block != wanted or self.rng.random() < self.fault_rate:
            return NO_PLACE
        if self.rng.random() < self.fault_rate:
            content = "spoilt"
        self.arena[offset] = content
        return self.rng.choice((sum, 7)) if self.rng.random() < self.fault_rate else int(sum)

    def save(self, tier: str, facts: BlockFacts, offset: int, sum: int) -> int:
        kept = self.kept[tier]
        size = self.config.block_bytes[facts.block[0]]
        used = sum_bytes(self, tier)
        if self.rng.random() < self.fault_rate or (tier == DISK and used + size > self.config.disk_bytes):
            return NO_PLACE
        place = next(place for place in range(len(kept) + 1) if place not in kept)
        kept[place] = facts, self.arena[offset], sum
        return place

    # ---- what clients do ----

    def step(self) -> None:
        roll = self.rng.random()
        if self.jobs and roll < 0.4:
            self.end(self.rng.choice(self.jobs))
        elif roll < 0.9:
            self.act()
        elif roll < 0.96:
            self.later(self.rng.choice((0.001, 0.1, 2.0, 40.0)))
        else:
            self.disturb()

    def act(self) -> None:
        rng = self.rng
        if not self.clients or (len(self.clients) < 4 and rng.random() < 0.1):
            self.clients[self.num_clients] = Client()
            self.num_clients += 1
        client = rng.choice(sorted(self.clients))
        mine = self.clients[client]
        number = self.number()
        open_stores = [one for one in mine.stores if not mine.stores[one].is_written]
        match rng.randrange(9):
            case 0:
                wanted = self.some()
                mine.finds[number] = len(wanted)
                self.handle(Said(client, Find(number, wanted, rng.random() < 0.2)))
            case 1 | 2:
                wanted = self.some()
                mine.fetches[number] = Fetching(wanted)
                self.handle(Said(client, Fetch(number, wanted, rng.random() < 0.2)))
            case 3 | 4 if mine.fetches:
                self.end_fetch(client, rng.choice(sorted(mine.fetches)))
            case 5 | 6:
                blocks = self.prompt()
                mine.stores[number] = Storing(blocks)
                self.handle(Said(client, Store(number, blocks, rng.random() < 0.2)))
            case 7 | 8 if open_stores:
                self.end_store(client, rng.choice(open_stores))
            case _:
                pass

    def end_fetch(self, client: int, number: int) -> None:
        """Also one that has not been answered whole. A wrong block is told of."""
        fetching = self.clients[client].fetches.pop(number)
        bad = []
        for nth, (offset, content, sum) in fetching.seen.items():
            assert self.arena[offset] == content, f"slot {offset} was written while it was leased"
            if sum != sum_of(fetching.wanted[nth], content):
                bad.append(nth)
            else:
                assert content == content_of(fetching.wanted[nth])
        self.handle(Said(client, Fetched(number, tuple(bad))))

    def end_store(self, client: int, number: int) -> None:
        storing = self.clients[client].stores[number]
        assert storing.offsets is not None
        sums = []
        for facts, offset in zip(storing.blocks, storing.offsets, strict=True):
            if offset != NO_PLACE:
                assert self.arena[offset] == ("granted", client, number), "a slot was written that was granted"
            if offset == NO_PLACE or self.rng.random() < 0.1:
                sums.append(NO_PLACE)
                continue
            self.arena[offset] = content_of(facts.block)
            sums.append(sum_of(facts.block, self.arena[offset]))
        storing.is_written = True
        self.handle(Said(client, Written(number, tuple(sums))))

    def disturb(self) -> None:
        rng = self.rng
        client = rng.choice([WATCHER, *self.clients])
        tier, owner = rng.choice((HOST, DISK)), rng.choice(OWNERS)
        match rng.randrange(10):
            case 0 if client != WATCHER:
                del self.clients[client]
                self.gone(client)
            case 1:
                self.handle(HostResized(rng.randrange(self.config.host_bytes + 1)))
            case 2:
                self.handle(HostResized(self.config.host_bytes))
            case 3:
                self.say(Drop(self.some()), client)
            case 4 | 5:
                self.say(Pin(self.some(), rng.choice((-1.0, 0.0, 3.0)), owner), client)
            case 6:
                self.say(Promote(self.some()), client)
            case 7:
                self.seq, self.is_mirrored = None, False
                self.say(WatchTiers(True), WATCHER)
            case 8:
                what = rng.choice(
                    (
                        ("clear", f'{{"tier": "{tier}", "owner": "{owner}"}}'),
                        ("evict", '{"bytes": 200}'),
                        ("quota", f'{{"owner": "{owner}", "bytes": {rng.choice((0, 300, 2000))}}}'),
                        ("quota", f'{{"owner": "{owner}", "bytes": null}}'),
                        ("stat", "{}"),
                        ("list", '{"limit": 3}'),
                        ("flush", ""),
                        ("nonsense", "["),
                    )
                )
                self.say(Inquire(self.number(), *what), client)
            case 9:
                self.say(NoteCosts(rng.random(), rng.random()), client)

    def prompt(self) -> tuple[BlockFacts, ...]:
        rng = self.rng
        name = rng.randrange(PROMPTS)
        stop = rng.randrange(1, BLOCKS + 1)
        start = rng.randrange(stop)
        group = rng.randrange(len(self.config.block_bytes))
        return chain(name, stop, OWNERS[name % 3], group, start)

    def some(self) -> tuple[TierKey, ...]:
        wanted = [facts.block for facts in self.prompt() + (self.prompt() if self.rng.random() < 0.2 else ())]
        if self.rng.random() < 0.05:
            wanted += [(9, b"x" * 16), (-1, b"x" * 16), (0, b"short")]
        return tuple(wanted)

    # ---- what clients hear ----

    def check_answers(self) -> None:
        for client in list(self.answers):
            messages = self.answers.pop(client)
            mine = self.clients.get(client)
            for message in messages:
                if isinstance(message, TierEvents):
                    self.follow(message)
                elif mine is not None:
                    self.hear_one(client, mine, message)
                else:
                    assert client == WATCHER, message

    def hear_one(self, client: int, mine: Client, message: Any) -> None:
        match message:
            case Found():
                assert len(message.digits) == mine.finds.pop(message.number)
            case Leased():
                fetching = mine.fetches.get(message.number)
                assert fetching is not None and not fetching.is_last, message
                for nth, offset, sum in message.leases:
                    assert nth not in fetching.seen and nth not in fetching.missing
                    fetching.seen[nth] = offset, self.arena[offset], sum
                for nth in message.missing:
                    assert nth not in fetching.seen and nth not in fetching.missing
                    fetching.missing.add(nth)
                fetching.is_last = message.is_last
                if message.is_last:
                    assert len(fetching.seen) + len(fetching.missing) == len(fetching.wanted)
            case Granted():
                storing = mine.stores[message.number]
                assert storing.offsets is None
                storing.offsets = message.offsets
                for offset in message.offsets:
                    if offset != NO_PLACE:
                        self.arena[offset] = ("granted", client, message.number)
            case Stored():
                storing = mine.stores.pop(message.number)
                assert storing.is_written or set(storing.offsets or ()) <= {NO_PLACE}

    def follow(self, message: TierEvents) -> None:
        assert self.seq is None or message.seq == self.seq + 1
        self.seq = message.seq
        for event in message.events:
            keys = set(split_keys(event.keys))
            if event.kind == CLEARED:
                self.mirror = {HOST: set(), DISK: set()}
                self.is_mirrored = True
            elif event.kind == STORED:
                assert not keys & self.mirror[event.tier]
                self.mirror[event.tier] |= keys
            else:
                assert keys <= self.mirror[event.tier]
                self.mirror[event.tier] -= keys

    # ---- what always holds ----

    def check(self) -> None:
        manager = self.manager
        contents = manager.contents
        taken = dict(contents.slots.taken())
        uses: dict[int, str] = {}

        def use(offset: int, group: int, what: str) -> None:
            assert offset not in uses, f"slot {offset} is {uses[offset]} and {what}"
            assert taken[offset] == self.config.slot_bytes(group)
            uses[offset] = what

        for one in contents.host:
            use(one.place, one.kind.group, repr(one))
        leased = {id(one): one for one in manager.fetches.leases()}
        saving = {id(one): one for saver in manager.savers.values() for one in saver.under_way()}
        for one in {**leased, **saving}.values():
            assert one.holds > 0
            if not contents.host.holds(one):
                use(one.place, one.kind.group, f"{one!r}, which was dropped")
        for offset, facts in manager.stores.granted():
            use(offset, facts.block[0], "granted")
        for arrival in manager.arrivals.under_way():
            use(arrival.offset, arrival.facts.block[0], "being filled")
        assert set(uses) == set(taken), "a slot is nobody's, and not free"
        starts = sorted(taken)
        assert all(here + taken[here] <= there for here, there in pairwise(starts))
        assert not starts or starts[-1] + taken[starts[-1]] <= self.config.host_bytes

        for space in contents.spaces:
            blocks = list(space)
            assert space.used_bytes == sum(one.num_bytes for one in blocks)
            assert space.num_blocks == len(blocks)
            assert space.pinned_bytes == sum(one.num_bytes for one in blocks if one.is_pinned)
            assert all(one.block in contents.pins for one in blocks if one.is_pinned)
            for owner, owned in space.owners.items():
                assert owned.num_bytes == sum(one.num_bytes for one in blocks if one.owner == owner)
                held = any(one.is_pinned or one.holds for one in blocks if one.owner == owner)
                assert held or not space.beyond_quota(owner), f"{owner} is beyond its quota in {space.name}"
            for one in blocks:
                children = sum(other.parent == one.key and other.kind is one.kind for other in blocks)
                assert one.num_children <= children
            if self.is_mirrored:
                assert self.mirror[space.name] == set(space.blocks[0]), "watchers know something else"
        if contents.disk is not None:
            assert contents.disk.used_bytes + contents.disk_reserved <= self.config.disk_bytes
            places = [one.place for one in contents.disk]
            assert len(places) == len(set(places))
        assert len(contents.remembered) <= self.config.num_remembered

    def settle(self) -> None:
        """Nobody does anything new, and all ends: each request is answered."""
        self.fault_rate = 0.0
        for _ in range(1000):
            if self.jobs:
                self.end(self.rng.choice(self.jobs))
            elif self.manager.next_s is not None and self.manager.next_s < self.now + 1000:
                self.later(max(0.001, self.manager.next_s - self.now))
            elif not self.finish_one():
                break
        else:
            raise AssertionError("it goes on and on")
        for client, mine in self.clients.items():
            assert not mine.finds and not mine.fetches and not mine.stores, (client, vars(mine))
        manager = self.manager
        assert not len(manager.arrivals) and not len(manager.shared_lookups) and not len(manager.fetches)
        assert not len(manager.stores) and not manager.fetches.leased_bytes and not manager.stores.granted_bytes
        assert not manager.contents.disk_reserved
        assert all(not one.holds for space in manager.contents.spaces for one in space)

    def finish_one(self) -> bool:
        for client in list(self.clients):
            mine = self.clients[client]
            if unwritten := [one for one in mine.stores if not mine.stores[one].is_written]:
                self.end_store(client, unwritten[0])
                return True
            if answered := [one for one in mine.fetches if mine.fetches[one].is_last]:
                self.end_fetch(client, answered[0])
                return True
        return False


def sum_bytes(storm: Storm, tier: str) -> int:
    return sum(storm.config.block_bytes[facts.block[0]] for facts, _, _ in storm.kept[tier].values())


def run(seed: int, num_steps: int = 250) -> Storm:
    storm = Storm(seed)
    for _ in range(num_steps):
        storm.step()
    storm.settle()
    return storm


@pytest.mark.sampled(1 / 10)
@pytest.mark.parametrize("part", range(10))
def test_nothing_is_used_twice_lost_or_left_unanswered(part: int) -> None:
    """Slots, bytes, leases, quotas, watchers and answers, over hundreds of seeds."""
    for seed in range(part, NUM_SEEDS, 10):
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"replay: python tests/property/test_tiering.py {seed}") from error


if __name__ == "__main__":
    run(int(sys.argv[1]))
