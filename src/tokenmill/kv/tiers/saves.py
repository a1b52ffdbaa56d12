"""Blocks on their way from host memory to a tier below it that is written to.

    considered  at each use, as long as the tier has it not: admitted or refused. As long as the disk has room, all are
                admitted: nothing is pushed out for them, and so each byte of it is written once. While writing
                is held back, they would only be in the way of those that are worth it
    queued      in the order of admission; it may still be given up, and then is lost to the tier
    saved       held in its slot until the job has ended

So what is given up from host memory has been written before, as far as it was worth it and the tier was fast enough.
Writing is bounded: by jobs at once, and by bytes a second (`_Rate`). A tier that keeps nothing is left alone for a
while, longer each time; a disk that takes less than it should is taken to be as large as what it holds. A hand-over
that others wait for goes before the queue, and is never refused for its rate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from ...core.block import BlockKey
from ...core.tiers import DISK, NO_PLACE, SaveTo, TierKey
from .contents import Contents
from .events import Outbox
from .replacement import TierBlock
from .space import TierSpace

Tell = Callable[[bool, float], None]
"""Told whether the tier has a block, and now."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
MOMENT_S = 10.0


class Saver:
    """Of one tier. is_open: the tier is ready. is_hurried: what is queued is not held back. next_s: when there is
    something to write that is held back now."""

    def __init__(self, tier: str, contents: Contents, outbox: Outbox) -> None:
        config = contents.config
        self.tier = tier
        self.is_open = False
        self.is_hurried = False
        self.next_s: float | None = None
        self._contents = contents
        self._outbox = outbox
        self._admission = config.admission(tier)
        self._rate = _Rate(config.write_bytes_s.get(tier), config.burst_s)
        self._queue: OrderedDict[TierBlock, list[Tell]] = OrderedDict()
        self._urgent: OrderedDict[TierBlock, list[Tell]] = OrderedDict()
        self._saving: dict[int, tuple[list[TierBlock], float]] = {}
        self._under_way: dict[TierBlock, list[Tell]] = {}
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._most_bytes = max(max(config.block_bytes), min(config.job_bytes, contents.slots.num_bytes // 16))

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._urgent and not self._saving

    @property
    def num_queued(self) -> int:
        return len(self._queue) + len(self._urgent)

    def under_way(self) -> list[TierBlock]:
        """Blocks that are held."""
        return [*self._urgent, *(block for blocks, _ in self._saving.values() for block in blocks)]

    def has(self, block: TierBlock) -> bool:
        """Whether the tier has it, as far as is known."""
        if self.tier == DISK:
            return self._contents.disk is not None and self._contents.disk.find(block.block) is not None
        return block.is_shared

    def has_block(self, block: TierKey, now: float) -> bool:
        """As `has`, of a block that is not in host memory."""
        if self.tier == DISK:
            return self._contents.disk is not None and self._contents.disk.find(block) is not None
        return self._contents.remembered.find(self.tier, block, now) not in (None, NO_PLACE)

    def consider(self, block: TierBlock, now: float, is_forced: bool = False) -> None:
        """A block of host memory has been used; `is_forced`: or is to be written whatever it is worth."""
        if block in self._queue or block in self._urgent or block in self._under_way or self.has(block):
            return
        is_kept = is_forced or block.block in self._contents.pins or self._is_roomy(block)
        if is_kept or self._admission.admits(block, now):
            self._queue[block] = []
        else:
            self._contents.counts[self.tier]["refused"] += 1

    def save(self, block: TierBlock, tell: Tell) -> None:
        """Write it before others; `tell` whether the tier has it."""
        if block in self._under_way:
            self._under_way[block].append(tell)
            return
        if block not in self._urgent:
            self._contents.host.hold(block)
        self._queue.pop(block, None)
        self._urgent.setdefault(block, []).append(tell)

    def evicted(self, block: TierBlock) -> None:
        """It leaves host memory."""
        if block in self._queue:
            del self._queue[block]
            self._contents.counts[self.tier]["lost"] += 1

    def step(self, now: float) -> None:
        """Write what may be written now."""
        self.next_s = None
        self.is_hurried = self.is_hurried and not self.is_idle
        while self.is_open and len(self._saving) < self._contents.config.saves:
            if self._urgent:
                self._begin(self._urgent, now)
            elif self._queue:
                start_s = now if self.is_hurried else max(self._paused_until, self._rate.wait_until(now))
                if start_s > now:
                    self.next_s = start_s
                    return
                self._begin(self._queue, now)
            else:
                return

    def ended(self, job: SaveTo, result: Sequence[int], error: str, now: float) -> None:
        blocks, started_s = self._saving.pop(job.number, ([], 0.0))
        contents, counts = self._contents, self._contents.counts[self.tier]
        places = result if not error and len(result) == len(blocks) else [NO_PLACE] * len(blocks)
        counts["save_ms"] += round(1000 * (now - started_s))
        counts["save_errors"] += bool(error)
        for block, place in zip(blocks, places, strict=True):
            if self.tier == DISK:
                contents.disk_reserved -= block.num_bytes
            tells = self._under_way.pop(block)
            is_kept = place != NO_PLACE
            if is_kept:
                counts["saves"] += 1
                counts["save_bytes"] += block.num_bytes
                is_kept = self._note(block, place, now)
            else:
                counts["save_misses"] += 1
            contents.release(block, now)
            for tell in tells:
                tell(is_kept, now)
        self._learn(any(place == NO_PLACE for place in places), bool(error), now)

    def _note(self, block: TierBlock, place: int, now: float) -> bool:
        """Whether what has been written is wanted still."""
        contents = self._contents
        if not contents.host.holds(block):
            contents.drop_from(self.tier, [(block.block, place)])
            return False
        if self.tier == DISK:
            contents.saved_on_disk(block, place, now)
        else:
            contents.saved_remotely(block, place, now)
        return True

    def _learn(self, is_short: bool, is_error: bool, now: float) -> None:
        contents = self._contents
        if not is_short:
            self._pause_s = 0.0
            if self.tier == DISK:
                most = contents.config.disk_bytes
                contents.disk_room = min(most, contents.disk_room + most // 1000)
            return
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._paused_until = now + self._pause_s
        if self.tier == DISK and contents.disk is not None and not is_error:
            most = max(contents.config.block_bytes)
            contents.disk_room = max(most, contents.disk.used_bytes + contents.disk_reserved)

    def _begin(self, queue: OrderedDict[TierBlock, list[Tell]], now: float) -> None:
        contents = self._contents
        blocks: list[TierBlock] = []
        room = self._most_bytes
        while queue:
            block = next(iter(queue))
            if blocks and block.num_bytes > room:
                break
            tells = queue.pop(block)
            if queue is self._queue:
                contents.host.hold(block)
            is_there, is_wanted = self.has(block), contents.host.holds(block)
            if is_there or not is_wanted or not self._has_room(block, now):
                contents.counts[self.tier]["no_room"] += is_wanted and not is_there
                contents.release(block, now)
                for tell in tells:
                    tell(is_there, now)
                continue
            self._under_way[block] = tells
            blocks.append(block)
            room -= block.num_bytes
        if blocks:
            num_bytes = sum(block.num_bytes for block in blocks)
            self._rate.take(num_bytes, now)
            saved = tuple((block.facts, block.place, block.sum) for block in blocks)
            number = self._outbox.ask(lambda number: SaveTo(number, self.tier, saved))
            self._saving[number] = blocks, now

    def _is_roomy(self, block: TierBlock) -> bool:
        """Whether the disk, with all that is queued, would push nothing out for it."""
        contents = self._contents
        if self.tier != DISK or not contents.config.fills_disk or contents.disk is None or self.next_s is not None:
            return False
        queued_bytes = (len(self._queue) + 1) * max(contents.config.block_bytes)
        return contents.disk.used_bytes + contents.disk_reserved + queued_bytes <= contents.disk_room

    def _has_room(self, block: TierBlock, now: float) -> bool:
        if self.tier != DISK:
            return True
        if not self._contents.make_disk_room(block.num_bytes, block.owner, now):
            return False
        self._contents.disk_reserved += block.num_bytes
        return True


class _Rate:
    """A bucket of bytes that fills by `bytes_s`; it may be overdrawn by one job."""

    def __init__(self, bytes_s: float | None, burst_s: float) -> None:
        self._bytes_s = bytes_s
        self._most = (bytes_s or 0.0) * burst_s
        self._left = self._most
        self._at_s: float | None = None

    def wait_until(self, now: float) -> float:
        """When the next job may go: at most `now` if that is at once."""
        if self._bytes_s is None:
            return now
        self._fill(now)
        return now if self._left > 0 else now - self._left / self._bytes_s + 1e-3

    def take(self, num_bytes: int, now: float) -> None:
        if self._bytes_s is not None:
            self._fill(now)
            self._left -= num_bytes

    def _fill(self, now: float) -> None:
        if self._at_s is not None and self._bytes_s is not None:
            self._left = min(self._most, self._left + max(0.0, now - self._at_s) * self._bytes_s)
        self._at_s = now


class Touches:
    """What follows when blocks are stored or fetched: they are younger in each tier, and may be worth writing below
    it.

    Whoever uses a block of a prompt uses all before it, though it may have those in its pools and never asks for them.
    So they are used too: a block is never older than what follows it, and the head of many prompts counts for each of
    them. A block that was used a moment ago has been told of already.
    """

    def __init__(self, contents: Contents, savers: Collection[Saver]) -> None:
        self._contents = contents
        self._savers = savers

    def use(self, block: TierKey, now: float) -> None:
        """It was fetched, or stored again."""
        contents = self._contents
        for space in contents.spaces:
            if (found := space.find(block)) is not None:
                space.use(found, now)
                if space is contents.host:
                    self.consider(found, now)

    def consider(self, block: TierBlock, now: float) -> None:
        """A block of host memory has come, or was used."""
        for saver in self._savers:
            saver.consider(block, now)

    def use_before(self, blocks: Iterable[tuple[TierKey, BlockKey]], now: float) -> None:
        """What is before these blocks (with the block before each), which were used in this order."""
        last: TierKey | None = None
        for block, parent in blocks:
            if last != (block[0], parent):
                for space in self._contents.spaces:
                    self._use_before(space, block[0], parent, now)
            last = block

    def _use_before(self, space: TierSpace, group: int, key: BlockKey, now: float) -> None:
        blocks = space.blocks[group]
        while (found := blocks.get(key)) is not None and found.used_s < now - MOMENT_S:
            space.use(found, now)
            if space is self._contents.host:
                self.consider(found, now)
            key = found.parent
