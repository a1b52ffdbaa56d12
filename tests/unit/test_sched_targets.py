"""Targets and idle work in the scheduler: who is next, how large a step is, and what is left for work that can wait."""

from __future__ import annotations

from collections.abc import Sequence as List

import pytest

from ledger import FakeLedger
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work
from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.sequence import Sequence
from tokenmill.core.slo import least_tokens
from tokenmill.core.terms import USUAL, Terms
from tokenmill.sched.budget import EVERY, SHARE, STEP_S
from tokenmill.sched.policies import pace, pick

CONFIG = EngineConfig(full_groups(4000), max_model_len=9000, max_num_seqs=64, max_num_batched_tokens=512)
COSTS = Costs(step_s=0.004, row_s=0.0002, token_s=0.0005)
"""A full step takes 0.26 s."""

Rows = List[tuple[int, int]]


class Timed(FakeLedger):
    """Time goes by as the costs say. `durations`: of all steps."""

    def __init__(self, config: EngineConfig = CONFIG, costs: Costs = COSTS) -> None:
        super().__init__(config, pick(config))
        self.costs = costs
        self.durations: list[float] = []

    def step(self) -> Rows:
        rows = self.plan()
        self.durations.append(predict(self.costs, rows))
        self.now += self.durations[-1]
        self.end()
        return rows


def predict(costs: Costs, rows: Rows) -> float:
    return costs.predict(Work(len(rows), sum(num_tokens for _, num_tokens in rows), 0))


def drawing(fake: Timed, number: int, terms: Terms = USUAL, priority: int = 0) -> list[Sequence]:
    """So many sequences with a short prompt that draw."""
    found = [fake.add(8, 900, terms=terms, priority=priority) for _ in range(number)]
    while any(not seq.num_output for seq in found):
        fake.step()
    return found


def test_a_target_brings_a_prompt_forward_as_far_as_it_must() -> None:
    """A long prompt with a target passes long ones without, not the one that is short enough to be served before."""
    fake = Timed(EngineConfig(full_groups(4000), max_model_len=9000, max_num_seqs=1, max_num_batched_tokens=512))
    plain, short = fake.add(900), fake.add(4)
    urgent, later = fake.add(1000, terms=Terms(ttft_s=1.5)), fake.add(1000, terms=Terms(ttft_s=3.0))
    assert fake.serve() == [short.number, urgent.number, later.number, plain.number]


def test_the_order_among_targets_is_by_slack() -> None:
    """Not by target alone: what the prompt takes counts too, and what has been waited."""
    fake = Timed(EngineConfig(full_groups(4000), max_model_len=9000, max_num_seqs=1, max_num_batched_tokens=512))
    early = fake.add(100, terms=Terms(ttft_s=2.0))
    fake.now = 0.5
    long, brief = fake.add(2000, terms=Terms(ttft_s=2.0)), fake.add(100, terms=Terms(ttft_s=1.6))
    assert fake.serve() == [long.number, early.number, brief.number]


def test_what_is_late_passes_nobody_more() -> None:
    """A target that cannot be met any longer does not push others over theirs."""
    fake = Timed(EngineConfig(full_groups(4000), max_model_len=9000, max_num_seqs=1, max_num_batched_tokens=512))
    late = fake.add(400, terms=Terms(ttft_s=0.3))
    fake.now = 0.2
    fresh = fake.add(400, terms=Terms(ttft_s=2.0))
    assert fake.serve() == [fresh.number, late.number]


def test_targets_starve_nobody() -> None:
    """A prompt without a target has its turn, although ones with tight targets never cease to come."""
    fake = Timed(EngineConfig(full_groups(4000), max_model_len=9000, max_num_seqs=2, max_num_batched_tokens=512))
    waits = fake.add(600, 2)
    for _ in range(400):
        while len(fake.waiting) < 4:
            fake.add(300, 2, terms=Terms(ttft_s=0.6))
        fake.step()
        if waits.num_output:
            break
    assert waits.num_output, "never served"


def test_prompts_leave_room_for_the_tightest_target() -> None:
    """While sequences with a target draw, no step with a prompt is longer than their pace allows, and prompts progress;
    without a target the step is full."""
    for tpot_s, most_s in ((0.05, 0.05), (0.1, 0.1), (0.0, 0.3)):
        fake = Timed()
        drawing(fake, 4, Terms(tpot_s=tpot_s))
        fake.durations.clear()
        prompt = fake.add(3000)
        while not prompt.num_output:
            fake.step()
        if tpot_s:
            assert 0.5 * most_s < max(fake.durations) <= 1.5 * most_s
            assert len(fake.durations) > 12
        else:
            assert max(fake.durations) > 0.2 and len(fake.durations) < 9


def test_a_target_holds_on_average() -> None:
    """Time per output token over the whole answer, beside prompts that never cease, stays within the target."""
    fake = Timed()
    seqs = drawing(fake, 3, Terms(tpot_s=0.06))
    for _ in range(150):
        while len(fake.waiting) < 2:
            fake.add(1500, 2)
        fake.step()
    for seq in seqs:
        assert (fake.now - seq.first_token_s) / (seq.num_output - 1) <= 0.06


def test_who_is_ahead_lends_half_of_it() -> None:
    """A lead over the pace makes chunks larger; who is behind makes them smaller, but not without end."""
    seq = Sequence(0, Timed().add(8, 900, terms=Terms(tpot_s=0.1)).request, [7] * 9)
    assert pace.allowed_s([seq], 0.0) is None, "its first token has not come"
    seq.first_token_s = 0.0
    on_pace = pace.allowed_s([seq], 0.0)
    ahead, behind = pace.allowed_s([seq], -0.4), pace.allowed_s([seq], 5.0)
    assert on_pace is not None and ahead is not None and behind is not None
    assert on_pace == pytest.approx(0.09)
    assert ahead == pytest.approx(0.9 * (0.1 + 0.2)) and behind == pytest.approx(0.045)


def test_prompts_progress_whatever_the_target() -> None:
    """A target that no step can hold stops nobody."""
    fake = Timed()
    drawing(fake, 4, Terms(tpot_s=0.001))
    prompt = fake.add(320)
    num_steps = 0
    while not prompt.num_output:
        fake.step()
        num_steps += 1
    assert num_steps <= -(-320 // least_tokens(CONFIG.max_num_batched_tokens, CONFIG.block_size)) + 1


def test_steps_of_idle_work_alone_take_20_ms() -> None:
    """Prompts come in chunks of that time, and of many drawing rows those are taken that waited longest."""
    fake = Timed()
    prompt = fake.add(700, 2, priority=IDLE_PRIORITY)
    while not prompt.num_output:
        fake.step()
    assert 0.5 * STEP_S < max(fake.durations) <= STEP_S
    fake = Timed(costs=Costs(step_s=0.004, row_s=0.002))
    seqs = drawing(fake, 30, priority=IDLE_PRIORITY)
    fake.durations.clear()
    before = [seq.num_output for seq in seqs]
    for _ in range(40):
        fake.step()
    assert max(fake.durations) <= STEP_S
    gains = [seq.num_output - had for seq, had in zip(seqs, before, strict=True)]
    assert min(gains) >= 9 and max(gains) <= 15, "all have turns"


@pytest.mark.parametrize("num_others", [1, 8])
def test_idle_work_goes_on_beside_others(num_others: int) -> None:
    """While others draw, idle prompts and answers progress, and steps are a tenth longer on average."""
    fake = Timed()
    drawing(fake, num_others)
    usual_s = predict(COSTS, [(0, 1)] * num_others)
    idle = [fake.add(100, 20, priority=IDLE_PRIORITY) for _ in range(4)]
    fake.durations.clear()
    for _ in range(800):
        fake.step()
    assert sum(seq.num_output for seq in idle) >= 40
    assert sum(fake.durations) <= 800 * usual_s * (1 + 1.6 * SHARE)


def test_idle_work_stops_for_a_prompt() -> None:
    """The step after a call came has none of it, and so has every one with a prompt of others."""
    fake = Timed()
    drawing(fake, 2)
    idle = [seq.number for seq in (fake.add(100, 500, priority=IDLE_PRIORITY) for _ in range(3))]
    for _ in range(200):
        fake.step()
    prompt = fake.add(2000)
    while not prompt.num_output:
        rows = fake.step()
        assert not {number for number, _ in rows} & set(idle)


def test_idle_work_fills_up_to_a_target() -> None:
    """Where all others have a target, steps may be as long as they allow, and every step has idle rows."""
    fake = Timed()
    drawing(fake, 2, Terms(tpot_s=0.018))
    idle = [fake.add(16, 400, priority=IDLE_PRIORITY) for _ in range(8)]
    for _ in range(300):
        fake.step()
    fake.durations.clear()
    rows = [len(fake.step()) for _ in range(4 * EVERY)]
    assert min(rows) > 2 and max(fake.durations) <= STEP_S
    assert all(seq.num_output for seq in idle)


def test_nothing_is_known_at_first() -> None:
    """Before a step was measured, idle work waits while others run, and targets change nothing."""
    fake = Timed(costs=Costs())
    (seq,) = drawing(fake, 1, Terms(tpot_s=0.05))
    idle = fake.add(100, 4, priority=IDLE_PRIORITY)
    for _ in range(50):
        fake.step()
    assert not idle.num_output and seq.num_output > 50
