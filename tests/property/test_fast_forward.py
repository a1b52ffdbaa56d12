"""A run of decode steps leaves what as many steps one by one leave: every book of the engine, to the last bit."""

from __future__ import annotations

import random
from collections import deque
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work, work_of
from tokenmill.core.events import Submit
from tokenmill.core.kv_events import WatchKV
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import RowResult, StepPlan, StepResult
from tokenmill.engine.core import EngineCore
from tokenmill.sim.fast_forward.steps import DecodeRun, may_fast_forward

LAW = Costs(0.01, 0.001, 0.0001, 1e-7, 1e-6)
END = 9


def dump(thing: Any, seen: dict[int, int]) -> Any:
    """All that can be reached, in plain values."""
    if thing is None or isinstance(thing, int | float | str | bytes | Enum | type):
        return thing
    if isinstance(thing, FunctionType | MethodType) or type(thing).__name__ in (
        "partial",
        "builtin_function_or_method",
    ):
        return "code"
    if id(thing) in seen:
        return f"again {seen[id(thing)]}"
    seen[id(thing)] = len(seen)
    if type(thing).__name__ == "PlanRow":
        thing = thing._replace(blocks=())
    if isinstance(thing, dict):
        return [(dump(key, seen), dump(value, seen)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(map(repr, thing))
    if isinstance(thing, list | tuple | deque):
        return [dump(each, seen) for each in thing]
    names = list(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    held = [(name, dump(getattr(thing, name), seen)) for name in names if hasattr(thing, name) and "weak" not in name]
    return [type(thing).__name__, held] if held else type(thing).__name__


class Machine:
    """An engine that is stepped; `lengths`: of the answers, by sequence number."""

    def __init__(self, config: EngineConfig, lengths: dict[int, int]) -> None:
        self.core = EngineCore(config)
        self.lengths = lengths
        self.plans: deque[StepPlan] = deque()
        self.prompts: dict[int, int] = {}
        self.said: list[Any] = []
        self.now = 0.0
        self.rng = random.Random(len(lengths))

    def fill(self) -> None:
        while (plan := self.core.plan(self.now)) is not None:
            self.plans.append(plan)
            for row in plan.rows:
                if row.intro is not None:
                    self.prompts[row.seq] = len(row.intro.prompt_tokens)

    def step(self) -> None:
        plan = self.plans.popleft()
        took_s = LAW.predict(work_of(plan.rows))
        self.now += took_s
        rows = []
        for row in plan.rows:
            num_drawn = row.start + row.num_tokens - self.prompts[row.seq] + 1
            token = END if num_drawn >= self.lengths[row.seq] else 1
            rows.append(RowResult(row.seq, (token,) if row.sample else ()))
        effects = self.core.commit(StepResult(plan.step, tuple(rows), took_s), self.now)
        self.said += [each for each in effects.outputs if each.finish_reason or each.timing]
        self.said += effects.answers
        self.fill()

    def run(self, most: int) -> int:
        """So many steps at most, none of which ends an answer; how many."""
        core = self.core
        ends = min(
            self.lengths[seq.number] - 1 - (len(seq.tokens) - self.prompts[seq.number]) for seq in core.state.running
        )
        run = DecodeRun(core, 1, most)
        works = deque(work_of(plan.rows) for plan in self.plans)
        num = min(run.most_commits, ends)
        while run.num_commits < num:
            durations, clock = [], []
            for _ in range(min(num - run.num_commits, self.rng.choice([1, 2, 5, 30]))):
                durations.append(LAW.predict(works.popleft()))
                self.now += durations[-1]
                clock.append(self.now)
                context = run.next_context + (len(durations) - 1) * run.num_rows
                works.append(Work(run.num_rows, run.num_rows, context, context, run.num_rows))
            is_open = self.rng.random() < 0.3
            self.said += [answer for _, answer in run.repeat(durations, clock, is_open)]
            if is_open:
                run.plan(self.now)
        self.stats = run.stats()
        self.plans = deque(run.land())
        assert [work_of(plan.rows) for plan in self.plans] == list(works)
        return num


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_leaps_leave_what_steps_leave(first: int) -> None:
    assert sum(num_fast_forwarded(seed) for seed in range(first, first + 3)) > 100, "hardly a step"


def num_fast_forwarded(seed: int) -> int:
    """Steps in fast forward, in a random life of an engine beside one that is stepped."""
    rng = random.Random(seed)
    config = EngineConfig(
        groups=full_groups(rng.choice([40, 60, 400])),
        max_model_len=120,
        block_size=rng.choice([1, 3, 4, 16]),
        max_num_seqs=rng.choice([2, 6, 20]),
        max_num_batched_tokens=rng.choice([16, 64]),
        enable_prefix_caching=rng.random() < 0.8,
        steps_in_flight=rng.choice([1, 2, 2, 3]),
        scheduling_policy=rng.choice(["short-prompts-first", "fcfs"]),
    )
    lengths: dict[int, int] = {}
    stepped, forwarded = Machine(config, lengths), Machine(config, lengths)
    is_watched = rng.random() < 0.5
    num_steps = num_requests = 0
    for _ in range(20):
        for _ in range(rng.choice([0, 1, 1, 3])):
            prompt = tuple(rng.choice([(2, 3), (4,), (5, 6, 7)])[i % 1] for i in range(rng.randint(1, 30)))
            most = rng.randint(1, 60)
            request = Request(
                f"r{num_requests}", prompt, SamplingParams(max_tokens=most), most, num_requests, eos_token_ids=(END,)
            )
            lengths[num_requests] = rng.choice([most, rng.randint(1, 60), 1000])
            num_requests += 1
            for machine in (stepped, forwarded):
                if is_watched and num_requests == 3:
                    machine.said += machine.core.handle(WatchKV(True), machine.now).answers
                effects = machine.core.handle(Submit((request,)), machine.now)
                machine.said += [*effects.outputs, *effects.answers]
        for machine in (stepped, forwarded):
            machine.fill()
        for _ in range(rng.randint(1, 8)):
            if stepped.plans:
                stepped.step()
                forwarded.step()
        if len(forwarded.plans) == config.steps_in_flight and may_fast_forward(forwarded.core, 1):
            num = forwarded.run(rng.randint(0, 50))
            num_steps += num
            for _ in range(num):
                stepped.step()
            assert forwarded.stats == stepped.core.stats()
        assert forwarded.now == stepped.now
        assert forwarded.said == stepped.said
        assert dump(forwarded.core, {}) == dump(stepped.core, {})
        forwarded.core.check()
    return num_steps
