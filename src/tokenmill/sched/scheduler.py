"""Composes one step: which sequences get a row, and how many tokens each.

What belongs here: the order of service, the token budget, who gives way when blocks run out, who is let in. What never
does: changing a sequence. Decisions are carried out at once through the `Ledger` (the engine core), because a later one
depends on an earlier one: the blocks of a sequence can be matched by others as soon as they are planned.

    each running decode takes one token
    prefills, running and waiting, share what is left, best rank first, while budget, rows and blocks last

The tokens of decodes are reserved first, so that no prompt delays them, however long it is. Policies (`core.policy`)
make three choices: the order of service, how much of the budget chunks of prompts may take, and who gives way.

Budget and rows are given by rank, blocks by seniority: a sequence that gives way is junior to the one that needs its
blocks. Sequences are visited by seniority, so that a junior does not get the blocks that a senior needs. Only prefills
are reordered by rank, and a prefill that goes early takes only blocks that no sequence held.

Sequences of the lowest priority (`IDLE_PRIORITY`) are idle work. Alone, their steps are short, because whoever comes
waits for those in flight. While others run, they get what these leave in steps without a prompt (`spare`); else they
pause, with their blocks, and give way to who is let in.

Where sequences have a target for their time per output token, steps are no longer than they allow (`policies.pace`).
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Protocol

from ..cache.groups import Match
from ..core.config import EngineConfig
from ..core.cost import Costs
from ..core.fairness import class_of
from ..core.request import IDLE_PRIORITY
from ..core.sequence import Sequence, Status
from . import giving_way, spare
from .admission import blocks_for
from .fitting import chunk_size, decode_work, tokens_within
from .policies import Policies, pace, slack
from .queue import WaitingQueue
from .rank import Rank
from .room import blocks_given, blocks_to_come, has_room


class Ledger(Protocol):
    """What the scheduler asks of the engine core, which owns every sequence and block."""

    @property
    def no_match(self) -> Match: ...

    def find_match(self, seq: Sequence) -> Match:
        """Published blocks that would carry the sequence's planned part on from a block border; changes nothing."""
        ...

    def num_available_blocks(self, matched: Match) -> List[int]:
        """Blocks of each KV group that can be handed out beside `matched`."""
        ...

    def reconsider(self, seq: Sequence) -> None:
        """Ask the order of service anew when a waiting sequence is due."""
        ...

    @property
    def step_number(self) -> int:
        """Of the step in the making."""
        ...

    @property
    def costs(self) -> Costs:
        """Of steps, as measured so far."""
        ...

    @property
    def num_targeted(self) -> int:
        """Unfinished sequences that have a target for a time."""
        ...

    def begins_s(self) -> float:
        """When the step in the making is expected to begin: after those in flight."""
        ...

    @property
    def num_loading(self) -> int:
        """Sequences that will run when their KV has come."""
        ...

    def fetch(self, seq: Sequence, matched: Match) -> bool:
        """WAITING -> LOADING, if stored KV carries the head of the queue further than `matched`; tells whether it
        does."""
        ...

    def admit(self, seq: Sequence) -> None:
        """WAITING -> RUNNING: the head of the queue joins the running list at its place."""
        ...

    def adopt(self, seq: Sequence, matched: Match) -> None:
        """Carry the planned part on over matched blocks; a row of the same step follows."""
        ...

    def preempt(self, seq: Sequence) -> None:
        """RUNNING -> WAITING: leaves the running list and gives its blocks back. It has no row in flight."""
        ...

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        """Plan the next tokens of the sequence in this step; the blocks they need are available."""
        ...


def num_wanted(seq: Sequence) -> int:
    """Tokens that may be planned now. None when the draws in flight make the end certain."""
    num_tokens = len(seq.tokens) + seq.num_pending
    if seq.num_pending and num_tokens >= seq.max_len:
        return 0
    return num_tokens - seq.num_planned


def compose_step(
    running: List[Sequence], waiting: WaitingQueue, config: EngineConfig, policies: Policies, ledger: Ledger
) -> None:
    """Add the rows of one step. `running` is by seniority and follows the ledger's admissions and preemptions."""
    _Composition(running, waiting, config, policies, ledger, config.max_num_batched_tokens).compose()


@dataclass(slots=True)
class _Composition:
    """One step in the making.

    budget      tokens left for prefills
    aim         tokens left for those that do not end in this step
    is_first    no prefill has a row yet
    is_squeezed blocks ran out: nobody is let in
    is_busy     there is other than idle work
    is_filling  what others leave goes to idle work
    prefilling  running sequences whose known tokens are not all planned
    held_back   numbers of sequences that get no row, so that they can be preempted once theirs are committed
    has_victims somebody was preempted or held back since `running` was looked at
    passed      tenants that hold their share of the blocks
    """

    running: List[Sequence]
    waiting: WaitingQueue
    config: EngineConfig
    policies: Policies
    ledger: Ledger
    budget: int
    aim: int = 0
    is_first: bool = True
    is_squeezed: bool = False
    is_busy: bool = False
    is_filling: bool = False
    prefilling: list[Sequence] = field(default_factory=list)
    held_back: set[int] = field(default_factory=set)
    has_victims: bool = False
    passed: set[str] = field(default_factory=set)

    def compose(self) -> None:
        size = self.config.block_size
        first = self.waiting.peek()
        self.is_busy = any(not _is_idle(seq) for seq in (*self.running[:1], *((first,) if first else ())))
        if below := giving_way.lower(self.running, first):
            self._make_way(below)
        # Without those that are let in below.
        running = [seq for seq in self.running if seq.number not in self.held_back] if below else list(self.running)
        if self.is_busy:
            if running and _is_idle(running[-1]):
                running = [seq for seq in running if not _is_idle(seq)]
        elif self.config.keeps_kv and (running or first):
            running, self.budget = spare.alone(running, self.budget, self.ledger.costs)
        wanted = [num_wanted(seq) for seq in running]
        self.budget -= wanted.count(1)
        self.prefilling += [seq for seq, num_tokens in zip(running, wanted, strict=True) if num_tokens > 1]
        self.aim = self.policies.chunks.most_tokens(self.config, wanted.count(1))
        has_targets = self.ledger.num_targeted > 0
        if has_targets and (self.prefilling or first):
            self._keep_pace([seq for seq, num_tokens in zip(running, wanted, strict=True) if num_tokens == 1])
        num_refreshed = self.policies.order.num_refreshed or (slack.NUM_REFRESHED if has_targets else 0)
        if num_refreshed and len(self.running) < max_running(self.config):
            self.waiting.refresh(num_refreshed, self.ledger.reconsider)
        add_row = self.ledger.add_row
        self.waiting.service.begin_step(self.running, self.prefilling)
        rank = self.waiting.rank
        turns = iter(sorted(self.prefilling, key=rank))
        for seq, num_tokens in zip(running, wanted, strict=True):
            if num_tokens > 1:
                seq = next(turns)
                self._admit(rank(seq))
            if not num_tokens or (self.has_victims and self._has_given_way(seq)):
                continue
            if num_tokens > 1:
                self._continue_prefill(seq)
            elif seq.num_planned % size or self._fit(seq, self.ledger.no_match, 1):  # a block begun has room
                add_row(seq, 1)
        self._admit(None)
        if running and self.is_busy and not (self.prefilling or self.is_squeezed or self.has_victims):
            self._fill(running)

    def _keep_pace(self, drawing: List[Sequence]) -> None:
        """Bound what prompts get by the targets of those that draw."""
        costs = self.ledger.costs
        limit_s = pace.allowed_s(drawing, self.ledger.begins_s()) if costs.is_known else None
        if limit_s is not None:
            start = max((seq.num_planned for seq in self.prefilling), default=0)
            most = tokens_within(limit_s, costs, decode_work(drawing), start, self.budget)
            self.budget = min(self.budget, max(most, pace.least_tokens(self.config)))

    def _fill(self, others: List[Sequence]) -> None:
        """Give idle work the time that others leave in a step without prompts."""
        first = self.waiting.peek()
        if not _is_idle(first or self.running[-1]):  # idle work comes behind all others
            return
        idle = [seq for seq in reversed(self.running) if _is_idle(seq)]
        filling = spare.beside(others, idle, self.ledger)
        self.is_filling = True
        size = self.config.block_size
        for seq in filling.drawing:
            if seq.num_planned % size or self._fit(seq, self.ledger.no_match, 1):
                self.ledger.add_row(seq, 1)
        self.budget = self.aim = min(self.budget - len(filling.drawing), filling.num_tokens)
        for seq in filling.prefilling:
            if self.budget > 0 and not self.is_squeezed:
                self._continue_prefill(seq)
        if filling.may_admit:
            self._admit(None)

    def _has_given_way(self, seq: Sequence) -> bool:
        return seq.status is not Status.RUNNING or seq.number in self.held_back

    def _continue_prefill(self, seq: Sequence) -> None:
        matched = self.ledger.find_match(seq)
        fitting = self._fitting(seq, matched)
        if not fitting and matched.num_blocks and len(self.running) == 1:
            # Nobody can give way, and with the match there is no block left to go on in.
            matched = self.ledger.no_match
            fitting = self._fitting(seq, matched)
        if fitting:
            self._add_prefill(seq, matched, fitting)

    def _fitting(self, seq: Sequence, matched: Match) -> int:
        """Tokens of a running prefill's next chunk, after `matched`."""
        num_matched = matched.num_blocks * self.config.block_size
        planned = self._chunk_size(seq.num_planned + num_matched, num_wanted(seq) - num_matched)
        return self._fit(seq, matched, planned) if planned else 0

    def _chunk_size(self, start: int, num_left: int) -> int:
        return chunk_size(start, num_left, self.budget, self.aim, self.config.block_size, self.is_first)

    def _add_prefill(self, seq: Sequence, matched: Match, num_tokens: int) -> None:
        self.ledger.adopt(seq, matched)
        self.ledger.add_row(seq, num_tokens)
        self.budget -= num_tokens
        self.aim -= num_tokens
        self.is_first = False

    def _fit(self, seq: Sequence, matched: Match, num_tokens: int) -> int:
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
        while missing > (available := min(self.ledger.num_available_blocks(matched))):
            self.is_squeezed = self.has_victims = True
            victim = self._victim(seq)
            if victim is None or victim.rows_in_flight:
                if victim is not None:
                    self.held_back.add(victim.number)
                return max(0, min(num_tokens, (num_blocks + available) * size - start))
            self.ledger.preempt(victim)
        return num_tokens

    def _victim(self, seq: Sequence) -> Sequence | None:
        """Who gives way to `seq`: one of its juniors, if there are any."""
        if seq is self.running[-1]:
            return None
        asking = self.running.index(seq)
        juniors = giving_way.next_of(self.running[asking + 1 :], self.waiting.service)
        index = self.policies.preemption.victim((seq, *juniors), 0)
        assert 0 < index <= len(juniors), f"the choice, {index} of {len(juniors)}, is not junior to the one that asks"
        return juniors[index - 1]

    def _make_way(self, below: List[Sequence]) -> None:
        """Preempt running sequences of lower classes for those that wait and lack rows or blocks; hold back those that
        have rows in flight. Nobody gives way where that would not help."""
        first = self.waiting.peek()
        assert first is not None
        num_waiting = self.waiting.num_up_to(class_of(first.request))
        num_rows = len(self.running) + self.ledger.num_loading + num_waiting - max_running(self.config)
        matched = self.ledger.find_match(first)
        if not (self._may_hold(first, matched) and self._would_fit(first, matched, below)):
            return
        left, given = list(below), list[Sequence]()
        while left and (len(given) < num_rows or not self._would_fit(first, matched, given)):
            victim = giving_way.next_of(left, self.waiting.service)[-1]
            left.remove(victim)
            given.append(victim)
        for victim in given:
            if victim.rows_in_flight:
                self.held_back.add(victim.number)
            else:
                self.ledger.preempt(victim)

    def _would_fit(self, seq: Sequence, matched: Match, given: List[Sequence]) -> bool:
        """Whether a waiting one would have room if those in `given` gave their blocks back."""
        if not self.config.keeps_kv:
            return True
        others = [each for each in self.running if each not in given]
        available = blocks_given(self.ledger.num_available_blocks(matched), given)
        prefilling = [each for each in others if num_wanted(each) > 1]
        return has_room(self.config, seq, matched, available, len(others), prefilling)

    def _may_hold(self, seq: Sequence, matched: Match) -> bool:
        """Whether a waiting one fits what its tenant may hold."""
        if seq.request.terms.kv_share >= 1 or not self.config.keeps_kv:
            return True
        num_more = blocks_to_come(self.config, seq, matched)
        return giving_way.has_share(seq, self.running, num_more, self.config.groups)

    def _keeps_to_share(self, seq: Sequence, missing: int) -> bool:
        """Whether its tenant may hold so many blocks more, after a junior of the tenant's own has given way if need
        be."""
        num_more = [missing] * len(self.config.groups)
        while not giving_way.has_share(seq, self.running, num_more, self.config.groups):
            own = [each for each in self.running if each.request.terms.tenant == seq.request.terms.tenant]
            if own[-1] is seq:
                return False
            self.has_victims = True
            if own[-1].rows_in_flight:
                self.held_back.add(own[-1].number)
                return False
            self.ledger.preempt(own[-1])
        return True

    def _admit(self, before: Rank | None) -> None:
        """Let waiting sequences of a rank better than `before` in, while their whole present length fits beside what
        the running ones still need: the rest of their prompts, and one block of growth each, so that an admission does
        not cause the next preemption. That must hold in every KV group. Without KV a prompt is let in when all of it
        fits the step."""
        size = self.config.block_size
        most = max_running(self.config)
        while self.budget > 0 and not self.is_squeezed:
            seq = self.waiting.peek(self.passed)
            if (
                seq is None
                or (before is not None and self.waiting.rank(seq) > before)
                or (self.is_busy and not self.is_filling and _is_idle(seq))
            ):
                return
            if len(self.running) + self.ledger.num_loading >= most:
                if self._clear():
                    continue
                return
            matched = self.ledger.find_match(seq)
            start = matched.num_blocks * size
            num_tokens = self._chunk_size(start, len(seq.tokens) - start)
            if not self.config.keeps_kv:
                if len(seq.tokens) > self.budget:
                    return
            else:
                available = self.ledger.num_available_blocks(matched)
                if not num_tokens:
                    return
                if not self._may_hold(seq, matched):
                    self.passed.add(seq.request.terms.tenant)
                    continue
                if not has_room(self.config, seq, matched, available, len(self.running), self.prefilling):
                    if self._clear():
                        continue
                    return
                num_tokens = min(num_tokens, min(available) * size)
                if self.ledger.fetch(seq, matched):
                    continue
            self.ledger.admit(seq)
            self._add_prefill(seq, matched, num_tokens)
            self.prefilling.append(seq)

    def _clear(self) -> bool:
        """Preempt idle work for other that waits; whether there was a sequence of it without a row in flight."""
        last = self.running[-1] if self.running else None
        if not self.is_busy or self.is_filling or last is None or not _is_idle(last) or last.rows_in_flight:
            return False
        self.ledger.preempt(last)
        return True


def _is_idle(seq: Sequence) -> bool:
    return seq.request.priority >= IDLE_PRIORITY


def max_running(config: EngineConfig) -> int:
    """Most sequences running at once: every one of them must get a token in a step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)
