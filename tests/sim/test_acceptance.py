"""Simulated drafts: a record is what came of drafts and nothing else, a simulation of it draws as many tokens a row,
and how many drafts are verified is what the live policy says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.core.effects import StepFailed
from tokenmill.core.errors import ConfigError
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import SpeculationConfig
from tokenmill.core.step import Drafts, Introduction, PlanRow, RowResult, StepPlan, StepResult
from tokenmill.engine import step_builder
from tokenmill.engine.journal import Committed, Entry, Handled, Planned, entry_line, header_line
from tokenmill.engine.speculation import Speculation
from tokenmill.plan.config import read_config
from tokenmill.plan.evaluate import Evaluation, drafts_of, evaluate
from tokenmill.sim.acceptance import (
    AcceptanceRecorder,
    Answer,
    Proposed,
    Rates,
    Record,
    Recorded,
    RecordedStep,
    lines_of,
    read_record,
)
from tokenmill.sim.executor import ToyDrafter
from tokenmill.sim.run import run_scenario
from tokenmill.sim.workload import Scenario, make_scenario

COSTS = {"step_s": 0.004, "row_s": 0.0002, "token_s": 0.0001}
LOAD = {"concurrency": 1, "num_prompts": 12, "random_input_len": 40, "random_output_len": 200, "num_warmups": 0}


def simulated(drafts: dict[str, Any] | None, folder: Path | None = None, **load: Any) -> Evaluation:
    tables: dict[str, Any] = {"workers": [{"costs": COSTS, "kv_blocks": 2048}]}
    if drafts is not None:
        tables["engine"] = {"speculative_config": drafts}
    path = None if folder is None else folder / "cluster.toml"
    return evaluate(read_config(tables, path=path), {**LOAD, **load})


def tokens_a_row(found: Evaluation) -> float:
    report = found.service.report
    return 1 + report.num_accepted / report.num_draws


def tpot_s(found: Evaluation) -> float:
    assert found.run.tpot_s is not None and found.run.num_ok == found.run.num_requests
    return found.run.tpot_s.mean


def answer(*steps: tuple[int, int, int]) -> Answer:
    """Of steps: tokens drawn, drafts proposed to follow (0: none) and how many of them are right."""
    return tuple(
        RecordedStep(drawn, Proposed("suffix", (0.9,) * num, right) if num else None) for drawn, num, right in steps
    )


def write(path: Path, answers: Sequence[Answer]) -> None:
    path.write_text("".join(lines_of(Record(answers))))


# ---- what is proposed ----


def test_a_sequence_goes_over_a_recorded_answer_and_on() -> None:
    """Between recorded positions what was proposed last goes on, as far as it was right; after an answer comes the
    next, and after the last the first."""
    record = Recorded(Record([answer((1, 5, 3), (3, 0, 0), (1, 2, 0)), answer((1, 4, 4))]))
    found = [record.proposed(0, position) for position in range(1, 13)]
    sizes = [None if each is None else (len(each.chances), each.num_right) for each in found]
    one = [(5, 3), (4, 2), (3, 1), None, (2, 0)]
    rounds = (*one, (4, 4)) * 3
    assert sizes in ([*rounds[:12]], [*rounds[5:17]])
    begins = {record.proposed(seed, 1) for seed in range(40)}
    assert {None if each is None else len(each.chances) for each in begins} == {5, 4}


def test_nothing_goes_on_behind_a_wrong_draft() -> None:
    """It drew five tokens where two drafts of four were right, which happens with steps in flight."""
    record = Recorded(Record([answer((1, 4, 2), (5, 1, 0))]))
    sizes = [
        (found and (len(found.chances), found.num_right)) for found in (record.proposed(0, n) for n in range(1, 7))
    ]
    assert sizes == [(4, 2), (3, 1), (2, 0), None, None, (1, 0)]


def test_rates_are_met_and_the_same_each_time() -> None:
    rates = Rates([0.8, 0.5, 0.9])
    found = [rates.proposed(seed, position) for seed in range(50) for position in range(40)]
    assert found == [rates.proposed(seed, position) for seed in range(50) for position in range(40)]
    rights = [each.num_right for each in found if each is not None]
    reached = [sum(right >= number for right in rights) / len(rights) for number in (1, 2, 3)]
    assert reached == pytest.approx([0.8, 0.4, 0.36], abs=0.03)


# ---- simulations ----


@pytest.mark.parametrize("concurrency", [1, 8])
def test_drafts_give_the_tokens_a_row_that_their_rates_say(concurrency: int) -> None:
    """1 + 0.8 + 0.8 * 0.5, whatever is in flight beside; less what ends of answers and blocks cut."""
    drafts = {"acceptance": [0.8, 0.5], "adaptive": False}
    found = simulated(drafts, concurrency=concurrency, random_output_len=600)
    assert tokens_a_row(found) == pytest.approx(2.2, abs=0.06)
    assert "2.1" in drafts_of(found.service) or "2.2" in drafts_of(found.service)
    assert found.run.output_tokens == 12 * 600


def test_a_simulation_is_the_same_each_time() -> None:
    one, two = (simulated({"acceptance": 0.7}, concurrency=4) for _ in range(2))
    assert one.run.requests == two.run.requests and one.service.report.num_drafted == two.service.report.num_drafted
    assert tpot_s(one) < 0.7 * tpot_s(simulated(None, concurrency=4))


def test_the_live_policy_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the engine's own, which verifies nothing where that loses; and where it is told to choose nothing, nothing
    is verified."""
    assert step_builder.__name__.startswith("tokenmill.engine")
    never = simulated({"acceptance": 0.02})
    assert tpot_s(never) < 1.03 * tpot_s(simulated(None))
    forced = simulated({"acceptance": 0.02, "adaptive": False})
    assert tpot_s(forced) > 1.1 * tpot_s(never)
    monkeypatch.setattr(Speculation, "choose", lambda self, candidates, work, costs, most: [0] * len(candidates))
    assert simulated({"acceptance": 0.9}).service.report.num_drafted == 0


def test_what_is_recorded_decides(tmp_path: Path) -> None:
    """Of two records that say the same and of which one was right, one makes answers faster."""
    write(tmp_path / "right", [answer((1, 4, 4), (5, 4, 4), (5, 4, 4))])
    write(tmp_path / "wrong", [answer((1, 4, 0), (1, 4, 0), (1, 4, 0))])
    right, wrong = (simulated({"acceptance": name}, tmp_path) for name in ("right", "wrong"))
    assert tokens_a_row(right) > 3 and 1 <= tokens_a_row(wrong) < 1.01
    assert tpot_s(right) < 0.5 * tpot_s(wrong)
    assert right.service.report.num_accepted / right.service.report.num_drafted > 0.95


def test_no_drafts_are_none() -> None:
    """A worker of its own may do without; steps in fast forward are back then."""
    none = simulated({"acceptance": 0.9, "num_speculative_tokens": 0})
    assert none.run.requests == simulated(None).run.requests
    assert none.service.report.num_draws == 0 and none.service.report.num_fast_forwarded


def test_settings_are_swept_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, out = tmp_path / "c.toml", tmp_path / "out.json"
    cluster.write_text(
        "[[workers]]\ncosts = { step_s = 0.004, token_s = 0.0001 }\nkv_blocks = 2048\n"
        "[engine.speculative_config]\nacceptance = [0.9, 0.9, 0.9]\n"
    )
    words = ["--num-prompts", "6", "--num-warmups", "0", "--concurrency", "1", "--json", str(out)]
    code = main(["simulate", str(cluster), *words, "--sweep", "engine.speculative_config.num_speculative_tokens=0,3"])
    assert code == 0
    none, three = json.loads(out.read_text())["runs"]
    assert three["tpot_s"]["mean"] < 0.6 * none["tpot_s"]["mean"]
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert len(re.findall(r"tokens 3: drafts: \d+ verified", told)) == 1 and "tokens 0: drafts" not in told
    assert re.search(r"drafts: \d+ verified, [89]\d\.\d% of them right, 3\.\d\d tokens a row", told), told


def test_a_step_that_waits_is_late(tmp_path: Path) -> None:
    """Only where the one before is awaited: what is planned ahead begins at once. By how much is in the record."""
    sure = {"acceptance": [1.0, 1.0], "adaptive": False}
    soon, late = simulated(sure), simulated({**sure, "wait_s": 0.001})
    num_steps = late.service.report.steps["w0"]
    assert late.run.duration_s - soon.run.duration_s == pytest.approx(0.001 * num_steps, rel=0.01)
    hopeless = simulated({"acceptance": 0.0, "wait_s": 0.001})
    assert tpot_s(hopeless) < 1.03 * tpot_s(simulated(None))
    (tmp_path / "record").write_text("".join(lines_of(Record([answer((1, 2, 2), (3, 2, 2))], 0.001))))
    late = simulated({"acceptance": "record", "adaptive": False}, tmp_path)
    soon = simulated({"acceptance": "record", "adaptive": False, "wait_s": 0}, tmp_path)
    num_steps = late.service.report.steps["w0"]
    assert late.run.duration_s - soon.run.duration_s == pytest.approx(0.001 * num_steps, rel=0.01)


# ---- the record ----


def drafting(seed: int) -> Scenario:
    scenario = make_scenario(seed)
    speculation = SpeculationConfig(num_speculative_tokens=4, adaptive=False)
    config = replace(scenario.config, speculation=speculation)
    return replace(scenario, config=config, drafter=ToyDrafter(most=4), failure_rate=0.0, cancellations=())


@pytest.mark.parametrize("seed", [0, 3, 5, 6, 8, 9])
def test_a_record_has_what_came_of_an_engines_drafts(seed: int) -> None:
    """What was verified and right is right in the record, step by step; and the record is read back as it was."""
    report = run_scenario(drafting(seed))
    recorder = AcceptanceRecorder()
    for entry in report.journal:
        recorder(entry)
    record = recorder.end()
    answers = record.answers
    assert sum(step.num_drawn for one in answers for step in one) >= report.stats.generation_tokens > 0
    num_far = 0
    for one in answers:
        for step, following in pairwise(one):
            if following.num_drawn > 1:
                assert step.proposed is not None and following.num_drawn - 1 <= step.proposed.num_right, one
                num_far += following.num_drawn - 1
    # What is drawn behind an end token is in no answer.
    assert 0.9 * sum(report.stats.accepted_per_pos) < num_far <= sum(report.stats.accepted_per_pos)
    assert read_record("".join(lines_of(record)).splitlines(), "record") == record  # chances of the toy have one digit


def intro(output: tuple[int, ...] = ()) -> Introduction:
    return Introduction((7, 8), output, SamplingParams(), 0, 0, (0,))


def planned(step: int, first: Introduction | None, released: tuple[int, ...] = ()) -> Entry:
    return Planned(StepPlan(step, (PlanRow(5, 0, (7, 8), intro=first, sample=True),), released), 0.0)


def drawn(step: int, tokens: tuple[int, ...], drafts: tuple[int, ...] = (), now: float = 0.0) -> Entry:
    proposed = Drafts(drafts, "toy", (0.5,) * len(drafts)) if drafts else None
    return Committed(StepResult(step, (RowResult(5, tokens, drafts=proposed),), 0.25), now)


def recorded(*entries: Entry) -> list[Answer]:
    recorder = AcceptanceRecorder()
    for entry in entries:
        recorder(entry)
    return list(recorder.end().answers)


def test_an_answer_ends_where_its_sequence_does() -> None:
    """What is drawn behind an end token, by drafts or by steps that were under way, is nothing."""
    story = [planned(0, intro()), drawn(0, (3,), (4, 0, 9)), planned(1, None), drawn(1, (4, 0, 9, 1), (1,))]
    story += [planned(2, None), drawn(2, (6,)), planned(3, None, released=(5,)), drawn(3, (6,))]
    assert recorded(*story) == [(RecordedStep(1, Proposed("toy", (0.5, 0.5, 0.5), 2)), RecordedStep(2))]


def test_what_a_failed_step_drew_is_forgotten() -> None:
    """Its sequence begins again with what was known before; results of steps on top of it come to nothing."""
    story = [planned(0, intro()), drawn(0, (3,), (4, 5)), planned(1, None), planned(2, None)]
    story += [
        Handled(StepFailed(1, "broken"), 0.0),
        planned(3, intro((3,))),
        drawn(2, (9,)),
        drawn(3, (4,)),
    ]
    assert recorded(*story) == [(RecordedStep(1, Proposed("toy", (0.5, 0.5), 0)),), (RecordedStep(1),)]
    garbage = [planned(0, intro()), drawn(0, (3,)), planned(1, None), drawn(1, (9,))]
    garbage += [planned(3, intro((3,))), drawn(3, (4,))]
    assert recorded(*garbage) == [(RecordedStep(1),)]


def test_how_late_steps_are_that_wait_is_recorded() -> None:
    """From commit to commit, less what the step itself took; not of one that was planned ahead, nor of a first."""
    recorder = AcceptanceRecorder()
    story = [planned(0, intro()), drawn(0, (3,), now=1.0), planned(1, None), drawn(1, (4,), now=1.5)]
    story += [planned(2, None), planned(3, None), drawn(2, (5,), now=2.25), drawn(3, (6,), now=9.0)]
    for entry in story:
        recorder(entry)
    assert recorder.end().wait_s == (0.25 + 0.5) / 2


def test_a_journal_becomes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = drafting(5)
    report = run_scenario(scenario)
    lines = [header_line(scenario.config), *map(entry_line, report.journal)]
    journal, out = tmp_path / "journal", tmp_path / "acceptance.jsonl"
    journal.write_text("\n".join(lines) + "\n")
    assert main(["draft", "acceptance", str(journal), "--out", str(out)]) == 0
    assert "answers" in capsys.readouterr().out
    direct = AcceptanceRecorder()
    for entry in report.journal:
        direct(entry)
    assert out.read_text() == "".join(lines_of(direct.end()))
    found = simulated({"acceptance": "acceptance.jsonl", "adaptive": False}, tmp_path)
    assert tokens_a_row(found) > 1.5


def test_bad_journals_are_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = make_scenario(1)
    plain, other, empty = tmp_path / "plain", tmp_path / "other", tmp_path / "empty"
    plain.write_text(header_line(scenario.config) + "\n")
    other.write_text("dear\n")
    empty.write_text(header_line(drafting(1).config) + "\n")
    for path, told in (
        (plain, "drafts nothing; give --speculative-config"),
        (other, "is no journal of tokenmill serve --journal: Line 1"),
        (tmp_path / "none", "cannot be read: No such file"),
        (empty, "Nothing was answered"),
    ):
        assert main(["draft", "acceptance", str(path), "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "is no record of acceptance"),
        (['{"format": "tokenmill calibration", "version": 1}'], "is no record of acceptance"),
        (['{"format": "tokenmill acceptance", "version": 9}'], "has version 9"),
        (['{"format": "tokenmill acceptance", "version": 1}'], "r, line 1: wait_s: a number is needed here"),
        (["fine"], "has no answers"),
        (["fine", "[]"], "r, line 2, is no answer"),
        (["fine", "[[1]]", "[[0]]"], "line 3"),
        (["fine", '[[1,"suffix",3,[0.5,0.5]]]'], "line 2"),
        (["fine", '[[1,"suffix",1,[1.5]]]'], "line 2"),
        (["fine", '[[1,"suffix",1]]'], "line 2"),
        (["fine", "[[true]]"], "line 2"),
        (["fine", "[[1"], "line 2"),
    ],
)
def test_a_bad_record_is_told_in_a_line(lines: list[str], told: str) -> None:
    header = json.dumps({"format": "tokenmill acceptance", "version": 1, "wait_s": 0})
    with pytest.raises(ConfigError, match=told) as caught:
        read_record([header if line == "fine" else line for line in lines], "r")
    assert "\n" not in str(caught.value)
