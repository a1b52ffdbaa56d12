"""What the tiers of a KV store hold, as far as is known here, and how room is made.

    host        each block lies in a slot; one that is held stays there
    disk        each block has a place of the tier's own choosing
    remembered  what the shared tiers said

A block that is forgotten while it is held is nobody's: its slot is free when the last holder has let it go.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...core.block import KEY_BYTES
from ...core.tiers import DISK, HOST, NO_PLACE, PEER, REMOTE, TIERS, BlockFacts, DropFrom, NoteCosts, TierEntry, TierKey
from .config import TierConfig
from .events import EventLog, Outbox
from .pins import Pins
from .replacement import Costs, TierBlock, block_kinds
from .space import HostSlots, TierSpace

SHARED = (REMOTE, PEER)

_NOWHERE = "0"
_DIGITS = {tier: str(nth + 1) for nth, tier in enumerate(TIERS)}


class Contents:
    """disk_room: bytes that the disk has turned out to take, at most those it may. counts: tier -> what -> how often.
    evicted: told of each block that leaves host memory."""

    def __init__(self, config: TierConfig, outbox: Outbox) -> None:
        self.config = config
        self.log = EventLog(config.told_group, outbox)
        self.costs = Costs(config.block_size, 1e-3, 1e-6)
        self.kinds = block_kinds(config.block_bytes, self.costs)
        self.slots = HostSlots([config.slot_bytes(kind.group) for kind in self.kinds], config.host_bytes)
        self.host = self._space(HOST)
        self.disk = self._space(DISK) if DISK in config.tiers else None
        self.spaces = (self.host,) if self.disk is None else (self.host, self.disk)
        self.disk_room = config.disk_bytes
        self.disk_reserved = 0
        self.shared = tuple(tier for tier in config.tiers if tier in SHARED)
        self.remembered = Remembered(config.present_s, config.absent_s, config.num_remembered)
        self.pins = Pins(self.spaces, self._keep_quota)
        self.counts: dict[str, Counter[str]] = {tier: Counter() for tier in (HOST, *config.tiers)}
        for space in self.spaces:
            space.counts = self.counts[space.name]
        self.evicted: Callable[[TierBlock], None] = lambda block: None
        self._outbox = outbox
        self._largest = max(config.slot_bytes(kind.group) for kind in self.kinds)
        self._nothing: tuple[dict[bytes, TierBlock], ...] = tuple({} for _ in self.kinds)

    def note_costs(self, costs: NoteCosts) -> None:
        self.costs.token_s, self.costs.position_s = max(0.0, costs.token_s), max(0.0, costs.position_s)

    def share_bytes(self, share: float) -> int:
        """Of host memory as large as it is now; one block at least."""
        return max(self._largest, int(share * self.slots.num_bytes))

    def is_valid(self, block: TierKey) -> bool:
        """Whether there may be such a block at all."""
        return 0 <= block[0] < len(self.kinds) and len(block[1]) == KEY_BYTES

    def is_here(self, block: TierKey) -> bool:
        """In a tier of ours."""
        return self.host.find(block) is not None or (self.disk is not None and self.disk.find(block) is not None)

    def digits(self, wanted: Sequence[TierKey], now: float, is_near: bool, unknown: list[tuple[str, TierKey]]) -> str:
        """Of each block the nearest tier that has it, as in `Found`. Shared tiers of which that is not known are added
        to `unknown`, with the block, as far as they would be nearer."""
        in_host, on_disk = self.host.blocks, self.disk.blocks if self.disk is not None else self._nothing
        shared = () if is_near else self.shared
        digits: list[str] = []
        for block in wanted:
            group, key = block
            if not 0 <= group < len(in_host):
                digits.append(_NOWHERE)
            elif key in in_host[group]:
                digits.append(_DIGITS[HOST])
            elif key in on_disk[group]:
                digits.append(_DIGITS[DISK])
            else:
                digits.append(self._shared_digit(block, now, shared, unknown) if shared else _NOWHERE)
        return "".join(digits)

    def follow(self, wanted: Sequence[TierKey]) -> Iterator[tuple[int, TierBlock | BlockFacts]]:
        """Of blocks in the order of their prompt those that may be, with their places in `wanted`: the block of host
        memory, or what is known of one that is not there. Where it is not known what they follow, the first are taken
        to begin the prompt."""
        before: dict[int, TierBlock | BlockFacts] = {}  # by group
        for nth, block in enumerate(wanted):
            if self.is_valid(block):
                found: TierBlock | BlockFacts | None = self.host.find(block)
                if found is None:
                    on_disk = self.disk.find(block) if self.disk is not None else None
                    found = on_disk.facts if on_disk is not None else _after(before.get(block[0]), block, nth)
                before[block[0]] = found
                yield nth, found

    def take_slot(self, group: int, now: float, is_urgent: bool = False) -> int | None:
        """The offset of a slot, for which others are given up; also pinned ones if it `is_urgent`."""
        while (offset := self.slots.take(group)) is None:
            victim = self.host.victim(now)
            if victim is None and is_urgent:
                victim = self.host.pinned_victim()
            if victim is None:
                return None
            if self.slots.suits(victim, group):
                self._evict(victim)
            else:
                self._clear_extent(victim, is_urgent)
        return offset

    def arrive(self, facts: BlockFacts, offset: int, sum: int, now: float) -> TierBlock:
        """The slot is filled: a block of host memory from now on, which the caller holds until it has `settled`."""
        block = TierBlock(self.kinds[facts.block[0]], facts, offset, sum, now)
        on_disk = self.disk.find(facts.block) if self.disk is not None else None
        if on_disk is not None:
            block.key, block.parent, block.num_uses = on_disk.key, on_disk.parent, on_disk.num_uses
            block.is_shared = on_disk.is_shared
        self.slots.put(block)
        self.host.add(block, now)
        self.pins.arrived(self.host, block)
        self.host.hold(block)
        return block

    def settled(self, block: TierBlock, now: float) -> None:
        self.release(block, now)

    def release(self, block: TierBlock, now: float) -> None:
        """One holder of a block of host memory less."""
        if self.host.release(block):
            self.slots.give(block.place)
        elif not block.holds and self.slots.is_leaving(block):
            self._evict(block)
        elif self.host.quotas and not block.holds:
            self._keep_quota(self.host, block, now)

    def release_on_disk(self, block: TierBlock, now: float) -> None:
        if self.disk is not None and not self.disk.release(block) and self.disk.quotas:
            self._keep_quota(self.disk, block, now)

    def make_disk_room(self, num_bytes: int, owner: str, now: float) -> bool:
        """Give up what it takes so that the disk has room for so much more of this owner's."""
        disk = self.disk
        assert disk is not None
        dropped: list[tuple[TierKey, int]] = []
        while True:
            if disk.beyond_quota(owner, num_bytes):
                victim = disk.victim_of(owner)
            elif disk.used_bytes + self.disk_reserved + num_bytes > self.disk_room:
                victim = disk.victim(now)
            else:
                break
            if victim is None:
                break
            disk.counts["evictions"] += 1
            dropped.append(self._leave_disk(victim))
        self.drop_from(DISK, dropped)
        return not disk.beyond_quota(owner, num_bytes) and (
            disk.used_bytes + self.disk_reserved + num_bytes <= self.disk_room
        )

    def saved_on_disk(self, block: TierBlock, place: int, now: float) -> None:
        disk = self.disk
        assert disk is not None
        kept = TierBlock(block.kind, block.facts, place, block.sum, now)
        kept.key, kept.parent = block.key, block.parent
        kept.num_uses, kept.used_s, kept.is_shared = block.num_uses, block.used_s, block.is_shared
        disk.add(kept, now)
        self.pins.arrived(disk, kept)
        if disk.quotas:
            self.make_disk_room(0, kept.owner, now)

    def saved_remotely(self, block: TierBlock, place: int, now: float) -> None:
        for space in self.spaces:
            if (found := space.find(block.block)) is not None:
                found.is_shared = True
        self.remembered.note(REMOTE, block.block, place, now)

    def open_disk(self, entries: Iterable[TierEntry], now: float) -> None:
        """What the disk has kept, oldest first. What it has twice, or cannot be, is dropped."""
        disk = self.disk
        if disk is None:
            return
        bad: list[tuple[TierKey, int]] = []
        for facts, place, sum in entries:
            if not self.is_valid(facts.block) or disk.find(facts.block) is not None or sum < 0:
                bad.append((facts.block, place))
                continue
            block = TierBlock(self.kinds[facts.block[0]], facts, place, sum, now)
            disk.add(block, now)
            self.pins.arrived(disk, block)
        self.drop_from(DISK, bad)
        if disk.used_bytes > self.disk_room:
            self.make_disk_room(0, "", now)

    def forget(self, blocks: Sequence[TierKey], is_near: bool) -> int:
        """In every tier, or in ours alone. How many were in one of ours."""
        num_known = 0
        places: list[tuple[TierKey, int]] = []
        for block in blocks:
            in_host = self.host.find(block)
            if in_host is not None:
                self._leave_host(in_host)
            on_disk = self.disk.find(block) if self.disk is not None else None
            if on_disk is not None:
                places.append(self._leave_disk(on_disk))
            num_known += in_host is not None or on_disk is not None
        self.drop_from(DISK, places)
        for tier in () if is_near else self.shared:
            self.drop_from(tier, [(block, self.remembered.forget(tier, block)) for block in blocks])
        return num_known

    def clear(self, tier: str, owner: str | None) -> int:
        """Forget what one of our tiers holds of an owner; None: all. What somebody holds leaves the slot later."""
        space = self.host if tier == HOST else self.disk
        gone = [] if space is None else [block for block in space if owner is None or block.owner == owner]
        if space is self.host:
            for block in gone:
                self._leave_host(block)
        else:
            self.drop_from(DISK, [self._leave_disk(block) for block in gone])
        return len(gone)

    def lose(self, tier: str, blocks: Sequence[TierKey], now: float) -> None:
        """It has turned out that a tier below does not have these, or what it has is wrong."""
        places: list[tuple[TierKey, int]] = []
        for block in blocks:
            on_disk = self.disk.find(block) if tier == DISK and self.disk is not None else None
            if on_disk is not None:
                places.append(self._leave_disk(on_disk))
            elif tier in self.shared:
                self.remembered.note(tier, block, NO_PLACE, now)
        self.drop_from(tier, places)

    def drop_from(self, tier: str, blocks: Sequence[tuple[TierKey, int]]) -> None:
        if blocks:
            self._outbox.ask(lambda number: DropFrom(number, tier, tuple(blocks)))

    def resize_host(self, num_bytes: int, now: float) -> None:
        self.slots.resize(num_bytes)
        self.host.num_bytes = self.slots.num_bytes
        self.host.keep_pinned_share(now)
        for _ in range(max(0, self.slots.num_excess)):
            victim = self.host.victim(now) or self.host.pinned_victim()
            if victim is None:
                self.slots.leave_rest()
                break
            self.slots.leave(victim)
            self._clear_extent(victim, True)

    def set_quota(self, space: TierSpace, owner: str, num_bytes: int | None, now: float) -> None:
        """None: no limit."""
        space.set_quota(owner, num_bytes)
        for block in [next(iter(blocks)) for blocks in space.limited()]:
            self._keep_quota(space, block, now)

    def give_up(self, tier: str, num_bytes: int, now: float) -> int:
        """Blocks of one of our tiers that are given up to have so many bytes fewer there."""
        space, num = self.host if tier == HOST else self.disk, 0
        if space is None:
            return 0
        most = max(0, space.used_bytes - num_bytes)
        gone: list[tuple[TierKey, int]] = []
        while space.used_bytes > most and (victim := space.victim(now)) is not None:
            num += 1
            if space is self.host:
                self._evict(victim)
            else:
                space.counts["evictions"] += 1
                gone.append(self._leave_disk(victim))
        self.drop_from(DISK, gone)
        return num

    def _shared_digit(
        self, block: TierKey, now: float, shared: Sequence[str], unknown: list[tuple[str, TierKey]]
    ) -> str:
        if len(block[1]) == KEY_BYTES:
            for tier in shared:
                place = self.remembered.find(tier, block, now)
                if place is None:
                    unknown.append((tier, block))
                elif place != NO_PLACE:
                    return _DIGITS[tier]
        return _NOWHERE

    def _space(self, tier: str) -> TierSpace:
        config = self.config
        num_bytes = self.slots.num_bytes if tier == HOST else config.disk_bytes
        policy = config.replacement(tier)
        space = TierSpace(tier, num_bytes, len(config.block_bytes), policy, config.pinned_share, self.log)
        space.quotas = dict(config.quotas.get(tier, {}))
        return space

    def _keep_quota(self, space: TierSpace, block: TierBlock, now: float) -> None:
        """Of the block's owner, in host memory or on disk."""
        if space is not self.host:
            self.make_disk_room(0, block.owner, now)
            return
        while space.beyond_quota(block.owner):
            victim = space.victim_of(block.owner)
            if victim is None:
                return
            self._evict(victim)

    def _leave_disk(self, block: TierBlock) -> tuple[TierKey, int]:
        assert self.disk is not None
        self.disk.remove(block)
        return block.block, block.place

    def _clear_extent(self, victim: TierBlock, and_pinned: bool) -> None:
        for block in self.slots.beside(victim):
            if not block.holds and self.host.holds(block) and (and_pinned or not block.is_pinned):
                self._evict(block)

    def _evict(self, block: TierBlock) -> None:
        self.host.counts["evictions"] += 1
        self._leave_host(block)

    def _leave_host(self, block: TierBlock) -> None:
        self.host.remove(block)
        self.evicted(block)
        if not block.holds:
            self.slots.give(block.place)


def _after(parent: TierBlock | BlockFacts | None, block: TierKey, nth: int) -> BlockFacts:
    if parent is None:
        return BlockFacts(block, b"", nth)
    key = parent.key if isinstance(parent, TierBlock) else parent.block[1]
    return BlockFacts(block, key, parent.depth + 1)


class Remembered:
    """What shared tiers said of blocks, for a while: others write there and take away, so that it is never certain.

    present_s, absent_s: how long it is believed that a tier has a block, or has it not; num: most blocks."""

    def __init__(self, present_s: float, absent_s: float, num: int) -> None:
        self._present_s = present_s
        self._absent_s = absent_s
        self._num = num
        self._places: OrderedDict[tuple[str, TierKey], tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, tier: str, block: TierKey, now: float) -> int | None:
        """The place there; NO_PLACE: it is not there; None: that is not known."""
        place, until = self._places.get((tier, block), (None, 0.0))
        if place is None or until > now:
            return place
        del self._places[tier, block]
        return None

    def note(self, tier: str, block: TierKey, place: int, now: float) -> None:
        self._places.pop((tier, block), None)
        self._places[tier, block] = place, now + (self._absent_s if place == NO_PLACE else self._present_s)
        if len(self._places) > self._num:
            self._places.popitem(last=False)

    def forget(self, tier: str, block: TierKey) -> int:
        """Its place, if that was known."""
        return self._places.pop((tier, block), (NO_PLACE, 0.0))[0]
