"""Preemption between classes and tenants: which running sequences may be preempted, what a tenant holds.

    Preempter     carries it out while a step is composed
    lower         those of lower classes than one that waits: they give way to it for a row or blocks
    next_of       who of several does: of the lowest class, of the tenant that has received most, the most junior
    has_share     whether a tenant that may hold only a share of the blocks may take some more

What has received more or less by up to the tolerance counts as equal here, too, so that the choice changes slowly: one
that has a row in flight is held back and asked about again at the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ..core.block import KVGroupSpec
from ..core.config import EngineConfig
from ..core.fairness import IDLE_CLASS, class_of
from ..core.policy import Preemption
from ..core.sequence import Sequence, Status
from ..kv.blocks.groups import Match
from .admission import blocks_for, blocks_given, blocks_to_come, has_room, max_running, most_blocks
from .budget import num_wanted
from .port import SchedulerPort
from .service import Service


def lower(running: List[Sequence], waiting: Sequence) -> List[Sequence]:
    """Idle work is not among them: it gives way to all, by rules of its own."""
    if not running:
        return ()
    class_ = class_of(waiting.request)
    if not class_ < class_of(running[-1].request) < IDLE_CLASS:
        return ()
    return [seq for seq in running if class_of(seq.request) > class_]


def next_of(sequences: List[Sequence], service: Service) -> List[Sequence]:
    """Those of `sequences`, which are by seniority, of whom the most junior may give way first."""
    if not service.is_shared:
        return sequences
    class_ = class_of(sequences[-1].request)
    last = [seq for seq in sequences if class_of(seq.request) == class_]
    most = max(service.steps_served(seq) for seq in last)
    return [seq for seq in last if service.steps_served(seq) == most]


def has_share(seq: Sequence, running: List[Sequence], num_more: List[int], groups: List[KVGroupSpec]) -> bool:
    """Whether the tenant of `seq` may take `num_more` blocks of each group. Whoever is alone may. What the tenant's
    requests of lower classes hold does not count: they give way."""
    terms, class_ = seq.request.terms, class_of(seq.request)
    own = [each for each in running if each.request.terms.tenant == terms.tenant and class_of(each.request) <= class_]
    if own in ([], [seq]):
        return True
    for index, group in enumerate(groups):
        num_held = sum(each.tables[index].num_held for each in own)
        if num_held + num_more[index] > terms.kv_share * group.num_blocks:
            return False
    return True


@dataclass(slots=True, eq=False)
class Preempter:
    """Of one step: carries out who gives way for blocks and rows, at once where it has no row in flight.

    held_back    numbers of sequences that get no row, so that they can be preempted once theirs are committed
    has_victims  somebody was preempted or held back as a sequence with a row needed blocks
    is_squeezed  blocks ran out
    """

    running: List[Sequence]
    service: Service
    config: EngineConfig
    preemption: Preemption
    engine: SchedulerPort
    held_back: set[int] = field(default_factory=set)
    has_victims: bool = False
    is_squeezed: bool = False

    def make(self, first: Sequence, matched: Match, below: List[Sequence], num_waiting: int) -> None:
        """Preempt running sequences of lower classes for `num_waiting` that wait and lack rows, and for the blocks of
        the first of them; hold back those that have rows in flight. Nobody gives way where that would not help."""
        num_rows = len(self.running) + self.engine.num_loading + num_waiting - max_running(self.config)
        if not self._would_fit(first, matched, below):
            return
        left, given = list(below), list[Sequence]()
        while left and (len(given) < num_rows or not self._would_fit(first, matched, given)):
            victim = next_of(left, self.service)[-1]
            left.remove(victim)
            given.append(victim)
        for victim in given:
            if victim.rows_in_flight:
                self.held_back.add(victim.number)
            else:
                self.engine.preempt(victim)

    def fit(self, seq: Sequence, matched: Match, num_tokens: int) -> int:
        """How many of `num_tokens` after `matched` every KV group has blocks for, after preempting others if need be.

        A victim that has a row in flight cannot be preempted yet: it gets no row in this step and is preempted in a
        later one, unless blocks come free before.
        """
        size = self.config.block_size
        num_blocks = len(seq.tables[0]) + matched.num_blocks
        start = seq.num_planned + matched.num_blocks * size
        missing = blocks_for(start + num_tokens, size) - num_blocks
        if missing <= 0:
            return num_tokens
        if seq.request.terms.kv_share < 1 and not self._keeps_to_share(seq, missing):
            return 0
        while missing > (available := self.engine.num_extendable(matched)):
            self.is_squeezed = self.has_victims = True
            victim = self._victim(seq)
            if victim is None or victim.rows_in_flight:
                if victim is not None:
                    self.held_back.add(victim.number)
                return max(0, min(num_tokens, (num_blocks + available) * size - start))
            self.engine.preempt(victim)
        return num_tokens

    def has_given(self, seq: Sequence) -> bool:
        return seq.status is not Status.RUNNING or seq.number in self.held_back

    def may_hold(self, seq: Sequence, matched: Match) -> bool:
        """Whether a waiting one fits what its tenant may hold."""
        if seq.request.terms.kv_share >= 1 or not self.config.keeps_kv:
            return True
        num_more = blocks_to_come(self.config, seq, matched)
        return has_share(seq, self.running, num_more, self.config.groups)

    def _victim(self, seq: Sequence) -> Sequence | None:
        """Who gives way to `seq`: one of its juniors, if there are any."""
        if seq is self.running[-1]:
            return None
        asking = self.running.index(seq)
        juniors = next_of(self.running[asking + 1 :], self.service)
        index = self.preemption.victim((seq, *juniors), 0)
        assert 0 < index <= len(juniors), f"the choice, {index} of {len(juniors)}, is not junior to the one that asks"
        return juniors[index - 1]

    def _would_fit(self, seq: Sequence, matched: Match, given: List[Sequence]) -> bool:
        """Whether a waiting one would have room if those in `given` gave their blocks back."""
        if not self.config.keeps_kv:
            return True
        others = [each for each in self.running if each not in given]
        available = blocks_given(self.engine.num_available_blocks(matched), given)
        prefilling = [each for each in others if num_wanted(each) > 1]
        return has_room(self.config, seq, matched, available, len(others), prefilling)

    def _keeps_to_share(self, seq: Sequence, missing: int) -> bool:
        """Whether its tenant may hold so many blocks more, after a junior of the tenant's own has given way if need
        be."""
        num_more = [min(missing, most_blocks(self.config, group)) for group in self.config.groups]
        while not has_share(seq, self.running, num_more, self.config.groups):
            own = [each for each in self.running if each.request.terms.tenant == seq.request.terms.tenant]
            if own[-1] is seq:
                return False
            self.has_victims = True
            if own[-1].rows_in_flight:
                self.held_back.add(own[-1].number)
                return False
            self.engine.preempt(own[-1])
        return True
