"""Steps of decodes that nothing comes between, without a plan and a result for each: for simulations, which know what a
step gives without running it.

While an engine has nothing but decodes that go on, a step changes little: each sequence gets one token and, every
`block_size` steps, a block. A `DecodeRun` commits and plans such steps one by one, as `EngineCore` would, at a price
that does not grow with the sequences: the books of the engine (counters, cost model, blocks, what is published, the
clock of work) are kept at each step, and those of each sequence when the run ends, or where a block of it is due.

    EngineCore.plan    = DecodeRun.plan       and what it leaves is the same,
    EngineCore.commit  = DecodeRun.commit     once `land` has been called

It speaks for as many steps as `most_commits` says; the sequences that end, and steps for which blocks have run out, are
the core's.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from ...core.cost import Work
from ...core.events import EngineStats, FromEngine
from ...core.request import IDLE_PRIORITY
from ...core.sequence import Sequence, Status
from ...core.step import PlanRow, StepPlan, plan_row
from ...core.work import step_work
from ...engine.core import EngineCore
from ...engine.stats import count_blocks
from ...sched.admission import max_running
from ...sched.policies import slack
from ...sched.steps import Step

_PLACES = [
    EngineStats._fields.index(name)
    for name in (
        "num_steps", "generation_tokens", "last_step_tokens", "last_step_s", "in_flight_s", "costs", "cost_error",
        "num_free_blocks", "num_cached_blocks", "num_held_blocks", "kv_usage",
    )
]  # fmt: skip


class DecodeRun:
    """Of an engine that `may_fast_forward`. Between its calls nobody else calls the core, before `land`.

    num_rows      of each step
    num_commits, num_plans   so far
    most_commits  that may be made: each of the first so many commits gives every sequence a token that is not its last,
                  and is followed by one plan

    most: that its maker wants.
    """

    def __init__(self, core: EngineCore, token: int, most: int) -> None:
        self._core = core
        self._state = state = core.state
        self._token = token
        self._running = running = list(state.running)
        self._size = size = core.config.block_size
        self._depth = len(state.in_flight)
        self.num_rows = len(running)
        self.num_commits = self.num_plans = 0
        self._known = [len(seq.tokens) for seq in running]
        self._fields = list(core.stats())
        self._context = state.in_flight[-1].num_context
        self._step_work = step_work(self.num_rows, core.config.max_num_batched_tokens)
        # What is due when, as steps repeat: by the number of commits modulo the size of a block.
        self._due: list[list[int]] = [[] for _ in range(size)]
        num_new = [0] * size
        for index, seq in enumerate(running):
            fills = -len(seq.tokens) % size  # after so many commits its known tokens fill blocks
            begins = (len(seq.tables[0]) * size - seq.num_planned + 1) % size  # which plan begins a block
            num_new[begins] += 1
            self._due[fills].append(index)
            if begins != fills:
                self._due[begins].append(index)
        self._behind = [index for index, seq in enumerate(running) if self._num_unpublished(seq, seq.num_computed)]
        self.most_commits = self._most(num_new, most)

    @property
    def num_in_flight(self) -> int:
        return len(self._state.in_flight)

    def _most(self, num_new: list[int], wanted: int) -> int:
        """Until a sequence may be planned no more, or there is no block for one."""
        depth = self._depth
        ends = [min(seq.max_len, seq.loop_check) for seq in self._running]
        most = min([end - known for end, known in zip(ends, self._known, strict=True)]) - depth
        most = min(most, wanted)
        available = min(pool.num_available for pool in self._state.blocks.pools)
        in_round = sum(num_new)
        if in_round * (most // self._size + 1) > available:
            num_commits, num_blocks = 0, 0
            while num_commits < most and num_blocks + num_new[(num_commits + 1) % self._size] <= available:
                num_commits += 1
                num_blocks += num_new[num_commits % self._size]
            most = num_commits
        return max(0, most)

    @property
    def next_context(self) -> int:
        """Positions that the rows of the next step to be planned read; each later one reads one more of each row."""
        return self._context + self.num_rows

    def repeat(self, durations: Many[float], ends: Many[float], is_open: bool = False) -> list[tuple[int, FromEngine]]:
        """As `commit` and `plan` of so many steps, one after the other; is_open: without the last plan. Returns what
        goes to front ends, each with the place of the step before whose outputs it goes."""
        said: list[tuple[int, FromEngine]] = []
        at, num = 0, len(durations)
        while at < num:
            if self._behind:
                said += [(at, answer) for answer in self.commit(durations[at], ends[at])]
                at += 1
                if at < num or not is_open:
                    self.plan(ends[at - 1])
            else:
                at = self._repeat(durations, ends, at, is_open, said)
        return said

    def _repeat(
        self, durations: Many[float], ends: Many[float], at: int, is_open: bool, said: list[tuple[int, FromEngine]]
    ) -> int:
        """From step `at` on while no sequence is behind; up to which. Between two steps in which blocks are due nothing
        happens but that counters go on."""
        state, due, size, num_rows = self._state, self._due, self._size, self.num_rows
        in_flight, num = state.in_flight, len(durations)
        first, begin, commits, depth = in_flight[0], at, self.num_commits, len(in_flight)
        made: dict[int, Step] = {}
        num_before, plans_before = commits, self.num_plans
        has_next = True
        while at < num and not self._behind:
            state.kv_events.flush()
            if state.outbox.answers:
                said += [(at, answer) for answer in state.outbox.take().answers]
            at, commits = at + 1, commits + 1
            while at < num and not due[commits % size]:
                at, commits = at + 1, commits + 1
            has_next = at < num or not is_open
            places = due[commits % size]
            if has_next and places:
                self.num_commits, self.num_plans = commits, plans_before + commits - num_before
                step = Step(first.number + commits - num_before - 1 + depth)
                for index in places:
                    self._begin_block(index, step)
                made[step.number] = step
        num_commits = commits - num_before
        num_plans = num_commits if has_next else num_commits - 1
        state.blocks.end_step(first.number + num_commits - 1)  # nothing is held back for it, by `may_fast_forward`
        self.num_commits, self.num_plans = commits, plans_before + num_plans
        self._context += num_plans * num_rows
        counters = state.counters
        counters.num_steps += num_commits
        counters.generation_tokens += num_commits * num_rows
        counters.last_step_tokens, counters.last_step_s, state.last_commit_s = num_rows, durations[at - 1], ends[at - 1]
        state.costs.note_decodes(num_rows, first.num_context, durations[begin:at])
        state.work_done += num_plans * self._step_work
        for _ in range(min(num_commits, depth)):
            in_flight.popleft()
        for number in range(first.number + max(num_commits, depth), first.number + depth + num_plans):
            step = made.get(number) or Step(number)
            step.num_context = first.num_context + (number - first.number) * num_rows
            in_flight.append(step)
        if num_plans:
            builder = self._core.builder
            builder.skip(num_plans)
            builder.now = ends[at - 1 if has_next else at - 2]
            if state.deadlines:
                state.expire(builder.now)
        return at

    def commit(self, duration_s: float, now: float) -> tuple[FromEngine, ...]:
        """The oldest step in flight has ended; what goes to front ends before its outputs."""
        state, counters, num_rows = self._state, self._state.counters, self.num_rows
        step = state.in_flight.popleft()
        state.last_commit_s = now
        counters.num_steps += 1
        counters.last_step_tokens = num_rows
        counters.last_step_s = duration_s
        state.costs.note(_work(step, num_rows), duration_s)
        self.num_commits += 1
        counters.generation_tokens += num_rows
        if self._behind:
            self._publish_deferred(state.in_flight[-1] if state.in_flight else None)
        state.blocks.end_step(step.number)
        state.kv_events.flush()
        return state.outbox.take().answers

    def plan(self, now: float) -> int:
        """The next step; its number."""
        state, core = self._state, self._core
        if state.deadlines:
            state.expire(now)
        builder = core.builder
        builder.now = now
        self.num_plans += 1
        self._context += self.num_rows
        due = self._due[self.num_commits % self._size]
        if due or self._behind:
            for index in sorted({*due, *self._behind}):
                self._begin_block(index, builder.step)
        step = builder.take_step()
        step.num_context = self._context
        state.in_flight.append(step)
        state.work_done += self._step_work
        return step.number

    def stats(self) -> EngineStats:
        """As EngineCore.stats."""
        state, fields = self._state, self._fields
        counters, costs = state.counters, state.costs.costs
        num_free, num_cached, num_blocks, kv_usage = count_blocks(state)
        now = (
            counters.num_steps, counters.generation_tokens, counters.last_step_tokens, counters.last_step_s,
            sum([costs.predict(_work(step, self.num_rows)) for step in state.in_flight]), costs, state.costs.error,
            num_free, num_cached, num_blocks - num_free - num_cached, kv_usage,
        )  # fmt: skip
        for place, value in zip(_PLACES, now, strict=True):
            fields[place] = value
        return EngineStats._make(fields)

    def land(self) -> list[StepPlan]:
        """Bring the sequences up to date; the steps that are in flight now, oldest first. Their rows name no blocks:
        whoever made them up to here knew of none."""
        state, depth = self._state, len(self._state.in_flight)
        for index, seq in enumerate(self._running):
            self._fill(index)
            seq.num_planned += self.num_plans
            seq.num_computed += self.num_commits
            seq.rows_in_flight = seq.num_pending = depth
            seq.num_sent = len(seq.tables[0].ids)
        plans = []
        for number, step in enumerate(state.in_flight):
            if not step.rows:
                step.sequences = list(self._running)
                step.ends = [seq.num_planned - depth + number + 1 for seq in self._running]
                step.rows = [
                    self._row(seq, end, step.number) for seq, end in zip(self._running, step.ends, strict=True)
                ]
                for seq in self._running:
                    seq.last_step = step.number
            plans.append(StepPlan(step.number, tuple(step.rows)))
        order = state.policies.order
        num_refreshed = order.num_refreshed or (slack.NUM_REFRESHED if state.num_targeted else 0)
        if self.num_plans and num_refreshed and len(state.running) < max_running(self._core.config):
            state.waiting.refresh(num_refreshed, lambda seq: None)  # of nobody
        return plans

    def _row(self, seq: Sequence, end: int, number: int) -> PlanRow:
        tokens, from_step = ((), number - 1) if self._depth > 1 else ((self._token,), -1)
        return plan_row((seq.number, end - 1, tokens, from_step, (), None, True, False, ()))

    def _fill(self, index: int) -> None:
        """Its tokens up to now."""
        tokens = self._running[index].tokens
        tokens += [self._token] * (self._known[index] + self.num_commits - len(tokens))

    def _begin_block(self, index: int, step: Step) -> None:
        """As StepBuilder.add_row does where a row begins a block, or known tokens fill one."""
        seq, size, state = self._running[index], self._size, self._state
        end = seq.num_planned + self.num_plans
        num_blocks = len(seq.tables[0].ids)
        if end > num_blocks * size:
            state.blocks.extend(seq.tables, (end + size - 1) // size - num_blocks)
        known = self._known[index] + self.num_commits
        num_full = min(end, known) // size
        if num_full > seq.tables[-1].num_published:
            self._fill(index)
            state.publish(seq, num_full, step)
            self._note_behind(index, num_full)

    def _publish_deferred(self, last: Step | None) -> None:
        """As a commit does of those whose blocks another sequence had published before."""
        for index in list(self._behind):
            seq = self._running[index]
            num_full = (seq.num_computed + self.num_commits) // self._size
            if num_full > seq.tables[-1].num_published:
                self._fill(index)
                self._state.publish(seq, num_full, last)
            self._note_behind(index, num_full)

    def _note_behind(self, index: int, num_full: int) -> None:
        is_behind = self._state.config.caches_prefixes and num_full > self._running[index].tables[-1].num_published
        if is_behind and index not in self._behind:
            self._behind = sorted([*self._behind, index])
        elif not is_behind and index in self._behind:
            self._behind.remove(index)

    def _num_unpublished(self, seq: Sequence, num_tokens: int) -> int:
        if not self._state.config.caches_prefixes:
            return 0
        return max(0, num_tokens // self._size - seq.tables[-1].num_published)


def _work(step: Step, num_rows: int) -> Work:
    """As Step.work, also of one whose rows are not written down."""
    return Work(num_rows, num_rows, step.num_context, step.num_context)


def may_fast_forward(core: EngineCore, token: int) -> bool:
    """Whether all that goes on are decodes that draw `token`, with steps of the same rows in flight, and nothing else
    is under way."""
    state, config = core.state, core.config
    running, in_flight = state.running, state.in_flight
    if not running or not in_flight or len(state.by_id) != len(running) or state.released or core.has_jobs:
        return False
    if state.has_store or state.writes is not None or state.token_events is not None or core.is_recorded:
        return False
    if state.speculation is not None or any([pool.num_quarantined for pool in state.blocks.pools]):
        return False
    if state.blocks.has_windows or not config.keeps_kv or state.service.is_shared or state.moving:
        return False
    num_rows, depth = len(running), len(in_flight)
    for step in in_flight:
        if step.is_void or step.num_more_tokens or step.sequences != running:
            return False
    return num_rows <= config.max_num_batched_tokens and all(_goes_on(seq, depth, token) for seq in running)


def _goes_on(seq: Sequence, depth: int, token: int) -> bool:
    request = seq.request
    return (
        seq.status is Status.RUNNING
        and seq.first_token_s >= 0
        and seq.rows_in_flight == seq.num_pending == depth
        and seq.num_planned == len(seq.tokens) + depth - 1
        and request.priority < IDLE_PRIORITY
        and request.terms.kv_share >= 1
        and request.pooling is None
        and not request.sampling.grammar
        and request.sampling.logprobs is None
        and token not in seq.stop_ids
    )
