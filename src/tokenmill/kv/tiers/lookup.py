"""Asks shared tiers whether they have blocks: once for all who want to know at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...core.tiers import HOST, NO_PLACE, TIERS, Find, Found, LookIn, TierKey
from .contents import Contents
from .deadlines import Deadlines
from .events import Outbox

MOST_BLOCKS = 512
"""Of one job."""


class Asker(Protocol):
    """Who waits for the answer: a Find, and blocks on their way."""

    def looked(self, tier: str, block: TierKey, now: float) -> None:
        """The answer has been noted."""
        ...


class SharedLookups:
    def __init__(self, contents: Contents, outbox: Outbox) -> None:
        self._contents = contents
        self._outbox = outbox
        self._askers: dict[tuple[str, TierKey], list[Asker]] = {}
        self._wanted: dict[str, list[TierKey]] = {}

    def __len__(self) -> int:
        return len(self._askers)

    def look(self, tier: str, block: TierKey, asker: Asker) -> None:
        askers = self._askers.get((tier, block))
        if askers is None:
            askers = self._askers[tier, block] = []
            self._wanted.setdefault(tier, []).append(block)
        askers.append(asker)

    def flush(self) -> None:
        """Ask for what has been wanted since the last time."""
        wanted, self._wanted = self._wanted, {}
        for tier, blocks in wanted.items():
            self._contents.counts[tier]["looks"] += len(blocks)
            for at in range(0, len(blocks), MOST_BLOCKS):
                self._ask(tier, tuple(blocks[at : at + MOST_BLOCKS]))

    def ended(self, job: LookIn, result: Sequence[int], now: float) -> None:
        """A tier that cannot say has nothing, for the time being."""
        places = result if len(result) == len(job.wanted) else [NO_PLACE] * len(job.wanted)
        for block, place in zip(job.wanted, places, strict=True):
            self._contents.remembered.note(job.tier, block, place, now)
        for block in job.wanted:
            for asker in self._askers.pop((job.tier, block), ()):
                asker.looked(job.tier, block, now)

    def _ask(self, tier: str, blocks: tuple[TierKey, ...]) -> None:
        self._outbox.ask(lambda number: LookIn(number, tier, blocks))


class Lookup:
    """unknown: (tier, block) that are asked for."""

    __slots__ = ("_lookups", "client", "is_over", "message", "unknown")

    def __init__(self, lookups: Lookups, client: int, message: Find) -> None:
        self._lookups = lookups
        self.client = client
        self.message = message
        self.unknown: set[tuple[str, TierKey]] = set()
        self.is_over = False

    def looked(self, tier: str, block: TierKey, now: float) -> None:
        self.unknown.discard((tier, block))
        if not self.unknown and not self.is_over:
            self._lookups.answer(self, now)


class Lookups:
    """Which tier has each of some blocks. Answered at once, unless shared tiers have to be asked; then when they have
    said, or after a while with what is known by then."""

    def __init__(self, contents: Contents, shared_lookups: SharedLookups, outbox: Outbox) -> None:
        self._contents = contents
        self._shared_lookups = shared_lookups
        self._outbox = outbox
        self._deadlines: Deadlines[Lookup] = Deadlines(lambda lookup: lookup.is_over)

    @property
    def next_s(self) -> float | None:
        return self._deadlines.next_s

    def find(self, client: int, message: Find, now: float) -> None:
        contents = self._contents
        lookup = Lookup(self, client, message)
        unknown: list[tuple[str, TierKey]] = []
        digits = contents.digits(message.wanted, now, message.is_near, unknown)
        if not unknown:
            self._say(lookup, digits)
            return
        lookup.unknown.update(unknown)
        self._deadlines.add(now + contents.config.find_timeout_s, lookup)
        for name, block in unknown:
            self._shared_lookups.look(name, block, lookup)

    def gone(self, client: int) -> None:
        for lookup in self._deadlines:
            lookup.is_over = lookup.is_over or lookup.client == client

    def lapse(self, now: float) -> None:
        for lookup in self._deadlines.due(now):
            self._contents.host.counts["find_timeouts"] += 1
            self.answer(lookup, now)

    def answer(self, lookup: Lookup, now: float) -> None:
        message = lookup.message
        self._say(lookup, self._contents.digits(message.wanted, now, message.is_near, []))

    def _say(self, lookup: Lookup, digits: str) -> None:
        lookup.is_over = True
        counts = self._contents.counts
        for nth, tier in enumerate(TIERS):
            if num := digits.count(str(nth + 1)):
                counts[tier]["found"] += num
        counts[HOST]["not_found"] += digits.count("0")
        self._outbox.say(lookup.client, Found(lookup.message.number, digits))
