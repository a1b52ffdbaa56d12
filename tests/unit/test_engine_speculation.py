"""The policy of drafts against simulated costs: it is never much slower than drafting nothing, and about as fast as the
best fixed number of drafts, whatever drafts cost and however often they are right."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work, work_of
from tokenmill.core.events import Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.speculation import SpeculationConfig
from tokenmill.core.step import Drafts, PlanRow, RowResult, StepPlan, StepResult
from tokenmill.core.terms import Terms
from tokenmill.engine.core import EngineCore
from tokenmill.engine.speculation import Candidate, Proposal, Speculation

MOST = 8
NUM_PROMPT, NUM_OUTPUT = 8, 1000
KNOWN = Costs(step_s=4e-3, row_s=1e-4, token_s=1e-4)


def request(name: str) -> Request:
    prompt = tuple(range(2, 2 + NUM_PROMPT))
    return Request(name, prompt, SamplingParams(), NUM_OUTPUT, 0)


def config(speculation: SpeculationConfig | None) -> EngineConfig:
    return EngineConfig(full_groups(4096), max_model_len=2048, block_size=16, speculation=speculation)


@dataclass
class Machine:
    """What steps take. gap_s: between the end of a step and a next one that was planned only then."""

    step_s: float
    row_s: float
    draft_s: float
    gap_s: float

    def seconds(self, rows: tuple[PlanRow, ...]) -> float:
        work = work_of(rows)
        num_drafts = sum(len(row.drafts) for row in rows)
        return self.step_s + self.row_s * (work.num_tokens - num_drafts) + self.draft_s * num_drafts


class Text:
    """What is drawn, and a drafter that is right with the chance that `right` gives for a position, and says 0.5."""

    def __init__(self, right: Callable[[int], float]) -> None:
        self.right = right
        self.rng = random.Random(1)
        self.lengths: dict[int, int] = {}

    def run(self, row: PlanRow) -> RowResult:
        """Token `position` is drawn at each; a wrong draft is 0."""
        start = NUM_PROMPT + self.lengths.setdefault(row.seq, 0)
        tokens = [start]
        for draft in row.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(tokens[-1] + 1)
        self.lengths[row.seq] += len(tokens)
        first = tokens[-1] + 1
        drafts = [token if self.rng.random() < self.right(token) else 0 for token in range(first, first + MOST)]
        return RowResult(row.seq, tuple(tokens), drafts=Drafts(tuple(drafts), "test", (0.5,) * MOST))


def tokens_per_s(
    machine: Machine, text: Text, num_rows: int, fixed: int | None = None, off: bool = False, late_s: float = 0.0
) -> float:
    """Of requests that are served together. fixed: so many drafts of each, instead of what the policy chooses. late_s:
    what a drafter takes behind every third step for what it had missed, which does not count."""
    core = EngineCore(config(None if off else SpeculationConfig()))
    if fixed is not None:
        assert core.state.speculation is not None
        core.state.speculation.choose = lambda rows, *rest: [min(fixed, each.room) for each in rows]  # type: ignore
    core.handle(Submit(tuple(request(f"r{index}") for index in range(num_rows))), 0.0)
    now, num_tokens, began_s, all_late_s = 0.0, 0, None, 0.0
    in_flight: deque[tuple[StepPlan, float]] = deque()
    while core.has_work:
        while (plan := core.plan(now)) is not None:
            begins_s = in_flight[-1][1] if in_flight else now + machine.gap_s
            in_flight.append((plan, begins_s + machine.seconds(plan.rows)))
        plan, end_s = in_flight.popleft()
        rows = tuple(text.run(row) if row.sample else RowResult(row.seq) for row in plan.rows)
        late = 0.0 if plan.step % 3 else late_s
        result = StepResult(plan.step, rows, machine.seconds(plan.rows) + late, late)
        now, all_late_s = end_s + late, all_late_s + late
        in_flight = deque([(each, ends_s + late) for each, ends_s in in_flight])
        outputs = core.commit(result, now).outputs
        if began_s is not None:
            num_tokens += sum(len(each.tokens) for each in outputs)
        elif plan.step > 16:
            began_s = now - all_late_s
    assert began_s is not None
    return num_tokens / (now - all_late_s - began_s)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("draft_ms", [0.1, 1.0])
def test_text_that_nobody_can_draft_costs_little(num_rows: int, draft_ms: float) -> None:
    machine = Machine(4e-3, 2e-4, draft_ms / 1e3, 3e-4)
    none = tokens_per_s(machine, Text(lambda _: 0.0), num_rows, off=True)
    assert tokens_per_s(machine, Text(lambda _: 0.0), num_rows) >= 0.97 * none


@pytest.mark.parametrize(
    ("num_rows", "draft_ms", "right"),
    [(1, 0.1, 0.2), (1, 0.1, 0.95), (1, 0.5, 0.8), (1, 1.0, 0.5), (8, 0.1, 0.5), (8, 0.1, 0.8), (8, 1.0, 0.95)],
)
def test_what_is_chosen_is_as_fast_as_the_best_fixed_number(num_rows: int, draft_ms: float, right: float) -> None:
    machine = Machine(4e-3, 2e-4, draft_ms / 1e3, 3e-4)
    speeds = [tokens_per_s(machine, Text(lambda _: right), num_rows, fixed) for fixed in (0, 1, 2, 4, 8)]
    assert tokens_per_s(machine, Text(lambda _: right), num_rows) >= 0.95 * max(speeds)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_what_a_drafter_had_missed_keeps_no_drafts_away(num_rows: int) -> None:
    """Prompts that it computes in a step, ten times as long as that takes, say nothing of what drafts take."""
    machine = Machine(4e-3, 2e-4, 3e-4, 3e-4)
    alone = tokens_per_s(machine, Text(lambda _: 0.9), num_rows)
    assert alone > 1.2 * tokens_per_s(machine, Text(lambda _: 0.9), num_rows, off=True)
    assert tokens_per_s(machine, Text(lambda _: 0.9), num_rows, late_s=4e-2) >= 0.97 * alone


MULTIPLES = (1.0, 1.05, 1.14, 1.15, 1.26, 1.32, 1.35, 1.37, 1.6)
"""Of a step of one row with 0, 1, ... drafts, as of SmolLM2 on AVX-512 VNNI; a further one adds 0.12."""


class MeasuredMachine(Machine):
    """draft_s: what a draft takes, as a multiple of what it takes by MULTIPLES."""

    def seconds(self, rows: tuple[PlanRow, ...]) -> float:
        work, num_drafts = work_of(rows), sum(len(row.drafts) for row in rows)
        more = MULTIPLES[min(num_drafts, 8)] - 1 + 0.12 * max(0, num_drafts - 8)
        return self.step_s * (1 + self.draft_s * more) + self.row_s * (work.num_tokens - num_drafts)


def random_load(seed: int) -> tuple[Machine, int, Callable[[int], float]]:
    """A machine, a number of rows up to 8, and how likely drafts are at each position: in turns, often and seldom."""
    rng = random.Random(seed)
    num_rows, make = rng.choice((1, 1, 2, 4, 8)), rng.choice((Machine, MeasuredMachine))
    machine = make(4e-3, 2e-4, 0.0, rng.choice((0.0, 1e-4, 4e-4)))
    machine.draft_s = rng.choice((0.05, 0.2, 0.6, 1.5)) * (1e-3 if make is Machine else 2.0)
    one, other, period = rng.random(), rng.random(), rng.choice((50, 200, 10_000))
    return machine, num_rows, lambda position: one if position // period % 2 else other


@pytest.mark.parametrize("seed", range(20))
def test_on_random_loads_what_is_chosen_is_as_fast_as_the_best_fixed_number(seed: int) -> None:
    machine, num_rows, right = random_load(seed)
    speeds = [tokens_per_s(machine, Text(right), num_rows, fixed) for fixed in (1, 2, 4, 8)]
    speeds.append(tokens_per_s(machine, Text(right), num_rows, off=True))
    assert tokens_per_s(machine, Text(right), num_rows) >= 0.95 * max(speeds)


def test_text_that_begins_to_repeat_itself_is_drafted_again() -> None:
    """Drafts that nobody verified were judged all the same."""
    machine, text = Machine(4e-3, 2e-4, 1e-4, 3e-4), Text(lambda position: 0.0 if position < NUM_OUTPUT / 2 else 1.0)
    none = tokens_per_s(machine, Text(lambda _: 0.0), 1, off=True)
    assert tokens_per_s(machine, text, 1) > 1.5 * none


DRAFTS = Drafts((1, 2, 3, 4), "test", (0.9, 0.9, 0.5, 0.9))
ROW = Work(1, 1, 10, 10, 1)


def choose(speculation: Speculation, most: int = 9, room: int = 9, work: Work = ROW, **terms: float) -> int:
    candidate = Candidate(0, Proposal(DRAFTS, 1.0), room, 10, Terms(**terms))  # type: ignore[arg-type]
    return speculation.choose([candidate], work, KNOWN, most)[0]


def measured(**given: Any) -> Speculation:
    """Drafts are known to cost next to nothing."""
    speculation = Speculation(SpeculationConfig(**given))
    for num_drafts in (0, 1, 3, 7):
        speculation.note_step(ROW, num_drafts, KNOWN, KNOWN.predict(ROW))
    return speculation


def plain_measured(seconds: float = KNOWN.predict(ROW)) -> Speculation:
    """A step without drafts has taken so long, and nothing else is known."""
    speculation = Speculation(SpeculationConfig())
    speculation.note_step(ROW, 0, KNOWN, seconds)
    return speculation


def test_limits_of_the_server_of_requests_and_of_the_step() -> None:
    """The lowest holds. A request lowers what the server drafts, and never raises it."""
    assert choose(measured()) == 4
    assert choose(plain_measured()) == 1, "no drafts were measured: little by little"
    assert [choose(measured(), most) for most in (0, 2)] == [0, 2] and choose(measured(), room=3) == 3
    assert choose(measured(num_speculative_tokens=2)) == choose(measured(num_speculative_tokens=2), draft_n_max=3) == 2
    assert choose(measured(), draft_n_max=1) == 1 and choose(measured(), draft_n_max=0) == 0
    assert choose(measured(p_min=0.6)) == choose(measured(), draft_p_min=0.6) == 2
    assert choose(measured(), draft_p_min=0.6, draft_n_min=3) == choose(measured(p_min=0.6, n_min=3)) == 0
    assert choose(measured(p_min=0.6), draft_p_min=0.1) == 2
    assert choose(measured(), work=Work(1, 64, 640, 10, 1)) == 0, "a step with a prompt"
    assert measured().choose([], ROW, KNOWN, 9) == []
    candidate = Candidate(0, Proposal(DRAFTS, 1.0), 9, 10, Terms())
    assert measured().choose([candidate], ROW, Costs(), 9) == [0], "costs are unknown"


def test_a_fixed_number_is_verified_whatever_it_costs() -> None:
    """Which other limits still bound. Costs need not be known, and steps wait for each other."""
    fixed = Speculation(SpeculationConfig(adaptive=False, num_speculative_tokens=3))
    assert fixed.waits and choose(fixed) == 3
    assert [choose(fixed, most) for most in (0, 2)] == [0, 2] and choose(fixed, room=1) == 1
    assert choose(fixed, draft_n_max=2) == 2 and choose(fixed, draft_n_max=9) == 3
    candidates = [Candidate(number, Proposal(DRAFTS, 1.0), 9, 10, Terms()) for number in (0, 1, 2)]
    assert fixed.choose(candidates, ROW, Costs(), 7) == [3, 3, 1]


def test_what_it_goes_by_is_told() -> None:
    """Drafts of 3 that were right twice and then wrong; steps in which a draft adds a tenth; and what was chosen."""
    speculation = Speculation(SpeculationConfig())
    assert speculation.stats == (1.0, (), ())
    for number in range(40):
        speculation.note_tokens(number, (9,), Drafts((1, 2, 3), "test", (0.6,) * 3), 0)
        speculation.note_tokens(number, (1, 2, 8), None, 0)
        for num_drafts in (0, 1, 3):
            speculation.note_step(ROW, num_drafts, KNOWN, KNOWN.predict(ROW) * (1 + num_drafts / 10))
    assert choose(speculation) == 4
    told = speculation.stats
    ((source, share, num_chosen),) = told.sources
    assert (source, num_chosen) == ("test", 4) and share == pytest.approx(2 / 3, abs=0.02)
    assert told.step_costs[:2] == pytest.approx((1.1, 1.2), abs=0.01) and told.speedup > 1.05
    speculation.choose([], ROW, KNOWN, 9)
    assert speculation.stats.sources[0][2] == 0 and speculation.stats.speedup < told.speedup


def test_a_step_without_drafts_is_measured_first() -> None:
    """And so that it does not wait for another, with each size of rows."""
    speculation = Speculation(SpeculationConfig())
    speculation.note_step(ROW, 1, KNOWN, KNOWN.predict(ROW))
    assert choose(speculation) == 0 and not speculation.waits
    speculation.note_step(ROW, 0, KNOWN, KNOWN.predict(ROW))
    assert choose(speculation) == 1
    assert choose(speculation, work=ROW._replace(num_rows=8, num_tokens=8)) == 0


def takes_unlikely(speculation: Speculation, chance: float = 0.4) -> bool:
    """Whether it verifies a draft that is right so often."""
    candidate = Candidate(0, Proposal(Drafts((1,), "test", (chance,)), 1.0), 9, 10, Terms())
    return speculation.choose([candidate], ROW, KNOWN, 9) == [1]


@pytest.mark.parametrize("off", [0.2, 5.0])
def test_wrong_predictions_of_steps_change_nothing(off: float) -> None:
    """Those of an engine's first steps are made from prompts alone. A draft here adds half of a step."""
    plain_s = off * KNOWN.predict(ROW)
    speculation = plain_measured(plain_s)
    assert takes_unlikely(speculation)
    for _ in range(8):
        speculation.note_step(ROW, 1, KNOWN, 1.5 * plain_s)
    assert not takes_unlikely(speculation) and choose(speculation) > 0


def test_one_slow_step_keeps_drafts_away_for_a_while() -> None:
    """Twice as long after each that was slow. And likely drafts not at all."""
    speculation, plain_s, rests = plain_measured(), KNOWN.predict(ROW), []
    for _ in range(3):
        speculation.note_step(ROW, 1, KNOWN, 4 * plain_s)
        rests.append(0)
        assert takes_unlikely(speculation)
        while not takes_unlikely(speculation, 0.2):
            speculation.note_step(ROW, 0, KNOWN, plain_s)
            rests[-1] += 1
    assert rests == [33, 65, 129]


def test_steps_that_are_held_up_now_and_then_keep_no_drafts_away() -> None:
    """One step in ten takes three times as long, with and without drafts. A draft adds a twentieth."""
    speculation, plain_s, rng = plain_measured(), KNOWN.predict(ROW), random.Random(1)
    num_taken = 0
    for _ in range(1000):
        is_taken = takes_unlikely(speculation)
        num_taken += is_taken
        seconds = plain_s * (1.05 if is_taken else 1.0) * (3.0 if rng.random() < 0.1 else 1.0)
        speculation.note_step(ROW, int(is_taken), KNOWN, seconds)
    assert num_taken > 980


def test_steps_with_drafts_that_are_too_fast_correct_the_others() -> None:
    """A machine has become four times as fast while all steps had drafts, which then become dear: without a step that
    had none, that is noticed."""
    speculation, plain_s = measured(), KNOWN.predict(ROW) / 4
    for _ in range(16):
        speculation.note_step(ROW, 1, KNOWN, plain_s)
    for _ in range(16):
        speculation.note_step(ROW, 1, KNOWN, 2 * plain_s)
    assert not takes_unlikely(speculation)


@pytest.mark.parametrize("waiting", [1.0, 1.3])
def test_what_waiting_costs_where_nothing_is_drafted_counts(waiting: float) -> None:
    """One step in three has a draft, which is worth a quarter: not if the two others take a third longer for it."""
    speculation, plain_s = measured(), KNOWN.predict(ROW)
    for _ in range(30):
        speculation.note_step(ROW, 0, KNOWN, waiting * plain_s, has_waited=True)
        for candidates in ([Candidate(0, Proposal(Drafts((1,), "test", (0.25,)), 1.0), 9, 10, Terms())], [], []):
            speculation.choose(candidates, ROW, KNOWN, 9)
    assert speculation.waits == (waiting == 1.0)


def test_what_was_proposed_before_the_last_tokens_is_not_verified() -> None:
    """Where steps wait for each other, two may be committed between two plans."""
    speculation = Speculation(SpeculationConfig())
    speculation.note_tokens(0, (9,), DRAFTS, 1)
    assert speculation.proposed[0].drafts.tokens == (2, 3, 4)
    speculation.note_tokens(0, (8,), None, 0)
    assert not speculation.proposed
