"""Composes one step: which sequences get a row, and how many tokens each.

What belongs here: the order of service, the token budget, who is let in; `preemption` has who gives way to whom. What
never does: changing a sequence. Decisions are carried out at once through the `SchedulerPort` (the engine core),
because a later one depends on an earlier one: the blocks of a sequence can be matched by others as soon as they are
planned.

    each running decode takes one token
    prefills, running and waiting, share what is left, best rank first, while budget, rows and blocks last

The tokens of decodes are reserved first, so that no prompt delays them, however long it is. Drafts of what decodes draw
next get what is left of the budget in the end. Policies (`core.policy`)
make three choices: the order of service, how much of the budget chunks of prompts may take, and who gives way.

Budget and rows are given by rank, blocks by seniority: a sequence that gives way is junior to the one that needs its
blocks. Sequences are visited by seniority, so that a junior does not get the blocks that a senior needs. Only prefills
are reordered by rank, and a prefill that goes early takes only blocks that no sequence held.

Sequences of the lowest priority (`IDLE_PRIORITY`) are idle work. Alone, their steps are short, because whoever comes
waits for those in flight. While others run, they get what these leave in steps without a prompt (`spare`); else they
pause, with their blocks, and give way to who is let in.

Where sequences have a target for their time per output token, steps are no longer than they allow (`policies.pace`).

Where several tenants have prompts, or had some lately, whoever comes next waits for the step under way. So steps are as
short as they can be at a small loss; and while another tenant waits, who has had most of the prompt tokens lately gets
few.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ..core.config import EngineConfig
from ..core.fairness import IDLE_CLASS, class_of
from ..core.request import IDLE_PRIORITY
from ..core.sequence import Sequence
from ..core.slo import least_tokens
from ..kv.blocks.groups import Match
from .admission import has_room, max_running
from .budget import alone, beside, chunk_size, decode_work, each_wanted, num_wanted, tokens_at_loss, tokens_within
from .policies import Policies, pace, slack
from .port import SchedulerPort
from .preemption import Preempter, lower
from .queue import WaitingQueue
from .service import Rank

SHORTER = 0.025
"""Where several tenants have prompts, a prompt token may cost so much more than in a full step."""
YIELDING = 0.02
"""Of the engine's time, what steps may cost that are short because another tenant waits."""


def compose_step(
    running: List[Sequence], waiting: WaitingQueue, config: EngineConfig, policies: Policies, engine: SchedulerPort
) -> None:
    """Add the rows of one step. `running` is by seniority and follows the engine's admissions and preemptions."""
    preempter = Preempter(running, waiting.service, config, policies.preemption, engine)
    _Composition(running, waiting, config, policies, engine, preempter, config.max_num_batched_tokens).compose()


@dataclass(slots=True)
class _Composition:
    """One step in the making.

    way         who gives way for blocks and rows; once these have run out nobody is let in
    budget      tokens left for prefills
    aim         tokens left for those that do not end in this step
    is_first    no prefill has a row yet
    is_busy     there is other than idle work
    is_filling  what others leave goes to idle work
    prefilling  running sequences whose known tokens are not all planned
    passed      tenants that get no further prompt in: they hold their share of the blocks, or yield
    yielding    who has had most of the prompt tokens lately, while another tenant waits, and the class of whoever does:
                behind it, prompts of this tenant get `num_yielded` tokens together
    """

    running: List[Sequence]
    waiting: WaitingQueue
    config: EngineConfig
    policies: Policies
    engine: SchedulerPort
    preempter: Preempter
    budget: int
    aim: int = 0
    is_first: bool = True
    is_busy: bool = False
    is_filling: bool = False
    prefilling: list[Sequence] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    yielding: tuple[int, str] | None = None
    num_yielded: int = 0

    def compose(self) -> None:
        size, preempter = self.config.block_size, self.preempter
        first = self.waiting.peek()
        self.is_busy = any(not _is_idle(seq) for seq in (*self.running[:1], *((first,) if first else ())))
        if first is not None and lower(self.running, first):
            self._make_way(first)
        # Without those that are let in below.
        running = (
            [seq for seq in self.running if not preempter.has_given(seq)] if preempter.held_back else list(self.running)
        )
        if self.is_busy:
            if running and _is_idle(running[-1]):
                running = [seq for seq in running if not _is_idle(seq)]
        elif self.config.keeps_kv and (running or first):
            running, self.budget = alone(running, self.budget, self.engine.costs)
        wanted = each_wanted(running)
        num_drawing = wanted.count(1)
        self.budget -= num_drawing
        if max(wanted, default=0) > 1:
            self.prefilling += [seq for seq, num_tokens in zip(running, wanted, strict=True) if num_tokens > 1]
        self.aim = self.policies.chunks.most_tokens(self.config, num_drawing)
        has_targets = self.engine.num_targeted > 0
        if self.is_busy and (self.prefilling or first):
            drawing = [seq for seq, num_tokens in zip(running, wanted, strict=True) if num_tokens == 1]
            self._share(drawing)
            if has_targets:
                self._keep_pace(drawing)
        num_refreshed = self.policies.order.num_refreshed or (slack.NUM_REFRESHED if has_targets else 0)
        if num_refreshed and len(self.running) < max_running(self.config):
            self.waiting.refresh(num_refreshed, self.engine.reconsider)
        add_row = self.engine.add_row
        self.waiting.service.begin_step(self.running, self.prefilling)
        rank = self.waiting.rank
        turns = iter(sorted(self.prefilling, key=rank))
        decodes: list[Sequence] = []  # in a row, of sequences whose last blocks have room
        for seq, num_tokens in zip(running, wanted, strict=True):
            if num_tokens == 1 and seq.num_planned % size and not preempter.has_victims:
                decodes.append(seq)
                continue
            if decodes:
                self.engine.add_decodes(decodes)
                decodes.clear()
            if num_tokens > 1:
                seq = next(turns)
                self._admit(rank(seq))
            if not num_tokens or (preempter.has_victims and preempter.has_given(seq)):
                continue
            if num_tokens > 1:
                self._continue_prefill(seq)
            elif seq.num_planned % size or preempter.fit(seq, self.engine.no_match, 1):
                add_row(seq, 1)
        if decodes:
            self.engine.add_decodes(decodes)
        self._admit(None)
        if running and self.is_busy and not (self.prefilling or preempter.is_squeezed or preempter.has_victims):
            self._fill(running)
        self.engine.add_drafts(self.budget)

    def _make_way(self, first: Sequence) -> None:
        """Have lower classes give way to the first that its tenant's share of the blocks lets in, and those behind."""
        passed: set[str] = set()
        waiting: Sequence | None = first
        while waiting is not None and (below := lower(self.running, waiting)):
            matched = self.engine.find_match(waiting)
            if self.preempter.may_hold(waiting, matched):
                num_waiting = self.waiting.num_up_to(class_of(waiting.request), passed)
                self.preempter.make(waiting, matched, below, num_waiting)
                return
            passed.add(waiting.request.terms.tenant)
            waiting = self.waiting.peek(passed)

    def _share(self, drawing: List[Sequence]) -> None:
        """Bound what prompts get by the wait of other tenants than the one that has had most."""
        costs, prompts, size = self.engine.costs, self.waiting.service.prompts, self.config.block_size
        if not (costs.is_known and self.config.keeps_kv and self.budget > 0):
            return
        best: dict[str, int] = {}  # class by tenant, of those whose prompts a step may have tokens of
        for class_, tenant in (*map(_account, self.prefilling), *self._admissible()):
            if class_ != IDLE_CLASS:
                best[tenant] = min(class_, best.get(tenant, class_))
        if not (best and prompts.is_shared(best)):
            return
        start = max((seq.num_planned for seq in self.prefilling), default=0)
        shorter, price = tokens_at_loss(SHORTER, costs, decode_work(drawing), start, self.budget)
        least = least_tokens(self.config.max_num_batched_tokens, size)
        self.budget = min(self.budget, max(shorter, least))
        if len(best) > 1 and prompts.pay(price / YIELDING):
            most = max(best, key=lambda tenant: (prompts.had(tenant), tenant))
            self.yielding = min(class_ for tenant, class_ in best.items() if tenant != most), most
            self.num_yielded = least

    def _admissible(self) -> Iterable[tuple[int, str]]:
        """Class and tenant of those that wait and have rows, blocks and, of their tenant's share, room to be let in."""
        passed: set[str] = set()
        is_idle = bool(self.running) and _is_idle(self.running[-1])  # it gives way to whoever is let in
        if is_idle or len(self.running) + self.engine.num_loading < max_running(self.config):
            while (first := self.waiting.peek(passed)) is not None:
                matched = self.engine.find_match(first)
                if self.preempter.may_hold(first, matched):
                    available, num_others = self.engine.num_available_blocks(matched), len(self.running)
                    if is_idle or has_room(self.config, first, matched, available, num_others, self.prefilling):
                        return [each for each in self.waiting.tenants() if each[1] not in passed]
                    break
                passed.add(first.request.terms.tenant)
        return ()

    def _yields(self, seq: Sequence) -> bool:
        if self.yielding is None:
            return False
        class_, tenant = self.yielding
        return seq.request.terms.tenant == tenant and class_of(seq.request) >= class_

    def _keep_pace(self, drawing: List[Sequence]) -> None:
        """Bound what prompts get by the targets of those that draw."""
        costs = self.engine.costs
        limit_s = pace.allowed_s(drawing, self.engine.begins_s()) if costs.is_known else None
        if limit_s is not None:
            start = max((seq.num_planned for seq in self.prefilling), default=0)
            most = tokens_within(limit_s, costs, decode_work(drawing), start, self.budget)
            least = least_tokens(self.config.max_num_batched_tokens, self.config.block_size)
            self.budget = min(self.budget, max(most, least))

    def _fill(self, others: List[Sequence]) -> None:
        """Give idle work the time that others leave in a step without prompts."""
        first = self.waiting.peek()
        if not _is_idle(first or self.running[-1]):  # idle work comes behind all others
            return
        idle = [seq for seq in reversed(self.running) if _is_idle(seq)]
        filling = beside(others, idle, self.engine)
        self.is_filling = True
        size = self.config.block_size
        for seq in filling.drawing:
            if self.preempter.has_victims and self.preempter.has_given(seq):
                continue
            if seq.num_planned % size or self.preempter.fit(seq, self.engine.no_match, 1):
                self.engine.add_row(seq, 1)
        self.budget = self.aim = min(self.budget - len(filling.drawing), filling.num_tokens)
        for seq in filling.prefilling:
            if self.budget > 0 and not self.preempter.is_squeezed:
                self._continue_prefill(seq)
        if filling.may_admit:
            self._admit(None)

    def _continue_prefill(self, seq: Sequence) -> None:
        matched = self.engine.find_match(seq)
        fitting = self._fitting(seq, matched)
        if not fitting and matched.num_blocks and len(self.running) == 1:
            # Nobody can give way, and with the match there is no block left to go on in.
            matched = self.engine.no_match
            fitting = self._fitting(seq, matched)
        if fitting:
            self._add_prefill(seq, matched, fitting)

    def _fitting(self, seq: Sequence, matched: Match) -> int:
        """Tokens of a running prefill's next chunk, after `matched`."""
        num_matched = matched.num_blocks * self.config.block_size
        start = seq.num_planned + num_matched
        if start == seq.pause and seq.rows_in_flight:
            return 0
        planned = _paused(seq, start, self._chunk_size(seq, start, num_wanted(seq) - num_matched))
        return self.preempter.fit(seq, matched, planned) if planned else 0

    def _chunk_size(self, seq: Sequence, start: int, num_left: int) -> int:
        budget = min(self.budget, self.num_yielded) if self._yields(seq) else self.budget
        return chunk_size(start, num_left, budget, self.aim, self.config.block_size, self.is_first)

    def _add_prefill(self, seq: Sequence, matched: Match, num_tokens: int) -> None:
        self.engine.adopt(seq, matched)
        self.engine.add_row(seq, num_tokens)
        self.budget -= num_tokens
        self.aim -= num_tokens
        if self._yields(seq):
            self.num_yielded -= num_tokens
        self.is_first = False

    def _admit(self, before: Rank | None) -> None:
        """Let waiting sequences of a rank better than `before` in, while their whole present length fits beside what
        the running ones still need: the rest of their prompts, and one block of growth each, so that an admission does
        not cause the next preemption. That must hold in every KV group. Without KV a prompt is let in when all of it
        fits the step."""
        size = self.config.block_size
        most = max_running(self.config)
        while self.budget > 0 and not self.preempter.is_squeezed:
            seq = self.waiting.peek(self.passed)
            if (
                seq is None
                or (before is not None and self.waiting.rank(seq) > before)
                or (self.is_busy and not self.is_filling and _is_idle(seq))
            ):
                return
            if len(self.running) + self.engine.num_loading >= most:
                if self._clear():
                    continue
                return
            matched = self.engine.find_match(seq)
            start = matched.num_blocks * size
            num_tokens = self._chunk_size(seq, start, len(seq.tokens) - start)
            if not self.config.keeps_kv:
                if len(seq.tokens) > self.budget:
                    return
            else:
                available = self.engine.num_available_blocks(matched)
                if not num_tokens and self._yields(seq):
                    self.passed.add(seq.request.terms.tenant)
                    continue
                if not num_tokens:
                    return
                if not self.preempter.may_hold(seq, matched):
                    self.passed.add(seq.request.terms.tenant)
                    continue
                if not (
                    has_room(self.config, seq, matched, available, len(self.running), self.prefilling)
                    and self.engine.can_encode(seq)
                ):
                    if self._clear():
                        continue
                    return
                num_tokens = min(num_tokens, self.engine.num_extendable(matched) * size)
                if self.engine.fetch(seq, matched):
                    continue
            self.engine.admit(seq)
            self._add_prefill(seq, matched, _paused(seq, start, num_tokens))
            self.prefilling.append(seq)

    def _clear(self) -> bool:
        """Preempt idle work for other that waits; whether there was a sequence of it without a row in flight."""
        last = self.running[-1] if self.running else None
        if not self.is_busy or self.is_filling or last is None or not _is_idle(last) or last.rows_in_flight:
            return False
        self.engine.preempt(last)
        return True


def _account(seq: Sequence) -> tuple[int, str]:
    return class_of(seq.request), seq.request.terms.tenant


def _is_idle(seq: Sequence) -> bool:
    return seq.request.priority >= IDLE_PRIORITY


def _paused(seq: Sequence, start: int, num_tokens: int) -> int:
    """Of a chunk from `start`, what comes before the sequence's pause."""
    return min(num_tokens, seq.pause - start) if seq.pause > start else num_tokens
