"""What operators ask of a KV store that its manager cannot tell alone: it knows where blocks are, and no bytes.

stat    the manager's, with what tiers and host memory count
verify  read what is on disk, and forget what is not as it was saved
fence   have all other processes write nothing more to the remote store, and forget what is there
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from ...core.tier_jobs import Tier
from ...core.tiers import REMOTE, Drop, Inquire, Joined, Told
from ..tiers.shell import TierLink
from ..transfer.remote import RemoteTier
from .peers import PeerService

OWN = ("stat", "verify", "fence")
"""Questions that are answered here."""

SEEN_BY_TIERS = {
    "corrupt": ("num_damaged", "blocks_corrupt", "blocks_short", "blocks_foreign", "blocks_stale", "saves_corrupt"),
    "errors": ("errors", "timeouts"),
    "is_down": ("is_down",),
}
"""What the manager tells of a tier -> what the tier has counted itself: the manager saw no more than a miss."""


class Desk:
    """link  of a client that is part of the store
    host     what host memory counts
    peers    who serves the stores of other machines, if they are served
    """

    def __init__(
        self,
        link: TierLink,
        tiers: Mapping[str, Tier],
        host: Callable[[], dict[str, float]],
        peers: PeerService | None = None,
    ) -> None:
        self._link = link
        self._tiers = tiers
        self._host = host
        self._peers = peers
        self._turn = asyncio.Lock()
        self._num_asked = 0

    async def answer(self, asked: Inquire) -> Told:
        """To one of OWN. Raises EOFError when the store is over."""
        if asked.what == "verify":
            return Told(asked.number, json.dumps(await self._verify()))
        if asked.what == "fence":
            return await self._fence(asked.number)
        told = await self.inquire(asked.what, asked.argument)
        if told.error:
            return Told(asked.number, "", told.error)
        stat: dict[str, Any] = json.loads(told.answer)
        stat["host_memory"] = self._host()
        if self._peers is not None:
            stat["peers_served"] = self._peers.stat()
        for name, tier in self._tiers.items():
            told_of, counts = stat.setdefault("tiers", {}).setdefault(name, {}), counts_of(tier)
            for key, names in SEEN_BY_TIERS.items():
                told_of[key] = told_of.get(key, 0) + sum(counts.get(each, 0) for each in names)
            told_of["counts"] = counts
        return Told(asked.number, json.dumps(stat))

    async def inquire(self, what: str, argument: str = "") -> Told:
        """Of the manager."""
        async with self._turn:
            self._num_asked += 1
            await self._link.say(Inquire(self._num_asked, what, argument))
            while True:
                told = await self._link.hear()
                if isinstance(told, Joined) or (isinstance(told, Told) and told.number != self._num_asked):
                    continue
                assert isinstance(told, Told), told
                return told

    async def _fence(self, number: int) -> Told:
        remote = self._tiers.get(REMOTE)
        if not isinstance(remote, RemoteTier):
            return Told(number, "", "fence: this KV store has no remote tier.")
        try:
            return Told(number, json.dumps({"epoch": await remote.fence()}))
        except OSError as error:
            return Told(number, "", f"fence: the remote store does not answer: {error}")

    async def _verify(self) -> dict[str, Any]:
        bad: dict[str, int] = {}
        for name, tier in self._tiers.items():
            verify = getattr(tier, "verify", None)
            if verify is not None:
                wrong = tuple(await verify())
                bad[name] = len(wrong)
                if wrong:
                    await self._link.say(Drop(wrong, is_near=True))
        return {"damaged": bad}


def counts_of(tier: Tier) -> dict[str, float]:
    """What a tier counts for itself."""
    stat, counts = getattr(tier, "stat", None), getattr(tier, "counts", None)
    if stat is not None:
        return dict(stat())
    return asdict(counts) if is_dataclass(counts) and not isinstance(counts, type) else {}
