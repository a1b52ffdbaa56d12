"""Asks shared tiers whether they have blocks: once for all who want to know at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...core.tier_jobs import LookIn
from ...core.tiers import NO_PLACE, TierKey
from .contents import Contents
from .outbox import Outbox

MOST_BLOCKS = 512
"""Of one job."""


class Asker(Protocol):
    """Who waits for the answer: a Find, and blocks on their way."""

    def looked(self, tier: str, block: TierKey, now: float) -> None:
        """What there is to know has been noted."""
        ...


class Looks:
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
