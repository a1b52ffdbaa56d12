"""Stores: blocks that clients compute and give, first into slots that they fill.

    granted  slots are taken, and nobody else computes or loads these blocks meanwhile
    written  the blocks are host memory's
    shared   where that was asked for: until all are in the farthest tier that others share

What is here, or comes already, is granted no slot, and neither is what has no room: a store never waits. A client that
goes has written nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...core.tiers import DISK, HOST, NO_PLACE, REMOTE, BlockFacts, Granted, Store, Stored, Written
from .arrivals import Arrival, Arrivals
from .contents import Contents
from .deadlines import Deadlines
from .events import Outbox
from .replacement import MOST_SUM, TierBlock
from .saves import Saver, Touches

MOST_STORES = 4096
"""Of a client at once."""


class Storing:
    """slots: those that its client fills, with who waits for the blocks. unsaved: blocks, by place, that
    the farthest tier does not have yet."""

    __slots__ = ("_stores", "client", "is_kept", "is_over", "is_written", "message", "num_bytes", "slots", "unsaved")

    def __init__(self, stores: Stores, client: int, message: Store) -> None:
        self._stores = stores
        self.client = client
        self.message = message
        self.slots: dict[int, tuple[int, Arrival]] = {}
        self.num_bytes = 0
        self.is_written = False
        self.is_kept = True
        self.is_over = False
        self.unsaved: dict[int, None] = {}

    def arrived(self, nth: int, block: TierBlock, now: float) -> None:
        self._stores.share(self, nth, block)

    def missed(self, nth: int, now: float) -> None:
        self._stores.is_saved(self, nth, False)


class Stores:
    def __init__(
        self, contents: Contents, arrivals: Arrivals, touches: Touches, savers: Mapping[str, Saver], outbox: Outbox
    ) -> None:
        self.granted_bytes = 0
        self._contents = contents
        self._arrivals = arrivals
        self._touches = touches
        self._outbox = outbox
        config = contents.config
        farthest = REMOTE if REMOTE in config.tiers else DISK if DISK in config.tiers else HOST
        self._saver = savers.get(farthest)
        self._stores: dict[int, dict[int, Storing]] = {}
        self._client_granted: dict[int, int] = {}
        self._deadlines: Deadlines[Storing] = Deadlines(lambda storing: storing.is_over)  # of shared ones

    def __len__(self) -> int:
        return sum(map(len, self._stores.values()))

    @property
    def next_s(self) -> float | None:
        return self._deadlines.next_s

    def granted(self) -> list[tuple[int, BlockFacts]]:
        """Slots that are being filled by clients, and with what."""
        stores = [one for all_ in self._stores.values() for one in all_.values() if not one.is_written]
        return [(offset, one.message.blocks[nth]) for one in stores for nth, (offset, _) in one.slots.items()]

    def store(self, client: int, message: Store, now: float) -> None:
        mine = self._stores.setdefault(client, {})
        if message.number in mine:
            return
        storing = Storing(self, client, message)
        mine[message.number] = storing
        offsets = [NO_PLACE] * len(message.blocks)
        if len(mine) <= MOST_STORES:
            for nth, facts in enumerate(message.blocks):
                offsets[nth] = self._grant(storing, nth, facts, now)
        else:
            storing.is_kept = False
        self._outbox.say(client, Granted(message.number, tuple(offsets)))
        if message.is_shared:
            self._deadlines.add(now + self._contents.config.fetch_timeout_s, storing)
        if not storing.slots:
            self._written(storing, (), now)

    def written(self, client: int, message: Written, now: float) -> None:
        storing = self._stores.get(client, {}).get(message.number)
        if storing is not None and not storing.is_written:
            self._written(storing, message.sums, now)

    def gone(self, client: int, now: float) -> None:
        gone = list(self._stores.pop(client, {}).values())
        for storing in gone:
            storing.is_over = True
        for storing in gone:
            if not storing.is_written:
                self._take_back(storing)
                for offset, arrival in storing.slots.values():
                    self._contents.slots.give(offset)
                    self._arrivals.given_up(arrival, now)

    def lapse(self, now: float) -> None:
        """What others wait for has not come where they find it in time."""
        for storing in self._deadlines.due(now):
            if storing.is_written:
                storing.is_kept = False
                self._end(storing)

    def share(self, storing: Storing, nth: int, block: TierBlock) -> None:
        """A block is in host memory, and has to go on."""
        if self._saver is None or self._saver.has(block):
            self.is_saved(storing, nth, True)
        elif not self._saver.is_open:
            self.is_saved(storing, nth, False)
        else:
            self._saver.save(block, lambda is_kept, now: self.is_saved(storing, nth, is_kept))

    def is_saved(self, storing: Storing, nth: int, is_kept: bool) -> None:
        if nth in storing.unsaved:
            del storing.unsaved[nth]
            storing.is_kept &= is_kept
            self._end_if_done(storing)

    def _grant(self, storing: Storing, nth: int, facts: BlockFacts, now: float) -> int:
        contents, block = self._contents, facts.block
        if not contents.is_valid(block):
            storing.is_kept = False
            return NO_PLACE
        if contents.is_here(block):
            self._touches.use(block, now)
            return NO_PLACE
        if self._arrivals.is_coming(block):
            return NO_PLACE
        size = contents.kinds[block[0]].num_bytes
        mine = self._client_granted.get(storing.client, 0)
        share = contents.config.grant_share
        if mine + size > contents.share_bytes(share / 2) or self.granted_bytes + size > contents.share_bytes(share):
            offset = None
        else:
            offset = contents.take_slot(block[0], now)
        if offset is None:
            contents.host.counts["refused"] += 1
            storing.is_kept = False
            return NO_PLACE
        storing.slots[nth] = offset, self._arrivals.expect(facts)
        storing.num_bytes += size
        self._client_granted[storing.client] = mine + size
        self.granted_bytes += size
        return offset

    def _written(self, storing: Storing, sums: tuple[int, ...], now: float) -> None:
        storing.is_written = True
        self._take_back(storing)
        contents, blocks = self._contents, storing.message.blocks
        new: list[TierBlock] = []
        for nth, (offset, arrival) in storing.slots.items():
            sum = sums[nth] if len(sums) == len(blocks) else NO_PLACE
            if not 0 <= sum <= MOST_SUM or arrival.is_over:
                storing.is_kept = False
                contents.slots.give(offset)
                self._arrivals.given_up(arrival, now)
                continue
            new.append(contents.arrive(blocks[nth], offset, sum, now))
            contents.host.counts["saves"] += 1
            contents.host.counts["save_bytes"] += new[-1].num_bytes
            self._arrivals.appeared(arrival, new[-1], now)
            self._touches.consider(new[-1], now)
        self._touches.use_before(
            ((facts.block, facts.parent) for facts in blocks if contents.is_valid(facts.block)), now
        )
        if storing.message.is_shared:
            self._share_all(storing, now)
        for arrived in new:
            contents.settled(arrived, now)
        self._end_if_done(storing)

    def _share_all(self, storing: Storing, now: float) -> None:
        contents = self._contents
        storing.unsaved = {
            nth: None for nth, facts in enumerate(storing.message.blocks) if contents.is_valid(facts.block)
        }
        for nth in list(storing.unsaved):
            facts = storing.message.blocks[nth]
            found = contents.host.find(facts.block)
            if found is not None:
                self.share(storing, nth, found)
            elif self._saver is not None and self._saver.has_block(facts.block, now):
                self.is_saved(storing, nth, True)
            else:
                self._arrivals.bring(facts, storing, nth, True, now)

    def _take_back(self, storing: Storing) -> None:
        """What it was granted does not count any more."""
        left = self._client_granted.get(storing.client, 0) - storing.num_bytes
        self.granted_bytes -= storing.num_bytes
        if left > 0:
            self._client_granted[storing.client] = left
        else:
            self._client_granted.pop(storing.client, None)

    def _end_if_done(self, storing: Storing) -> None:
        if storing.is_written and not storing.unsaved and not storing.is_over:
            self._end(storing)

    def _end(self, storing: Storing) -> None:
        storing.is_over = True
        mine = self._stores.get(storing.client, {})
        mine.pop(storing.message.number, None)
        if not mine:
            self._stores.pop(storing.client, None)
        self._outbox.say(storing.client, Stored(storing.message.number, storing.is_kept))
