"""When the policies of rescheduling and replication are asked, and what is done of what they say. Pure."""

from __future__ import annotations

from .entry import Entry
from .events import Effects
from .links import EngineLink
from .moves import REST_S
from .placing import Placing
from .replication import Replication
from .rescheduling import Rescheduling, View

EVERY_S = 0.1
"""Seconds between two reviews; each proposes a few moves, so this bounds moves a second."""


class Reviews:
    """policy  which requests go to another engine; None: none do
    replication  which prefixes are copied to further engines; None: none are
    next_s  when the next review is due
    """

    def __init__(self, placing: Placing) -> None:
        self.policy: Rescheduling | None = None
        self.next_s = 0.0
        self._placing = placing

    @property
    def is_wanted(self) -> bool:
        return self._placing.copies.is_wanted or (self.policy is not None and len(self._placing.links) > 1)

    @property
    def replication(self) -> Replication | None:
        return self._placing.copies.policy

    @replication.setter
    def replication(self, policy: Replication | None) -> None:
        self._placing.copies.policy = policy

    def review(self, now: float, effects: Effects) -> None:
        """Let some requests go to other engines, and some prefixes."""
        self.next_s = now + EVERY_S
        self._placing.copies.review(now, effects)
        if self.policy is None or len(self._placing.links) < 2:
            return
        placing, moves = self._placing, self._placing.moves

        def can_move(entry: Entry) -> bool:
            return moves.can_move(entry, now) and not placing.suspects.is_tried(entry)

        def num_moving(link: EngineLink) -> int:
            return sum(1 for _ in moves.at(link.number))

        view = View(tuple(placing.links.values()), placing.may_get, can_move, num_moving)
        for entry, target, why, is_waiting in list(self.policy.propose(view)):
            assert entry.link is not None, entry
            if is_waiting:
                effects.rerouted += 1
                entry.rests_until_s = now + REST_S
                placing.reroute(entry, target, effects)
            elif moves.can_send(placing.links[entry.link]):
                moves.migrate(entry, target, why, now, effects)
