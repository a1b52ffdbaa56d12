"""`tokenmill calibrate --black-box`: of a server whose cost model is known but not told, its clients' times say enough
to predict a load that was not fitted to; bad input is one line."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.load import options
from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.recorded_load import RecordedLoad, digest_of
from tokenmill.cli.calibrate.black_box import error_line, read_lives
from tokenmill.cli.main import main
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import CostModel, Costs, Work
from tokenmill.core.step_records import Machine
from tokenmill.plan.fidelity import on_deployment
from tokenmill.plan.fit.black_box import errors_of, fit, machine_of, replay, tables_of
from tokenmill.plan.fit.token_times import Heard, steps_of
from tokenmill.sim.calibrated import Calibrated, Curve
from tokenmill.sim.deployment import Deployment, WorkerPlan

Json = dict[str, Any]
TRUTH = Costs(step_s=0.012, row_s=0.001, token_s=0.0003, position_s=1e-8, context_s=4e-7)
SEQS = 6
CONFIG = EngineConfig(
    groups=full_groups(4096), max_model_len=4096, max_num_seqs=SEQS, max_num_batched_tokens=2048,
    enable_prefix_caching=False, steps_in_flight=1, scheduling_policy="fcfs",
)  # fmt: skip
ENDPOINT = {
    "url": "http://127.0.0.1:1", "api": "completions", "prompt_format": "tokens", "model": "m", "ignore_eos": True,
    "extra_body": {}, "scripted_replies": True,
}  # fmt: skip
WORDS = ("--input-len", "120", "--output-len", "24", "--random-range-ratio", "0.8", "--ignore-eos")
LOADS = (
    ("--concurrency", "1", "--num-prompts", "12"),
    ("--concurrency", "3", "--num-prompts", "24"),
    ("--concurrency", "9", "--num-prompts", "36"),
)


def written(
    folder: Path, name: str, words: tuple[str, ...], seed: int, cost_model: CostModel = TRUTH, **endpoint: str
) -> str:
    """A file that `bench serve` would have written of the server, as seen by its clients."""
    argv = ["tokenmill", "bench", "serve", "--url", "http://127.0.0.1:1", *words, *WORDS]
    parser = argparse.ArgumentParser()
    options.add_serve_arguments(parser)
    load = replace(options.make_load(parser.parse_args(argv[3:]), argv, None), seed=seed)
    recorded = RecordedLoad(load, BodyFormat("completions", "tokens", "m", True), "")
    server = on_deployment(Deployment((WorkerPlan("w0", "mixed", CONFIG, cost_model),)), {})
    run = server(replace(recorded, digest=digest_of(recorded)), 1.0).to_json() | {"endpoint": ENDPOINT | endpoint}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(run))
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    return [written(folder, f"run-{number}", words, number) for number, words in enumerate(LOADS)]


def test_a_load_that_was_not_fitted_to_is_predicted(runs: list[str], tmp_path: Path) -> None:
    """Another number of clients, and an open loop at most of what the server can do."""
    lives = [live for path in runs for live in read_lives(path)]
    machine = machine_of(lives, SEQS, 2048)
    tables = tables_of("c", machine, False)
    found = fit(lives, machine, tables)
    for words in (("--concurrency", "5", "--num-prompts", "30"), ("--request-rate", "4", "--num-prompts", "40")):
        (held,) = read_lives(written(tmp_path, "held", words, 7))
        errors = errors_of(found.cost_model, held, tables)
        of_requests = errors.request("e2el_s")
        assert of_requests is not None and of_requests.median_size < 0.04, error_line("held", errors)
        for name in ("ttft_s", "tpot_s", "e2el_s"):
            figure = errors.figure(f"{name}.mean")
            assert figure is not None and figure.size < 0.08, error_line("held", errors)


def test_a_step_between_two_numbers_of_rows_is_seen(tmp_path: Path) -> None:
    """Kernels work in tiles: five rows may take much longer than four."""
    flat, tiles = Curve((0.0,), (0.0,)), Curve((0.0, 4.0, 5.0, 6.0), (0.0, 0.02, 0.0, 1e-4))
    truth = Calibrated(Machine(), 0.02, 0.0, 0.0, tiles, flat, flat)
    loads = [("--concurrency", str(num), "--num-prompts", str(4 * num)) for num in (4, 5, 6)]
    paths = [written(tmp_path, f"tiles-{number}", words, number, truth) for number, words in enumerate(loads)]
    lives = [live for path in paths for live in read_lives(path)]
    machine = machine_of(lives, SEQS, 2048)
    cost_model = fit(lives, machine, tables_of("c", machine, False)).cost_model
    for num in (4, 5, 6):
        work = Work(num, num, 120 * num, 120 * num, num)
        assert cost_model.predict(work) == pytest.approx(truth.predict(work), rel=0.05), num


def test_steps_that_a_client_hears_of_at_once_take_some_time() -> None:
    """The second of two is left out: nobody knows what it took."""
    heard = [Heard(0.0, [1.0, 1.1, 1.2, 1.2, 1.3], 8, 0), Heard(0.0, [1.0, 1.1, 1.2, 1.2, 1.3], 8, 0)]
    assert [step.duration_s for step in steps_of(heard, 2048).steps] == pytest.approx([0.1, 0.1, 0.1])


def test_calls_that_come_at_once(runs: list[str], tmp_path: Path) -> None:
    """An idle server begins with the first. One client may have all rows: there is no gateway that keeps some free."""
    lives = [live for path in runs for live in read_lives(path)]
    machine = machine_of(lives, 8, 2048)
    tables = tables_of("c", machine, False)
    (live,) = read_lives(written(tmp_path, "burst", ("--concurrency", "8", "--num-prompts", "8"), 3))
    rows = replay(fit(lives, machine, tables).cost_model, live, tables)["requests"]
    first_s = [row["first_s"] for row in rows]
    assert first_s[0] < min(first_s[1:]) and max(first_s) < min(row["last_s"] for row in rows)


def test_what_it_writes_is_simulated(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its file of a cluster, `simulate --against` says of a run what the fit said."""
    out, cluster = tmp_path / "c.json", tmp_path / "box.toml"
    flags = ["--max-num-seqs", str(SEQS), "--out", str(out), "--cluster", str(cluster)]
    assert main(["calibrate", "--black-box", runs[0], runs[2], "--hold-out", runs[1], *flags]) == 0
    told = capsys.readouterr().out
    assert "run-1.json" in told.partition("not fitted to")[2] and "prompts in order of arrival" in told
    cost_model = Calibrated.from_json(out.read_text())
    assert cost_model.machine.max_num_seqs == SEQS and cost_model.seen
    assert main(["simulate", str(cluster), "--against", runs[1], "--json", str(tmp_path / "f.json")]) == 0
    (held,) = read_lives(runs[1])
    fidelity = json.loads((tmp_path / "f.json").read_text())
    expected = errors_of(cost_model, held, tables_of("c", cost_model.machine, False))
    errors = {each["metric"]: each["median_size"] for each in fidelity["requests"]}
    assert errors == {each.metric: each.median_size for each in expected.requests}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["calibrate", *words]) != 0
    told = capsys.readouterr().err.strip()
    assert "\n" not in told, told
    return told


def test_bad_input_is_one_line(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    run = json.loads(Path(runs[0]).read_text())
    first = run["requests"][0]
    several = {**first, "event_s": first["event_s"][::2], "event_tokens": None}
    for text, says in (
        ("no", "is no JSON"),
        ("{}", "is no result of tokenmill bench serve"),
        (json.dumps(run | {"kind": "goodput"}), "not against a goodput"),
        (json.dumps(run | {"requests": []}), "has no answered request"),
        (json.dumps(run | {"requests": [{**first, "event_s": None}]}), "lacks the time of each token"),
        (json.dumps(run | {"requests": [several]}), "lacks the time of each token"),
        (json.dumps(run | {"argv": []}), "bench serve"),
    ):
        bad.write_text(text)
        assert says in refused(capsys, "--black-box", str(bad))
    other = written(tmp_path, "other", LOADS[0], 0, model="n")
    assert "different endpoints: m at" in refused(capsys, "--black-box", runs[0], other)
    assert "cannot be read" in refused(capsys, "--black-box", str(tmp_path / "none.json"))
    assert "leave --check out" in refused(capsys, "--black-box", runs[0], "--check", "c.json")
    assert "--max-num-seqs must be" in refused(capsys, "--black-box", runs[0], "--max-num-seqs", "0")
    assert "goes with --black-box" in refused(capsys, "--hold-out", runs[0])
    assert "--max-num-seqs goes with --black-box" in refused(capsys, "steps.log", "--max-num-seqs", "8")
    assert "Name step logs" in refused(capsys)
