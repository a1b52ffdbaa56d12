"""A KV store's manager with everything around it made of dicts: an arena, a disk, a remote store, a peer, and clients
who write down what they hear. Nothing happens by itself: jobs wait until they are run, time stands until it is set.

A block's content is a word made of its key, its checksum a number made of both; what lies at an offset is what was
last put there, by whomever.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenmill.core.tiers import (
    DISK,
    HOST,
    NO_PLACE,
    PEER,
    REMOTE,
    BlockFacts,
    DropFrom,
    Fetch,
    Fetched,
    Find,
    Found,
    Gone,
    Granted,
    Leased,
    LoadFrom,
    LookIn,
    Said,
    SaveTo,
    Store,
    Stored,
    Tick,
    TierEntry,
    TierInput,
    TierJob,
    TierJobEnded,
    TierKey,
    TierOpened,
    Told,
    Written,
)
from tokenmill.kv.tiers.config import TierConfig
from tokenmill.kv.tiers.manager import TierManager

MISSES = (NO_PLACE,)


def key(name: object) -> bytes:
    """Spread like the hashes that keys are."""
    return hashlib.blake2b(f"{name}".encode(), digest_size=16).digest()


def block(name: object, group: int = 0) -> TierKey:
    return group, key(name)


def chain(name: object, num: int, owner: str = "", group: int = 0, start: int = 0) -> tuple[BlockFacts, ...]:
    """Blocks of a prompt, from `start`."""
    keys = [key(f"{name}{nth}") for nth in range(num)]
    parents = [b"", *keys]
    return tuple(BlockFacts((group, keys[nth]), parents[nth], nth, owner) for nth in range(start, num))


def names(blocks: Iterable[BlockFacts]) -> tuple[TierKey, ...]:
    return tuple(facts.block for facts in blocks)


def content_of(block: TierKey) -> str:
    return f"{block[0]}:{block[1].hex()}"


def sum_of(block: TierKey, content: object) -> int:
    return zlib.crc32(f"{block}{content}".encode())


class Rig:
    """tiers: those below host memory. kept: tier -> place -> (facts, content, sum). answers: by client."""

    def __init__(self, *tiers: str, num_slots: int = 16, num_on_disk: int = 1000, **more: Any) -> None:
        more = {"admissions": dict.fromkeys((DISK, REMOTE), "all"), "block_bytes": (100,), **more}
        slot = max(more["block_bytes"])
        more.setdefault("disk_bytes", num_on_disk * slot if DISK in tiers else 0)
        more.setdefault("fills_disk", False)
        more.setdefault("policies", dict.fromkeys((HOST, DISK), "lru"))
        more.setdefault("host_bytes", num_slots * slot)
        self.config = TierConfig("numerics", tiers=tiers, slot_align=1, **more)
        self.manager = TierManager(self.config)
        self.now = 0.0
        self.arena: dict[int, object] = {}
        self.kept: dict[str, dict[int, tuple[BlockFacts, object, int]]] = {tier: {} for tier in tiers}
        self.jobs: list[TierJob] = []
        self.dropped: list[tuple[str, TierKey, int]] = []
        self.freed: list[tuple[int, int]] = []
        self.answers: dict[int, list[Any]] = {}
        self.num_places = -1
        self.num_said = 0
        for tier in tiers:
            self.handle(TierOpened(tier))

    def handle(self, event: TierInput) -> None:
        effects = self.manager.handle(event, self.now)
        self.jobs += effects.jobs
        self.freed += effects.freed
        for client, message in effects.answers:
            self.answers.setdefault(client, []).append(message)

    def say(self, message: Any, client: int = 1) -> None:
        self.handle(Said(client, message))

    def gone(self, client: int) -> None:
        self.handle(Gone(client))

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())

    def hear(self, kind: type, client: int = 1) -> list[Any]:
        """The messages of this kind so far, which are then forgotten."""
        heard = [message for message in self.answers.get(client, ()) if isinstance(message, kind)]
        self.answers[client] = [message for message in self.answers.get(client, ()) if not isinstance(message, kind)]
        return heard

    # ---- tiers ----

    def place_of(self, tier: str, block: TierKey) -> int:
        return next((place for place, kept in self.kept[tier].items() if kept[0].block == block), NO_PLACE)

    def put(self, tier: str, facts: BlockFacts, content: object = None) -> int:
        """As others do who write to a shared tier."""
        self.num_places += 1
        content = content_of(facts.block) if content is None else content
        self.kept[tier][self.num_places] = facts, content, sum_of(facts.block, content_of(facts.block))
        return self.num_places

    def run(self, job: TierJob) -> None:
        self.jobs.remove(job)
        kept = self.kept[job.tier]
        result: list[int] = []
        match job:
            case LookIn():
                result = [self.place_of(job.tier, wanted) for wanted in job.wanted]
            case LoadFrom():
                for wanted, place, offset in job.blocks:
                    facts, content, sum = kept.get(place, (None, None, NO_PLACE))
                    if facts is not None and facts.block == wanted:
                        self.arena[offset] = content
                        result.append(sum)
                    else:
                        result.append(NO_PLACE)
            case SaveTo():
                for facts, offset, sum in job.blocks:
                    self.num_places += 1
                    kept[self.num_places] = facts, self.arena[offset], sum
                    result.append(self.num_places)
            case DropFrom():
                for wanted, place in job.blocks:
                    self.dropped.append((job.tier, wanted, place))
                    kept.pop(place, None)
        self.handle(TierJobEnded(job, tuple(result)))

    def fail(self, job: TierJob) -> None:
        self.jobs.remove(job)
        self.handle(TierJobEnded(job, (), "the tier does not answer"))

    def run_all(self) -> None:
        while self.jobs:
            self.run(self.jobs[0])

    def jobs_of(self, kind: type) -> list[Any]:
        return [job for job in self.jobs if isinstance(job, kind)]

    # ---- clients ----

    def number(self) -> int:
        self.num_said += 1
        return self.num_said

    def find(self, wanted: Sequence[TierKey], client: int = 1, is_near: bool = False) -> str:
        number = self.number()
        self.say(Find(number, tuple(wanted), is_near), client)
        self.run_all()
        (found,) = self.hear(Found, client)
        assert found.number == number
        return str(found.digits)

    def begin_store(
        self, blocks: Sequence[BlockFacts], client: int = 1, is_shared: bool = False
    ) -> tuple[int, tuple[int, ...]]:
        """Its number, and the offsets that were granted."""
        number = self.number()
        self.say(Store(number, tuple(blocks), is_shared), client)
        (granted,) = self.hear(Granted, client)
        assert granted.number == number
        return number, granted.offsets

    def write(self, number: int, blocks: Sequence[BlockFacts], offsets: Sequence[int], client: int = 1) -> None:
        sums = []
        for facts, offset in zip(blocks, offsets, strict=True):
            if offset != NO_PLACE:
                self.arena[offset] = content_of(facts.block)
            sums.append(NO_PLACE if offset == NO_PLACE else sum_of(facts.block, content_of(facts.block)))
        self.say(Written(number, tuple(sums)), client)

    def store(self, blocks: Sequence[BlockFacts], client: int = 1, is_shared: bool = False) -> bool:
        number, offsets = self.begin_store(blocks, client, is_shared)
        self.write(number, blocks, offsets, client)
        self.run_all()
        (stored,) = self.hear(Stored, client)
        assert stored.number == number
        return bool(stored.is_kept)

    def begin_fetch(self, wanted: Sequence[TierKey], client: int = 1, is_near: bool = False) -> int:
        number = self.number()
        self.say(Fetch(number, tuple(wanted), is_near), client)
        return number

    def leased(self, number: int, wanted: Sequence[TierKey], client: int = 1) -> tuple[set[int], set[int], bool]:
        """Places that have been leased and are missing so far, each told of once; and whether all has been told. What
        is leased holds the content of its key."""
        leases: set[int] = set()
        missing: set[int] = set()
        is_last = False
        for message in [one for one in self.hear(Leased, client) if one.number == number]:
            assert not is_last, "told of after the end"
            is_last = message.is_last
            for nth, offset, sum in message.leases:
                assert nth not in leases | missing
                assert self.arena[offset] == content_of(wanted[nth]), (nth, self.arena[offset])
                assert sum == sum_of(wanted[nth], self.arena[offset])
                leases.add(nth)
            assert not set(message.missing) & (leases | missing)
            missing |= set(message.missing)
        return leases, missing, is_last

    def fetch(self, wanted: Sequence[TierKey], client: int = 1, is_near: bool = False) -> set[int]:
        """Places that are in, the fetch being over."""
        number = self.begin_fetch(wanted, client, is_near)
        self.run_all()
        leases, missing, is_last = self.leased(number, wanted, client)
        assert is_last and leases | missing == set(range(len(wanted)))
        self.say(Fetched(number), client)
        self.run_all()
        return leases

    def inquire(self, what: str, argument: str = "", client: int = 9) -> Any:
        """Told, as it was said."""
        from tokenmill.core.tiers import Inquire

        self.say(Inquire(self.number(), what, argument), client)
        (told,) = self.hear(Told, client)
        return told


def entries(blocks: Iterable[BlockFacts]) -> tuple[TierEntry, ...]:
    return tuple(
        TierEntry(facts, nth, sum_of(facts.block, content_of(facts.block))) for nth, facts in enumerate(blocks)
    )


Tell = Callable[[], None]
ALL_TIERS = (DISK, REMOTE, PEER)
