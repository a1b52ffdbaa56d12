"""`--against`: the loads of live results are made again, simulated each at its speed, and compared."""

from __future__ import annotations

import argparse
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tokenmill.bench.load import measure, options
from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.context import Context
from tokenmill.bench.load.player import Played
from tokenmill.bench.load.recorded_load import RecordedLoad, digest_of
from tokenmill.bench.load.run import pool
from tokenmill.bench.load.stream import Exchange
from tokenmill.bench.report import write_json
from tokenmill.bench.result import Repeats, Run
from tokenmill.cli.simulate.command import show_fidelity
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import CostModel, Costs, Work
from tokenmill.core.errors import ConfigError
from tokenmill.core.step_records import Machine
from tokenmill.plan.fidelity import Slower, hold_against, on_deployment, slowed
from tokenmill.sim.calibrated import Calibrated, Curve, Line
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.parts import CorePlan, PartsPlan

WORDS = ("--num-prompts", "30", "--request-rate", "5", "--input-len", "16", "--output-len", "5", "--ignore-eos")
ARGV = ["tokenmill", "bench", "serve", "--url", "http://127.0.0.1:1", *WORDS]


def answered(recorded: RecordedLoad, slower: float = 1.0) -> Run:
    """The run of a server that answers each call alone: 2 ms a prompt token, then 10 ms a token."""
    plan, exchanges = recorded.plan, []
    for call in plan.calls:
        exchange = Exchange(call.index, call.delay_s)
        exchange.sent_s = call.delay_s
        first_s = call.delay_s + 0.002 * slower * (call.input_tokens or 0)
        exchange.event_times = array("d", [first_s + 0.01 * slower * i for i in range(call.output_tokens)])
        exchange.event_tokens = array("l", [1] * call.output_tokens)
        exchange.output_tokens, exchange.end_s = call.output_tokens, exchange.event_times[-1]
        exchanges.append(exchange)
    endpoint = {
        "api": "completions", "prompt_format": "tokens", "model": "m", "ignore_eos": True, "extra_body": {},
        "scripted_replies": True,
    }  # fmt: skip
    context = Context(
        "server", "2026-01-01T00:00", {}, recorded.load.schedule.facts(),
        {**plan.facts, "seed": plan.seed, "digest": digest_of(recorded)}, endpoint, {}, recorded.load.argv,
    )  # fmt: skip
    played = Played(0.0, exchanges[-1].end_s or 0.0, exchanges, 0.0, 0, array("d"), False)
    return measure.summarise(context, played, measure.make_rows(plan, played, {}))


def live_run(seed: int = 0, slower: float = 1.0, words: tuple[str, ...] = ()) -> Run:
    parser = argparse.ArgumentParser()
    options.add_serve_arguments(parser)
    argv = [*ARGV[:5], *(words or WORDS)]
    load = replace(options.make_load(parser.parse_args(argv[3:]), argv, None), seed=seed)
    return answered(RecordedLoad(load, BodyFormat("completions", "tokens", "m", True), ""), slower)


def write(path: Path, *runs: Run) -> Path:
    """As `bench serve` does, with --repeats where there are several."""
    write_json(path, (Repeats(pool(list(runs), ()), {}, list(runs)) if len(runs) > 1 else runs[0]).to_json())
    return path


def test_a_right_simulation_has_no_error_and_its_speed_is_applied(tmp_path: Path) -> None:
    """The machine had become 20 % slower: with that factor the simulation is right, without it 1 / 1.2 of live."""
    path = write(tmp_path / "live.json", live_run(slower=1.2))
    right = hold_against([path], lambda load, factor: answered(load, factor), [1.2], "one")
    wrong = hold_against([path], lambda load, factor: answered(load, factor), [], "one")
    for metric in ("ttft_s", "tpot_s", "e2el_s"):
        found, missed = right.request(metric), wrong.request(metric)
        assert found is not None and missed is not None
        assert found.p90_size == pytest.approx(0.0, abs=1e-5)
        assert missed.median == pytest.approx(1 / 1.2 - 1, abs=1e-5)
    assert right.speed == [1.2] and wrong.speed == []
    console = Console(record=True, width=120)
    show_fidelity(wrong, console)
    text = console.export_text()
    assert "-16.7 %" in text and "E2EL p50" in text


def test_repeats_are_simulated_each_with_its_own_seed(tmp_path: Path) -> None:
    """A result of three repeats is three loads; the same load at the same speed is simulated once."""
    seeds: list[int] = []

    def simulate(load: RecordedLoad, factor: float) -> Run:
        seeds.append(load.load.seed)
        return answered(load, factor)

    path = write(tmp_path / "live.json", live_run(0), live_run(1), live_run(2))
    found = hold_against([path], simulate, [1.0, 1.0, 1.0], "three")
    assert seeds == [0, 1, 2] and len(found.live) == 3
    seeds.clear()
    one = write(tmp_path / "one.json", live_run(4))
    hold_against([one, one], simulate, [1.0], "twice")
    assert seeds == [4]


def test_loads_of_other_numbers_of_clients_are_simulated_each(tmp_path: Path) -> None:
    """Of a closed loop, what is sent does not say how many send it, or for how long."""
    plain = ("--num-prompts", "8", "--input-len", "16", "--output-len", "5", "--ignore-eos")
    kinds = [("--concurrency", "1"), ("--concurrency", "4"), ("--concurrency", "4", "--retries", "2")]
    paths = [write(tmp_path / f"{i}.json", live_run(words=(*plain, *kind))) for i, kind in enumerate(kinds)]
    digests = {json.loads(path.read_text())["dataset"]["digest"] for path in paths}
    clients: list[tuple[int | None, int]] = []

    def simulate(load: RecordedLoad, factor: float) -> Run:
        clients.append((load.load.schedule.concurrency, load.load.retry_policy.num_retries))
        return answered(load, factor)

    hold_against(paths, simulate, [], "three")
    assert clients == [(1, 0), (4, 0), (4, 2)] and len(digests) == 1


def test_answers_are_as_long_as_they_were(tmp_path: Path) -> None:
    """Where a model ended its answers early, the simulation's are as short; the load is still proven by its digest."""
    result = live_run().to_json()
    result["requests"][3]["output_tokens"] = 2
    (tmp_path / "live.json").write_text(json.dumps(result))
    found: list[RecordedLoad] = []
    hold_against(
        [tmp_path / "live.json"], lambda load, factor: (found.append(load), answered(load, factor))[1], [], "x"
    )
    again = found[0].answered
    plan = again.make_plan(again.num_prompts, again.seed, None)
    assert [call.output_tokens for call in plan.calls[:5]] == [5, 5, 5, 2, 5]
    assert found[0].plan.calls[3].output_tokens == 5


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "live.json", live_run())
    with pytest.raises(ConfigError, match="--speed-factor needs one number"):
        hold_against([path], answered, [1.0, 1.0], "x")
    with pytest.raises(ConfigError, match="above 0"):
        hold_against([path], answered, [0.0], "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        hold_against([tmp_path / "none.json"], answered, [], "x")
    result = json.loads(path.read_text())
    (tmp_path / "old.json").write_text(json.dumps(result | {"schema": 1}))
    with pytest.raises(ConfigError, match="no result"):
        hold_against([tmp_path / "old.json"], answered, [], "x")
    (tmp_path / "other.json").write_text(
        json.dumps(result | {"argv": [*result["argv"], "--seed", "1", "--num-prompts", "3"]})
    )
    with pytest.raises(ConfigError, match="another digest"):
        hold_against([tmp_path / "other.json"], answered, [], "x")


def test_a_deployment_is_held_against_what_one_like_it_did(tmp_path: Path) -> None:
    """A service of known costs stands in for a live one: its double has no error, and one whose steps take 1.25 times
    as long has it again once the speed is told."""
    costs = Costs(step_s=0.01, row_s=0.001, token_s=0.0005)
    config = EngineConfig(groups=full_groups(512), max_model_len=256, max_num_batched_tokens=64)

    def service(costs: CostModel) -> Deployment:
        return Deployment((WorkerPlan("w0", "mixed", config, costs),))

    parser = argparse.ArgumentParser()
    options.add_serve_arguments(parser)
    load = options.make_load(parser.parse_args(ARGV[3:]), ARGV, None)
    recorded = RecordedLoad(load, BodyFormat("completions", "tokens", "m", True), "")
    recorded = replace(recorded, digest=digest_of(recorded))
    live = on_deployment(service(Slower(costs, 1.25)), {})(recorded, 1.0)
    endpoint = {"api": "completions", "prompt_format": "tokens", "model": "m", "ignore_eos": True, "extra_body": {}}
    path = write(tmp_path / "live.json", replace(live, endpoint=endpoint | {"scripted_replies": True}))
    for speed, least, most in (([1.25], -1e-9, 1e-9), ([], -0.25, -0.1)):
        found = hold_against([path], on_deployment(service(costs), {"model": "m"}), speed, "one").request("e2el_s")
        assert found is not None and found.num == 30
        assert least <= found.median <= most, speed


def test_a_slow_machine_has_a_slow_front_end() -> None:
    """What a calibration says of the front end is of the same machine as its steps."""
    curve = Curve((0,), (1e-4,))
    cost_model = Calibrated(Machine(), 0.01, 0.0, 0.0, curve, curve, curve, front=Line(0.002, 0.0, 1))
    worker = WorkerPlan("w0", "mixed", EngineConfig(groups=full_groups(8), max_model_len=64), cost_model)
    slow = slowed(Deployment((worker,), parts=PartsPlan(cores=CorePlan(front=cost_model))), 3.0)
    assert slow.parts.cores.front is not None
    assert slow.parts.cores.front.front_s(10) == pytest.approx(0.006)
    work = Work(1, 1, 0)
    assert slow.workers[0].cost_model.predict(work) == pytest.approx(3 * cost_model.predict(work))
