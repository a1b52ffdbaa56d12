"""`tokenmill simulate`: a file and a load become bench's result, the same each time; what cannot be is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main
from tokenmill.plan.evaluate import warnings_of
from tokenmill.sim.service import ServiceReport

EXAMPLES = Path(__file__).parents[2] / "deploy/simulate"
FEW = ["--num-prompts", "12", "--num-warmups", "0"]


def run(path: Path, out: Path, *flags: str) -> dict[str, Any]:
    assert main(["simulate", str(path), *FEW, *flags, "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("name", ["two-cpus", "one-h100", "prefill-decode", "h100-16"])
def test_examples_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(EXAMPLES / f"{name}.toml", tmp_path / "out.json")
    assert result["num_ok"] == 12 and not result["num_failed"]
    assert result["endpoint"]["simulated"] and "model" in result["endpoint"]
    said = capsys.readouterr().out
    assert "workers busy" in said and "digest" in said and "blocks of KV" in said


def test_a_thousand_workers_take_their_load(tmp_path: Path) -> None:
    """In each moment more is open than the usual bounds of a front end allow."""
    out = tmp_path / "out.json"
    words = ["--num-prompts", "2000", "--request-rate", "100000", "--random-output-len", "2"]
    assert main(["simulate", str(EXAMPLES / "thousand.toml"), *words, "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["num_ok"] == 2000 and result["max_in_flight"] > 1900


def test_a_file_says_the_load_and_the_command_line_goes_before(tmp_path: Path) -> None:
    result = run(EXAMPLES / "two-cpus.toml", tmp_path / "a.json", "--random-output-len", "8")
    assert result["schedule"]["request_rate"] == 2.0 and result["output_tokens"] == 12 * 8


def test_a_seed_gives_one_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests = []
    for seed in ("3", "3", "4"):
        run(EXAMPLES / "two-cpus.toml", tmp_path / "a.json", "--seed", seed)
        digests.append(capsys.readouterr().out.split("digest ")[1].split()[0])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("name", ["one-h100", "prefill-decode", "h100-16"])
def test_the_fast_path_changes_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests = []
    for flags in ((), ("--no-fast-path",)):
        run(EXAMPLES / f"{name}.toml", tmp_path / "a.json", "--random-output-len", "64", *flags)
        digests.append(capsys.readouterr().out.split("digest ")[1].split()[0])
    assert digests[0] == digests[1]


def test_prices_become_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2.50 $ an hour, over the run's seconds and its tokens."""
    result = run(EXAMPLES / "one-h100.toml", tmp_path / "a.json")
    dollars = 2.5 * result["duration_s"] / 3600 / result["output_tokens"] * 1e6
    assert f"{dollars:.3f} $ per million tokens of output" in capsys.readouterr().out


def test_settings_are_swept(tmp_path: Path) -> None:
    path = EXAMPLES / "two-cpus.toml"
    result = run(path, tmp_path / "a.json", "--sweep", "workers[0].count=1,4", "--request-rate", "20")
    one, four = result["runs"]
    assert four["e2el_s"]["mean"] < one["e2el_s"]["mean"]


def test_steps_beyond_a_calibration_are_told() -> None:
    report = ServiceReport()
    report.steps["w0"] = 10
    assert warnings_of(report) == []
    report.unseen[(4, 1024)] = 3
    assert "3 of 10 steps" in warnings_of(report)[0] and "1024 tokens" in warnings_of(report)[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "cannot be read"),
        ("[model", "is no TOML"),
        ("[[workers]]\nkv_blocks = 9\ncosts = { step_s = 1 }\n[load]\nrequest_rat = 1", "did you mean request-rate"),
        ("[[workers]]\nkv_blocks = 9\ncalibration = 'none.json'", "workers[0].calibration: "),
    ],
)
def test_what_cannot_be_is_one_line(
    text: str | None, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_text(text)
    assert main(["simulate", str(path), *FEW]) == 2
    error = capsys.readouterr().err
    assert wanted in error and error.startswith("tokenmill: ") and error.count("\n") == 1
