"""Policies that move requests and copy prefixes for no reason, as often as they may: whatever they do must be right."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenmill.cluster.replication import CopyProposal, CopyView
from tokenmill.cluster.rescheduling import Proposal, View


class Wanderlust:
    """Rescheduling at random: what draws tokens goes elsewhere, as often as it may."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, view: View) -> Iterator[Proposal]:
        for source in view.links:
            targets = [link for link in view.links if link is not source and view.may_take(link)]
            for entry in list(source.entries.values()) if targets else ():
                if view.can_move(entry) and self._rng.random() < 0.5:
                    is_waiting = not entry.has_progressed
                    if not is_waiting or self._rng.random() < 0.1:
                        yield Proposal(entry, self._rng.choice(targets), "at random", is_waiting)


class Copycat:
    """Replication at random: what some request begins with and some worker has goes elsewhere, room or not."""

    is_wanted = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seen: list[bytes] = []

    def note(self, keys: bytes, num_new: int, now: float) -> None:
        self._seen = [*self._seen[-9:], keys]

    def propose(self, view: CopyView, now: float) -> Iterator[CopyProposal]:
        for keys in self._seen:
            holders = view.holders(keys)
            sources = [link for link in view.links if view.may_send(link, keys)]
            targets = [link for link in view.links if link.number not in holders and view.may_take(link)]
            if sources and targets and self._rng.random() < 0.5:
                yield CopyProposal(keys, self._rng.choice(sources), self._rng.choice(targets))
