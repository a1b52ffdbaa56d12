"""What one tier of ours holds: host memory, or the disk.

    all blocks   by group and key
    policy       those that may be given up: neither pinned nor beyond their owner's quota
    owners       bytes of each; where there is a quota, the owner's blocks in the order of their last use

An owner beyond its quota gives up its own, used longest ago. Pinned blocks are kept as far as they take no more than
their share of the tier, and an owner's no more than its quota; one that comes when that is full is kept like any other.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence

from ...core.tiers import TierKey
from .config import EVERYBODY
from .events import EventLog
from .replacement import Replacement, TierBlock

_EXTENT_BYTES = 4 << 20
_FEWEST_EXTENTS = 16


class Owned:
    """What a tier holds of an owner. num_hits: blocks that were fetched from it."""

    __slots__ = ("num_blocks", "num_bytes", "num_hits", "pinned_bytes")

    def __init__(self) -> None:
        self.num_bytes = self.num_blocks = self.num_hits = self.pinned_bytes = 0


class TierSpace:
    """num_bytes: that it may hold. blocks: of each KV group, by key; to be looked at. Nothing here gives a block up by
    itself."""

    def __init__(
        self, name: str, num_bytes: int, num_groups: int, policy: Replacement, pinned_share: float, log: EventLog
    ) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.used_bytes = 0
        self.num_blocks = 0
        self.pinned_bytes = 0
        self.owners: dict[str, Owned] = {}
        self.counts: Counter[str] = Counter()
        self.quotas: dict[str, int] = {}
        self._pinned_share = pinned_share
        self._policy = policy
        self._log = log
        self.blocks: tuple[dict[bytes, TierBlock], ...] = tuple({} for _ in range(num_groups))
        self._limited: dict[str, OrderedDict[TierBlock, None]] = {}
        self._pinned: OrderedDict[TierBlock, None] = OrderedDict()
        self._num_held = 0

    def __iter__(self) -> Iterator[TierBlock]:
        for blocks in self.blocks:
            yield from blocks.values()

    def find(self, block: TierKey) -> TierBlock | None:
        group, key = block
        return self.blocks[group].get(key)

    def holds(self, block: TierBlock) -> bool:
        return self.blocks[block.kind.group].get(block.key) is block

    def add(self, block: TierBlock, now: float) -> None:
        blocks = self.blocks[block.kind.group]
        assert block.key not in blocks, block
        parent = blocks.get(block.parent)
        if parent is not None:
            parent.num_children += 1
            block.parent = parent.key  # one object for both
        blocks[block.key] = block
        self.num_blocks += 1
        self.used_bytes += block.num_bytes
        owned = self.owners.get(block.owner)
        if owned is None:
            owned = self.owners[block.owner] = Owned()
        owned.num_bytes += block.num_bytes
        owned.num_blocks += 1
        self._policy.add(block, now)
        self._num_held += block.holds > 0
        if self.quotas and self.quota(block.owner) is not None:
            self._limited.setdefault(block.owner, OrderedDict())[block] = None
        self._log.stored(self.name, block)

    def use(self, block: TierBlock, now: float) -> None:
        """It was fetched, or stored again."""
        block.num_uses += 1
        block.used_s = now
        if not block.is_pinned:
            self._policy.use(block, now)
        limited = self._limited.get(block.owner)
        if limited is not None and block in limited:
            limited.move_to_end(block)

    def refresh(self, block: TierBlock, now: float) -> None:
        """It will be fetched soon."""
        block.used_s = now
        if not block.is_pinned:
            self._policy.use(block, now)

    def remove(self, block: TierBlock) -> None:
        """The tier does not know it any more; who holds it still does."""
        blocks = self.blocks[block.kind.group]
        if block.is_pinned:
            self.unpin(block, block.used_s)
        self._policy.remove(block)
        del blocks[block.key]
        parent = blocks.get(block.parent)
        if parent is not None and parent.num_children:
            parent.num_children -= 1
            if not parent.num_children and not parent.is_pinned:
                self._policy.bare(parent)
        self.num_blocks -= 1
        self.used_bytes -= block.num_bytes
        self._num_held -= block.holds > 0
        owned = self.owners[block.owner]
        owned.num_bytes -= block.num_bytes
        owned.num_blocks -= 1
        if not owned.num_blocks:
            del self.owners[block.owner]
        if (limited := self._limited.get(block.owner)) is not None:
            limited.pop(block, None)
            if not limited:
                del self._limited[block.owner]
        self._log.removed(self.name, block)

    def hold(self, block: TierBlock) -> None:
        block.holds += 1
        if block.holds == 1 and not block.is_pinned:
            self._num_held += 1

    def release(self, block: TierBlock) -> bool:
        """Whether it is nobody's any more: nobody holds it, and the tier does not know it."""
        assert block.holds > 0, block
        block.holds -= 1
        if block.holds:
            return False
        if not self.holds(block):
            return True
        if not block.is_pinned:
            self._num_held -= 1
        return False

    def has_room_for(self, block: TierBlock) -> bool:
        """Whether the share of pins has room for it, or it is pinned."""
        return block.is_pinned or self.pinned_bytes + block.num_bytes <= self._pinned_share * self.num_bytes

    def pin(self, block: TierBlock) -> bool:
        """Whether it is kept from now on."""
        if block.is_pinned:
            return True
        owned = self.owners[block.owner]
        quota = self.quota(block.owner) if self.quotas else None
        is_beyond = quota is not None and owned.pinned_bytes + block.num_bytes > quota
        if is_beyond or not self.has_room_for(block):
            self.counts["pins_refused"] += 1
            return False
        self._policy.remove(block)
        self._num_held -= block.holds > 0
        self.pinned_bytes += block.num_bytes
        owned.pinned_bytes += block.num_bytes
        self._pinned[block] = None
        block.is_pinned = True
        return True

    def unpin(self, block: TierBlock, now: float) -> None:
        if block.is_pinned:
            block.is_pinned = False
            del self._pinned[block]
            self.pinned_bytes -= block.num_bytes
            self.owners[block.owner].pinned_bytes -= block.num_bytes
            self._num_held += block.holds > 0
            self._policy.add(block, now)

    def keep_pinned_share(self, now: float) -> None:
        """The tier may hold less than before: what was pinned first is as any other."""
        while self._pinned and self.pinned_bytes > self._pinned_share * self.num_bytes:
            self.unpin(next(iter(self._pinned)), now)

    def victim(self, now: float) -> TierBlock | None:
        """The block to give up first, which nobody holds."""
        if self.num_blocks - len(self._pinned) <= self._num_held:
            return None
        return self._policy.victim(_is_free, now)

    def pinned_victim(self) -> TierBlock | None:
        """The one that was pinned first, for who cannot do without."""
        return next(filter(_is_free, self._pinned), None)

    def quota(self, owner: str) -> int | None:
        return self.quotas.get(owner, self.quotas.get(EVERYBODY) if owner else None)

    def set_quota(self, owner: str, num_bytes: int | None) -> None:
        """None: no limit."""
        if num_bytes is None:
            self.quotas.pop(owner, None)
        else:
            self.quotas[owner] = num_bytes
        self._limited = {}
        limited = {name for name in self.owners if self.quota(name) is not None}
        for block in sorted((one for one in self if one.owner in limited), key=lambda one: (one.used_s, -one.depth)):
            self._limited.setdefault(block.owner, OrderedDict())[block] = None

    def beyond_quota(self, owner: str, num_more: int = 0) -> bool:
        """Whether the owner has more than it may, with so many bytes more."""
        quota = self.quota(owner) if self.quotas else None
        owned = self.owners.get(owner)
        return quota is not None and (owned.num_bytes if owned else 0) + num_more > quota

    def limited(self) -> list[OrderedDict[TierBlock, None]]:
        """The blocks of each owner that has a quota."""
        return list(self._limited.values())

    def victim_of(self, owner: str) -> TierBlock | None:
        """The owner's block to give up first; pinned ones are not."""
        limited = self._limited.get(owner, ())
        return next((block for block in limited if not block.is_pinned and not block.holds), None)


def _is_free(block: TierBlock) -> bool:
    return not block.holds


class HostSlots:
    """Slots of host memory: which part of the arena may be filled by whom; no bytes.

    The arena is cut into extents of equal size, a few MiB each. An extent belongs to blocks of one size while it holds
    any; empty ones are anybody's. Some of the empty are kept for whoever comes next, the others go back to the system.

    slot_bytes: of each KV group. num_bytes: of the arena.

    extent_bytes  of each extent
    freed         (offset, bytes) that hold nothing any more, for `TierEffects`
    """

    def __init__(self, slot_bytes: Sequence[int], num_bytes: int) -> None:
        self.extent_bytes = _extent_bytes(slot_bytes, num_bytes)
        self.freed: list[tuple[int, int]] = []
        self._slot_bytes = tuple(slot_bytes)
        self._extents: dict[int, _Extent] = {}  # by index, those in use
        self._open: dict[int, dict[int, None]] = {size: {} for size in slot_bytes}  # by slot size: with free slots
        self._spare: deque[int] = deque()  # empty, and not given back
        self._unused = list(range(num_bytes // self.extent_bytes - 1, -1, -1))
        self._most = len(self._unused)
        self._num_spare = max(1, self._most // 32)
        self.used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """That blocks may take together now, as far as slots allow."""
        return self._most * self.extent_bytes

    @property
    def num_excess(self) -> int:
        """Extents in use that are more than there may be, those on the way out not counted."""
        return sum(not extent.is_leaving for extent in self._extents.values()) - self._most

    def take(self, group: int) -> int | None:
        """The offset of a free slot, unless there is none."""
        size = self._slot_bytes[group]
        open_ = self._open[size]
        if not open_ and not self._begin_extent(size):
            return None
        index = next(reversed(open_))
        extent = self._extents[index]
        slot = extent.free.pop()
        extent.is_taken[slot] = True
        if not extent.free:
            del open_[index]
        self.used_bytes += size
        return extent.start + slot * size

    def give(self, offset: int) -> None:
        """Nobody reads or writes this slot any more."""
        index = offset // self.extent_bytes
        extent = self._extents[index]
        slot = (offset - extent.start) // extent.slot_bytes
        assert extent.is_taken[slot], offset
        extent.blocks[slot] = None
        extent.is_taken[slot] = False
        extent.free.append(slot)
        self.used_bytes -= extent.slot_bytes
        if extent.is_empty:
            self._end_extent(index)
        elif not extent.is_leaving:
            self._open[extent.slot_bytes][index] = None

    def put(self, block: TierBlock) -> None:
        """This block lies in its slot."""
        extent = self._extents[block.place // self.extent_bytes]
        extent.blocks[(block.place - extent.start) // extent.slot_bytes] = block

    def beside(self, block: TierBlock) -> list[TierBlock]:
        """The blocks of its extent, its own included."""
        extent = self._extents[block.place // self.extent_bytes]
        return [other for other in extent.blocks if other is not None]

    def suits(self, block: TierBlock, group: int) -> bool:
        """Whether the slot of this block would do for one of the group."""
        return self._slot_bytes[block.kind.group] == self._slot_bytes[group]

    def resize(self, num_bytes: int) -> None:
        """Use so much of the arena at most; `num_excess` tells what has to leave."""
        most = max(1, num_bytes // self.extent_bytes)
        self._most = min(most, len(self._extents) + len(self._spare) + len(self._unused))
        while self._spare and len(self._extents) + len(self._spare) > self._most:
            self._give_back(self._spare.popleft())
        excess = self.num_excess
        for index, extent in self._extents.items():
            if excess < 0 and extent.is_leaving:
                excess += 1
                extent.is_leaving = False
                if extent.free:
                    self._open[extent.slot_bytes][index] = None

    def leave(self, block: TierBlock) -> None:
        """Take no slot of this block's extent any more: it is given back when it is empty."""
        index = block.place // self.extent_bytes
        extent = self._extents[index]
        extent.is_leaving = True
        self._open[extent.slot_bytes].pop(index, None)

    def leave_rest(self) -> None:
        """As many extents as are too many have to go, though somebody uses all that is in them."""
        for index, extent in self._extents.items():
            if self.num_excess <= 0:
                break
            if not extent.is_leaving:
                extent.is_leaving = True
                self._open[extent.slot_bytes].pop(index, None)

    def is_leaving(self, block: TierBlock) -> bool:
        """Whether this block's extent is to go."""
        return self._extents[block.place // self.extent_bytes].is_leaving

    def taken(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the slots in use."""
        for extent in self._extents.values():
            for slot, is_taken in enumerate(extent.is_taken):
                if is_taken:
                    yield extent.start + slot * extent.slot_bytes, extent.slot_bytes

    def _begin_extent(self, size: int) -> bool:
        if len(self._extents) >= self._most or not (self._spare or self._unused):
            return False
        index = self._spare.pop() if self._spare else self._unused.pop()
        self._extents[index] = _Extent(index * self.extent_bytes, size, self.extent_bytes // size)
        self._open[size][index] = None
        return True

    def _end_extent(self, index: int) -> None:
        extent = self._extents.pop(index)
        self._open[extent.slot_bytes].pop(index, None)
        if extent.is_leaving:
            self._give_back(index)
            return
        self._spare.append(index)
        if len(self._spare) > self._num_spare or len(self._extents) + len(self._spare) > self._most:
            self._give_back(self._spare.popleft())

    def _give_back(self, index: int) -> None:
        self._unused.append(index)
        self.freed.append((index * self.extent_bytes, self.extent_bytes))


class _Extent:
    """blocks: what is in each slot, as far as it is known; free: slots, is_taken: of each. is_leaving: no slot of it is
    taken any more."""

    __slots__ = ("blocks", "free", "is_leaving", "is_taken", "slot_bytes", "start")

    def __init__(self, start: int, slot_bytes: int, num_slots: int) -> None:
        self.start = start
        self.slot_bytes = slot_bytes
        self.blocks: list[TierBlock | None] = [None] * num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.is_taken = bytearray(num_slots)
        self.is_leaving = False

    @property
    def is_empty(self) -> bool:
        return len(self.free) == len(self.blocks)


def _extent_bytes(slot_bytes: Sequence[int], num_bytes: int) -> int:
    """Some MiB of which slots of each size leave little over; less where that would be few extents."""
    largest = max(slot_bytes)
    fewest = max(1, min(-(-_EXTENT_BYTES // largest), num_bytes // (_FEWEST_EXTENTS * largest)))
    sizes = [num * largest for num in range(fewest, 2 * fewest)]
    return min(sizes, key=lambda size: (sum(size % slot / size for slot in set(slot_bytes)), size))
