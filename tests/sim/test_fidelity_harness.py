"""The fidelity measurement on results of a server that is known: right slowness, right verdicts, and the page."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import fidelity_cases
import fidelity_page
import fidelity_sim as harness

from tokenmill.bench.load import options
from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.recorded_load import RecordedLoad, digest_of
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import CostModel, Costs
from tokenmill.core.step_records import SIZE, LogFacts, Machine, StepWriter
from tokenmill.plan.fidelity import Simulate, Slower, on_deployment
from tokenmill.sim.calibrated import Calibrated, Curve
from tokenmill.sim.deployment import Deployment, WorkerPlan

Json = dict[str, Any]
COSTS = Costs(step_s=0.004, row_s=0.0005, token_s=0.0004)
WORDS = ("--input-len", "24", "--output-len", "6", "--random-range-ratio", "0.5", "--ignore-eos")
CASE = fidelity_cases.Case("toy", "m", (), (), "m-t1", "", fidelity_cases.at(WORDS, 50, 95), fidelity_cases.OF_ONE)
ENDPOINT = {
    "api": "completions", "prompt_format": "tokens", "model": "m", "ignore_eos": True, "extra_body": {},
    "scripted_replies": True,
}  # fmt: skip


def server(cost_model: CostModel, seqs: int = 32) -> Simulate:
    config = EngineConfig(groups=full_groups(512), max_model_len=256, max_num_batched_tokens=64, max_num_seqs=seqs)
    return on_deployment(Deployment((WorkerPlan("w0", "mixed", config, cost_model),)), {})


def simulated(cost_model: CostModel, seqs: int = 32) -> harness.Simulate:
    run = server(cost_model, seqs)
    return lambda load, factor: run(load, factor).to_json()


def played(simulate: harness.Simulate, words: tuple[str, ...], seed: int) -> Json:
    """What `bench serve` would have written of a server like that."""
    argv = ["tokenmill", "bench", "serve", "--url", "http://127.0.0.1:1", *words]
    parser = argparse.ArgumentParser()
    options.add_serve_arguments(parser)
    load = replace(options.make_load(parser.parse_args(argv[3:]), argv, None), seed=seed)
    recorded = RecordedLoad(load, BodyFormat("completions", "tokens", "m", True), "")
    return simulate(replace(recorded, digest=digest_of(recorded)), 1.0) | {"endpoint": ENDPOINT}


def write_turns(folder: Path, live: harness.Simulate) -> None:
    slice_words = ("--concurrency", "4", "--num-prompts", "16", "--input-len", "40", "--output-len", "10")
    for turn in range(2):
        for number in range(3):
            run = played(live, (*slice_words, "--ignore-eos"), 20 * turn + number)
            (folder / f"slice-{number}-r{turn}.json").write_text(json.dumps(run))
        for load, rate in zip(CASE.loads, ("10", "120"), strict=True):
            run = played(live, (*load.words, "--num-prompts", "60", "--request-rate", rate), 5)
            (folder / f"load-{load.name}-r{turn}.json").write_text(json.dumps(run))


@pytest.mark.sampled(1 / 3)
def test_a_slow_machine_is_found_and_bars_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live 1.2 times as slow as calibrated: the slices say 1.2, and the held-out loads then come out right."""
    monkeypatch.setattr(harness, "NUM_TRIES", 5)
    write_turns(tmp_path, simulated(Slower(COSTS, 1.2)))
    simulate = simulated(COSTS)
    for number, load in enumerate(CASE.loads):
        found = harness.judge(
            CASE, load, number, tmp_path, simulate, lambda run, turn: 1.1 + 0.2 * (run["dataset"]["seed"] % 2)
        )
        assert found is not None and found.speed == pytest.approx([1.2, 1.2], rel=0.01)
        assert all(verdict.is_kept for verdict in harness.verdicts(CASE, found))
        assert [verdict.size < 0.02 for verdict in harness.verdicts(CASE, found)] == [True] * 3
    assert harness.load_shown(found, simulate) == pytest.approx([1.0, 1.0], abs=0.03)
    facts = {"processor": "p", "cores": "2", "system": "s", "version": "0", "commit": "c", "command": "x", "turns": 2}
    (tmp_path / "facts.json").write_text(json.dumps(facts | {"limit": 1.25}))
    (tmp_path / "found").mkdir()
    verdicts = [asdict(verdict) for verdict in harness.verdicts(CASE, found)]
    result = {"name": "toy-95", "place": 0, "title": "toy", "serve": ["tokenmill"], "verdicts": verdicts}
    result |= {"load_shown": [1.0], "fidelity": found.to_json()}
    (tmp_path / "found" / "toy-95.json").write_text(json.dumps(result))
    fidelity_page.write(tmp_path, tmp_path / "fidelity.md")
    text = (tmp_path / "fidelity.md").read_text()
    assert (
        "Bars: 3 of 3 kept as stated, 3 as widened" in text
        and "slowness 1.2" in text
        and "bench serve --input-len 24" in text
    )
    drawing = (tmp_path / "reports" / "fidelity-toy-95-ttft.svg").read_text()
    assert drawing.startswith("<svg xmlns=") and "<path" in drawing


def test_slowness_is_that_of_the_steps_of_a_slice(tmp_path: Path) -> None:
    """Of two engines' logs, those of the slice alone: 1.2 times the cost model within it, and twice before."""
    cost_model = Calibrated(Machine(), 0.01, 0.0, 0.0, *(Curve((0.0,), (0.0,)) for _ in range(3)))
    for name in ("w0", "w1"):
        data = bytearray(SIZE)
        writer = StepWriter(data, LogFacts(threads=1, cores=8))
        for number in range(100):
            took_s = 0.02 if number < 50 else 0.012
            end_s = 10.0 + number
            times = (end_s - took_s, end_s - took_s, end_s, took_s, end_s)
            writer.step((number, *times, 1, 1, 1, 1, 1, 0, 9, 0, 1, 1, 1))
        (tmp_path / f"steps-r3.log.{name}").write_bytes(data)
    run = {"client": {"clock_start_s": 60.5}, "requests": [{"end_s": 30.0}, {"end_s": None}]}
    assert harness.logged(cost_model, tmp_path)(run, 3) == pytest.approx(1.2)


def test_a_wrong_cost_model_misses_its_bars(tmp_path: Path) -> None:
    """A server that runs no more than 2 requests at once is not the simulated one, whatever the slices say."""
    write_turns(tmp_path, simulated(COSTS, seqs=2))
    found = harness.judge(CASE, CASE.loads[1], 1, tmp_path, simulated(COSTS), lambda run, turn: 1.0)
    assert found is not None
    assert not all(verdict.is_kept for verdict in harness.verdicts(CASE, found))


@pytest.mark.sampled(1 / 2)
def test_settings_are_put_in_order(tmp_path: Path) -> None:
    """Three servers of clearly different speed: all pairs have a verdict, and the simulation orders them alike."""
    words = ("--concurrency", "8", "--num-prompts", "16", *WORDS)
    slower = {"a": 1.0, "b": 1.3, "c": 1.6}
    runs = []
    for repeat in range(6):
        for name, factor in slower.items():
            cost_model = Slower(COSTS, factor * (1 + 0.01 * repeat))
            runs.append(played(simulated(cost_model), words, repeat) | {"name": name})
    comparison = {"primary_metric": "output_tokens_per_s", "runs": runs}
    settings = [fidelity_cases.Setting(name, (), "", "") for name in slower]
    order = harness.put_in_order(
        comparison, settings, lambda setting, load: simulated(Slower(COSTS, slower[setting.name]))(load, 1.0)
    )
    assert len(order.pairs) == 3 and all(pair.is_decided and pair.is_alike for pair in order.pairs)
    assert (order.chosen, order.best, order.regret) == ("a", "a", 0.0)
    backwards = harness.put_in_order(
        comparison, settings, lambda setting, load: simulated(Slower(COSTS, 2 / slower[setting.name]))(load, 1.0)
    )
    assert backwards.chosen == "c" and backwards.regret > 0.2
    assert not any(pair.is_alike for pair in backwards.pairs)
