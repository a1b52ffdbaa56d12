"""`tokenmill calibrate`: a known machine is found again from noisy logs; what was not measured is marked; its file is
read back, and a bad one is one line."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.calibrate.command import describe
from tokenmill.cli.main import main
from tokenmill.core.cost import Work, read_share, work_of
from tokenmill.core.errors import ConfigError
from tokenmill.core.step import PlanRow
from tokenmill.core.step_records import SIZE, LogFacts, Machine, StepRecords, StepWriter, TimedRequest, TimedStep
from tokenmill.plan.fit.logs import Point, backs, fit, fit_line, fronts, gaps, passages, speed_factor
from tokenmill.plan.fit.observed import observed
from tokenmill.sim.calibrated import NOT_KNOWN, Beside, Calibrated, Curve, Kind, Line, shares

FACTS = LogFacts("toy", "id", "cpu", "avx2", 2, 16, 100, 64, 576)
GAP = Line(0.0004, 0.00001)
NUM_STEPS = 3000


def true_s(work: Work) -> float:
    """Bound by memory below, by tiles of 16 tokens above, with attention and a head: far from linear in tokens."""
    tiles = 16 * math.ceil(work.num_tokens / 16) if work.num_tokens > 8 else work.num_tokens
    computed = max(0.008, 0.0002 * tiles) + 0.0004 * work.num_rows + 2e-8 * work.num_positions
    return computed + 6e-7 * work.num_context + 1e-4 * work.num_drawn


def rows_of(rng: random.Random) -> list[PlanRow]:
    """Decodes, prompts alone, and both."""
    kind = rng.random()
    num_decodes = rng.choice((1, 2, 3, 4, 8, 12, 16, 32)) if kind < 0.9 else 0
    rows = [PlanRow(number, rng.randrange(10, 1500), (), 1, sample=True) for number in range(num_decodes)]
    if kind > 0.75:
        num_tokens = rng.choice((20, 64, 100, 200, 300, 500))
        rows.append(PlanRow(99, rng.choice((0, 256, 512)), (7,) * num_tokens, sample=rng.random() < 0.5))
    return rows


def log_of(
    seed: int,
    noise: float = 0.03,
    num_steps: int = NUM_STEPS,
    true_s: Callable[[Work], float] = true_s,
    rows_of: Callable[[random.Random], list[PlanRow]] = rows_of,
    facts: LogFacts = FACTS,
) -> StepRecords:
    """Of the known machine, which stalls once in a hundred steps."""
    rng, steps, now = random.Random(seed), [], 100.0
    for number in range(num_steps):
        rows = rows_of(rng)
        work = work_of(rows)
        took_s = true_s(work) * (1 + rng.gauss(0, noise)) * (3 if rng.random() < 0.01 else 1)
        ended_s = now + took_s + GAP(work.num_rows)
        ones = [row.start for row in rows if row.num_tokens == 1]
        steps.append(
            TimedStep(number, now, now + 1e-4, ended_s, took_s, ended_s + 1e-4, len(rows), len(ones), work[1],
                      int(work.num_drawn), len(rows), 0, 50, 0, work[2], work[3], sum(ones))  # type: ignore[arg-type]
        )  # fmt: skip
        now = ended_s
    return StepRecords(facts, tuple(steps), ())


CHOSEN = 4 / 64
"""Of the experts that `mixed_s` reads, what a token chooses."""


def mixed_s(work: Work) -> float:
    """Of a mixture of experts, most of whose time goes into reading them."""
    read_s = 0.004 + 0.03 * read_share(CHOSEN, work.num_tokens) + 6e-7 * work.num_context
    return read_s + 1e-4 * work.num_tokens + 3e-4 * work.num_rows + 2e-8 * work.num_positions


def few_sizes(rng: random.Random) -> list[PlanRow]:
    """Decodes of few or of many rows, and chunks of prompts."""
    rows = [PlanRow(n, rng.randrange(10, 1500), (), 1, sample=True) for n in range(rng.choice((1, 8, 64)))]
    if rng.random() < 0.15:
        rows.append(PlanRow(99, rng.choice((0, 256)), (7,) * rng.choice((64, 200, 400)), sample=True))
    return rows


def test_experts_are_read_by_a_known_curve() -> None:
    """Between the sizes of steps that were measured, which straight lines miss by a third."""
    facts = replace(FACTS, chosen_experts=CHOSEN)
    cost_model, plain = (
        fit([log_of(1, true_s=mixed_s, rows_of=few_sizes, facts=each)]).cost_model for each in (facts, FACTS)
    )
    assert cost_model.experts_s == pytest.approx(0.03, rel=0.1) and plain.experts_s == 0
    off, off_plain = [], []
    for num in (2, 4, 16, 32):
        work = Work(num, num, 700 * num, 700 * num, num)
        off.append(abs(cost_model.predict(work) / mixed_s(work) - 1))
        off_plain.append(abs(plain.predict(work) / mixed_s(work) - 1))
    assert max(off) < 0.04 and max(off_plain) > 0.25, (off, off_plain)
    assert Calibrated.from_json(cost_model.to_json()).predict(work) == cost_model.predict(work)
    assert cost_model.scaled(2).predict(work) == pytest.approx(2 * cost_model.predict(work))
    assert any(line.startswith("experts: ") for line in describe(cost_model, [1.0], [1], [0]))
    whole = json.loads(plain.to_json())
    assert whole["law"].pop("experts_s") == 0
    assert Calibrated.from_json(json.dumps(whole)).predict(work) == plain.predict(work)  # a file without experts


@pytest.fixture(scope="module")
def cost_model() -> Calibrated:
    return fit([log_of(1)]).cost_model


def test_a_known_machine_is_found_again(cost_model: Calibrated) -> None:
    """Of steps of its kinds that it never saw, without their noise, within 6 %, half of them within 2 %."""
    rng = random.Random(2)
    works = [work_of(rows_of(rng)) for _ in range(500)]
    off = sorted(abs(cost_model.predict(work) / true_s(work) - 1) for work in works)
    assert off[250] < 0.02 and off[450] < 0.06, (off[250], off[450])
    assert all(map(cost_model.is_seen, works))


def test_a_machine_that_is_slower_at_times_is_found_as_well() -> None:
    """What else runs there is told of by the speed of its spans, not by the cost model: large steps come when it is
    slow."""
    log = log_of(6)
    order = sorted(log.steps, key=lambda step: (step.num_tokens > 100, step.number))
    slow = []
    for step in order:
        factor = (1.0, 0.8, 1.0, 1.9, 1.3)[len(slow) * 40 // NUM_STEPS % 5]  # not where the fit cuts
        slow.append(step._replace(number=len(slow), duration_s=step.duration_s * factor))
    cost_model, slowness = fit([StepRecords(FACTS, tuple(slow), ())])
    assert 2 < max(slowness) / min(slowness) < 2.7
    rng = random.Random(2)
    off = sorted(cost_model.predict(work) / true_s(work) for work in (work_of(rows_of(rng)) for _ in range(300)))
    assert off[270] / off[30] < 1.15, (off[30], off[150], off[270])
    whole = next(each for each in cost_model.errors if each.regime == "all")
    assert whole.paced_abs < whole.median_abs / 2


def test_errors_are_of_steps_held_out_and_show_the_noise(cost_model: Calibrated) -> None:
    by_regime = {each.regime: each for each in cost_model.errors}
    assert by_regime.keys() >= {"decode, 1 row", "decode, 17-64 rows", "prefill, more tokens", "mixed", "all"}
    assert by_regime["all"].num_steps < NUM_STEPS / 3
    assert 0.01 < by_regime["decode, 1 row"].median_abs < 0.04 and abs(by_regime["decode, 1 row"].median) < 0.02


def test_more_work_never_takes_less(cost_model: Calibrated) -> None:
    """As core.cost.CostModel promises, beyond what was measured as well."""
    before = 0.0
    for num_tokens in range(1, 5000, 7):
        now = cost_model.predict(Work(1, num_tokens, 0, 0, 1))
        assert now >= before
        before = now
    assert cost_model.predict(Work(64, 64, 1e5, 1e5, 64)) > cost_model.predict(Work(63, 63, 9e4, 9e4, 63))


@pytest.mark.parametrize(
    ("work", "is_seen"),
    [
        (Work(1, 1, 900, 900, 1), True),
        (Work(24, 24, 24_000, 24_000, 24), True),
        (Work(1, 1, 20_000, 20_000, 1), False),
        (Work(200, 200, 1e5, 1e5, 200), False),
        (Work(1, 4000, 8e6, 0, 1), False),
    ],
)
def test_what_was_not_measured_is_marked(cost_model: Calibrated, work: Work, is_seen: bool) -> None:
    assert cost_model.is_seen(work) == is_seen


def test_a_few_steps_of_a_kind_are_not_enough() -> None:
    """And a kind between two that were seen is."""
    kinds = (Kind(0, 0, 9, 10, 100), Kind(2, 0, 9, 10, 100), Kind(4, 4, 2, 10, 100))
    cost_model = Calibrated(Machine(), 1.0, 0.0, 0.0, *[Curve((0,), (0,))] * 3, seen=kinds)
    assert cost_model.is_seen(Work(1, 1, 50, 50)) and cost_model.is_seen(Work(1, 2, 50, 50))
    assert not cost_model.is_seen(Work(16, 16, 800, 800)) and not cost_model.is_seen(Work(1, 2, 900, 900))


def test_a_curve_is_what_its_shares_come_to() -> None:
    curve = Curve((0, 2, 10), (3.0, 0.0, 0.5))
    for number in (0, 1, 2, 5, 10, 30):
        parts = zip(shares(curve.knots, number), curve.slopes, strict=True)
        assert curve(number) == sum(share * slope for share, slope in parts)
    assert (curve(5), curve(30)) == (6.0, 16.0)


def test_time_between_steps_is_found(cost_model: Calibrated) -> None:
    assert cost_model.gap_s(Work(10, 10, 0)) == pytest.approx(GAP(10), rel=0.05)
    assert cost_model.front_s(100) == cost_model.back_s(3) == 0.0 and cost_model.back.num == 0


def test_an_idle_engine_does_not_count_as_time_between_steps() -> None:
    log = log_of(3, num_steps=200)
    late = [
        step._replace(**{name: getattr(step, name) + 50.0 * (step.number >= 100) for name in step._fields[1:4]})
        for step in log.steps
    ]
    assert max(point.seconds for point in gaps(late)) < 0.002


def test_a_server_that_was_idle_for_long_can_be_calibrated() -> None:
    """A step of warming up, a day of nothing, then a load: the load is split, not the day."""
    log = log_of(8, num_steps=400)
    late = [
        step._replace(**{name: getattr(step, name) + 86_400.0 * (step.number > 0) for name in step._fields[1:4]})
        for step in log.steps
    ]
    cost_model, slowness = fit([StepRecords(FACTS, tuple(late), ())])
    assert len(slowness) == 25 and 60 < next(each.num_steps for each in cost_model.errors if each.regime == "all") < 100


def test_everything_is_scaled(cost_model: Calibrated) -> None:
    slow, work = cost_model.scaled(1.5), Work(4, 4, 900, 900, 4)
    assert slow.predict(work) == pytest.approx(1.5 * cost_model.predict(work))
    assert slow.gap_s(work) == pytest.approx(1.5 * cost_model.gap_s(work))
    with pytest.raises(ConfigError, match="factor"):
        cost_model.scaled(0)


def test_front_and_back_come_from_a_run_of_the_same_clock() -> None:
    """Requests are found by their prompts' lengths; only those that met an idle engine tell of the front end."""
    front, back = Line(0.002, 1e-5), Line(0.001, 1e-4)
    steps, requests, rows, now = [], [], [], 1000.0
    for number in range(40):
        num_prompt = 50 + 10 * number
        sent_s = now
        planned_s = sent_s + front(num_prompt)
        ended_s = planned_s + 0.05
        committed_s = ended_s + 1e-4
        steps.append(
            TimedStep(
                number, planned_s, planned_s, ended_s, 0.0495, committed_s, 1, 0, num_prompt, 1, 1, 0, 9, 0, 9, 0, 0
            )
        )
        times = (sent_s + 1e-3, planned_s, ended_s + 5e-5, ended_s + 1.0)
        requests.append(TimedRequest(number, *times, num_prompt, 0, 1, 0))
        row = {"ok": True, "sent_s": sent_s - 900, "first_s": times[2] + back(1) - 900, "input_tokens": num_prompt}
        rows.append(row)
        now += 0.03 if number % 4 == 0 else 2.0  # every fourth is followed by one that has to wait
    log = StepRecords(FACTS, tuple(steps), tuple(requests))
    run = {"client": {"clock_start_s": 900.0}, "requests": [*rows, {**rows[0], "ok": False}]}
    found = passages(run, [log], "run.json")
    assert len(found) == 40
    alone = fronts(found, [log])
    assert len(alone) == 30
    line = fit_line(alone)
    assert (line.base_s, line.each_s) == (pytest.approx(0.002, rel=0.1), pytest.approx(1e-5, rel=0.1))
    assert fit_line(backs(found, [log]))(1) == pytest.approx(back(1), rel=0.05)
    with pytest.raises(ConfigError, match=r"run\.json is no result"):
        passages({"requests": []}, [log], "run.json")
    assert fit_line([Point(1, 1.0)] * 3) == Line()


ARRIVAL_S, END_S, TOKEN_S = 0.004, 0.002, 0.0002
"""What the front end of `busy_log_of` computes, of one core of two."""


def busy_log_of(seed: int, cores: int = 2) -> StepRecords:
    """Of the known machine, whose steps are held up by what comes, ends and goes out while they run."""
    rng, steps, requests = random.Random(seed), [], []
    log, num_drawn, since_s = log_of(seed, num_steps=2000), 0, 0.0
    for step in log.steps:
        comes, ends = rng.random() < 0.1, rng.random() < 0.1
        begin_s = step.ended_s - step.duration_s + since_s
        held_s = (ARRIVAL_S * comes + END_S * ends + TOKEN_S * num_drawn) / 2
        held_s *= cores == 2
        since_s += held_s
        times = {name: getattr(step, name) + since_s for name in ("ended_s", "committed_s")}
        begun = {name: getattr(step, name) + since_s - held_s for name in ("planned_s", "submitted_s")}
        steps.append(step._replace(duration_s=step.duration_s + held_s, **times, **begun))
        num_drawn = step.num_drawn
        if comes or ends:
            far_s = 9e9
            requests.append(
                TimedRequest(len(requests), begin_s + 1e-3 if comes else far_s, 0.0, 0.0,
                             begin_s + 1e-3 if ends else far_s, 9, 0, 9, 0)
            )  # fmt: skip
    return StepRecords(LogFacts(**{**vars_of(FACTS), "cores": cores}), tuple(steps), tuple(requests))


def test_what_holds_steps_up_is_told_apart_from_them() -> None:
    """So the cost model is of steps alone, and front end and clients have their own part."""
    plain, busy = fit([log_of(5, num_steps=2000)]).cost_model, fit([busy_log_of(5)]).cost_model
    request_s, end_s, token_s, _, num = busy.beside
    assert (request_s, end_s) == (pytest.approx(ARRIVAL_S, rel=0.25), pytest.approx(END_S, rel=0.35))
    assert token_s == pytest.approx(TOKEN_S, rel=0.3) and num > 300
    for work in (Work(1, 1, 300, 300, 1), Work(8, 8, 3000, 3000, 8), Work(1, 300, 45_000, 0, 1)):
        assert busy.predict(work) == pytest.approx(plain.predict(work), rel=0.04)
    assert busy.held_up_s(1, 1, 10) == pytest.approx((request_s + end_s + 10 * token_s) / 2)
    assert Calibrated.from_json(busy.to_json()).beside == busy.beside


def test_steps_that_leave_a_core_free_say_nothing_of_others() -> None:
    cost_model = fit([busy_log_of(6, cores=3)]).cost_model
    assert cost_model.beside.num == 0 and cost_model.held_up_s(5, 5, 50) == 0.0


TOLD_S = 0.003


def logs_side_by_side(seed: int, cores: int = 2) -> list[StepRecords]:
    """Two engines of the known machine, one thread each, with pauses. What a front end computes for each step that it
    is told of and each request that comes, it takes from both alike, and only while both compute."""
    rng = random.Random(seed)
    works = [iter(log_of(seed + 1 + engine, num_steps=1500).steps) for engine in (0, 1)]
    now, begins, ends = 100.0, [100.0, 100.0], [math.inf, math.inf]
    steps: list[list[TimedStep]] = [[], []]
    running: list[TimedStep | None] = [None, None]
    requests: list[TimedRequest] = []
    comes_s = 100.2
    while True:
        now = min(comes_s, *(end if one else begin for one, begin, end in zip(running, begins, ends, strict=True)))
        held_s = 0.0
        if now == comes_s:
            held_s, comes_s = ARRIVAL_S, now + rng.uniform(0.05, 0.2)
            requests.append(TimedRequest(len(requests), now, 0.0, 0.0, 9e9, 9, 0, 9, 0))
        for engine in (0, 1):
            one = running[engine]
            if one is not None and ends[engine] == now:
                took_s, running[engine], held_s = now - begins[engine], None, held_s + TOLD_S
                done = one._replace(planned_s=begins[engine], submitted_s=begins[engine], ended_s=now, num_drawn=0)
                steps[engine].append(done._replace(duration_s=took_s, committed_s=now))
                begins[engine] = now + rng.choice((0.0, 0.0, 0.0, 0.2))
            if running[engine] is None and begins[engine] <= now:
                following = next(works[engine], None)
                if following is None:
                    facts = LogFacts(**{**vars_of(FACTS), "threads": 1, "cores": cores})
                    return [StepRecords(facts, tuple(each), tuple(requests) if each is steps[0] else ())
                            for each in steps]  # fmt: skip
                running[engine], ends[engine] = following, now + true_s(following._replace(num_drawn=0).work)
        if held_s and all(running):
            ends = [end + held_s / 2 for end in ends]


def vars_of(facts: LogFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}


def test_engines_side_by_side_tell_what_a_front_end_takes() -> None:
    """Each alone leaves a core free, so only what happens while both compute holds them up."""
    logs = logs_side_by_side(3)
    cost_model = fit(logs).cost_model
    request_s, _, _, step_s, _ = cost_model.beside
    assert request_s == pytest.approx(ARRIVAL_S, rel=0.3)
    assert step_s + 2 * cost_model.crowded_s == pytest.approx(TOLD_S, rel=0.3)
    assert cost_model.back_s(1) == cost_model.beside.step_s + cost_model.beside.token_s
    for work in (Work(1, 1, 300, 300), Work(8, 8, 3000, 3000), Work(1, 300, 45_000, 0)):
        assert cost_model.predict(work) == pytest.approx(true_s(work), rel=0.06)
    assert Calibrated.from_json(cost_model.to_json()).beside == cost_model.beside
    alone = observed(logs[0])
    assert all(each[1:] == (0.0,) * 5 for each in alone) and len(alone) == len(logs[0].steps)


def test_steps_for_which_there_were_too_few_cores_say_nothing() -> None:
    """Two engines on one core: how long either would have taken alone is not in their logs."""
    logs = logs_side_by_side(4, cores=1)
    assert 0 < len(observed(logs[0], logs)) < 0.7 * len(logs[0].steps)


def test_what_is_computed_and_what_only_passes() -> None:
    """On the way to the engine, and back."""
    plain = fit([busy_log_of(5)]).cost_model
    cost_model = replace(plain, front=Line(0.005, 1e-5, 9), back=Line(0.002, 1e-4, 9))
    request_s, end_s, token_s, *_ = cost_model.beside
    assert cost_model.front_s(100) == request_s and cost_model.front_s(100) + cost_model.front_delay_s(
        100
    ) == pytest.approx(0.006)
    assert cost_model.back_s(7) == 7 * token_s and cost_model.back_delay_s() == pytest.approx(0.0021 - token_s)
    assert cost_model.end_s() == end_s
    short = replace(cost_model, front=Line(0.001, 0.0, 9))
    assert short.front_s(9) == 0.001 and short.front_delay_s(9) == 0.0
    assert short.end_s() == pytest.approx(end_s + request_s - 0.001)
    unknown = replace(cost_model, beside=NOT_KNOWN)
    assert (unknown.front_s(100), unknown.front_delay_s(100)) == (pytest.approx(0.006), 0.0)
    assert (unknown.back_s(7), unknown.back_delay_s(), unknown.end_s()) == (pytest.approx(0.0027), 0.0, 0.0)
    assert cost_model.scaled(2).back_delay_s() == pytest.approx(2 * cost_model.back_delay_s())


def test_the_file_is_read_back(cost_model: Calibrated) -> None:
    again = Calibrated.from_json(cost_model.to_json())
    works = [work_of(rows_of(random.Random(seed))) for seed in range(50)]
    assert [again.predict(work) for work in works] == [cost_model.predict(work) for work in works]
    assert (again.seen, again.errors, again.gap, again.machine) == (
        cost_model.seen,
        cost_model.errors,
        cost_model.gap,
        cost_model.machine,
    )


def _without_knots(whole: dict[str, Any]) -> None:
    whole["law"]["tokens"][0]["over"] = 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda whole: whole.update(version=9), "has version 9"),
        (lambda whole: whole.update(format="else"), "is no calibration"),
        (lambda whole: whole["law"].update(step_s=-1), "law.step_s"),
        (lambda whole: whole["law"].update(step_s="much"), "law.step_s"),
        (lambda whole: whole["law"].pop("context_s"), "law.context_s"),
        (lambda whole: whole.update(sped=1), "sped"),
        (lambda whole: whole["seen"][0].update(row_bits=0.5), r"seen\[0\].row_bits"),
        (lambda whole: whole["machine"].pop("threads"), "machine.threads"),
        (_without_knots, "law.tokens"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_field(cost_model: Calibrated, change: Any, told: str) -> None:
    whole = json.loads(cost_model.to_json())
    change(whole)
    with pytest.raises(ConfigError, match=told) as caught:
        Calibrated.from_json(json.dumps(whole), "some.json")
    assert "some.json" in str(caught.value) and "\n" not in str(caught.value)


def _write(path: Path, log: StepRecords) -> None:
    data = bytearray(SIZE)
    writer = StepWriter(data, log.facts)
    for step in log.steps:
        writer.step(step)
    path.write_bytes(data)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out = tmp_path / "steps", tmp_path / "law.json"
    _write(log, log_of(4, num_steps=600))
    assert main(["calibrate", str(log), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "decode, 2-4 rows" in told and "client to engine: unknown" in told and "600 steps" in told
    assert Calibrated.from_json(out.read_text()).machine.processor == "cpu"
    few = tmp_path / "few"
    _write(few, log_of(4, num_steps=20))
    for wrong, named in (([str(few)], "have 20 steps"), ([str(log), "--run", str(out)], "no result"), (["x"], "x ")):
        assert main(["calibrate", *wrong]) == 2
        line = capsys.readouterr().err
        assert named in line and line.count("\n") == 1


def test_a_calibration_is_checked_on_another_log(
    cost_model: Calibrated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a machine 1.4 times as slow: the factor is found, and few of its steps are of new kinds."""
    log, out = tmp_path / "steps", tmp_path / "law.json"
    out.write_text(cost_model.to_json())
    slow = log_of(7, num_steps=500)
    steps = tuple(step._replace(duration_s=1.4 * step.duration_s) for step in slow.steps)
    _write(log, StepRecords(FACTS, steps, ()))
    assert main(["calibrate", str(log), "--check", str(out)]) == 0
    told = capsys.readouterr().out
    factor = float(told.split("speed factor: ")[1].split()[0])
    assert factor == pytest.approx(1.4, rel=0.04)
    assert int(told.split(" of 500 steps")[0].split()[-1]) < 10
    assert speed_factor(cost_model.scaled(factor), observed(StepRecords(FACTS, steps, ()))) == pytest.approx(
        1, rel=1e-3
    )
    _write(log, StepRecords(LogFacts("toy", "other"), steps, ()))
    assert main(["calibrate", str(log), "--check", str(out)]) == 2
    assert "numerics_id" in capsys.readouterr().err
    assert main(["calibrate", str(log), "--check", str(out), "--out", "x"]) == 2


def test_logs_of_different_engines_are_not_mixed() -> None:
    other = StepRecords(LogFacts("toy", "other"), log_of(5, num_steps=200).steps, ())
    with pytest.raises(ConfigError, match="numerics_id"):
        fit([log_of(4, num_steps=200), other])


def test_a_front_end_takes_from_each_thread_of_a_step() -> None:
    cost_model = replace(fit([log_of(3)]).cost_model, beside=Beside(0.004, 0.002, 0.0002, 0.001, 9))
    assert cost_model.beside_threads(1).beside == Beside(0.002, 0.001, 0.0001, 0.0005, 9)
    assert cost_model.beside_threads(cost_model.machine.threads).beside == cost_model.beside
