"""`bench rows`: all numbers of rows meet the same machine, and the steps that are timed draw for each row."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from commands import run_command
from random_models import Shape, write_gguf_model
from tokenmill.bench.rows import RowTimes, add_arguments, measure, run

SMALL = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}


def test_steps_that_others_delay_do_not_count() -> None:
    """A step of n rows takes 1 + n / 10, and mostly several times that. Rounds have all, each in its order."""
    rng, orders = random.Random(1), []

    def step(num_rows: int) -> float:
        orders.append(num_rows)
        return (1 + num_rows / 10) * rng.choice((1, 2, 3, 5, 8))

    found = measure(step, (1, 4, 8), 100)
    assert [(each.num_rows, each.low_s) for each in found] == [(1, 1.1), (4, 1.4), (8, 1.8)]
    rounds = [tuple(orders[at : at + 3]) for at in range(0, len(orders), 3)]
    assert len(rounds) == 101 and {tuple(sorted(each)) for each in rounds} == {(1, 4, 8)} and len(set(rounds)) == 6
    assert RowTimes(1, (2.0,)).low_s == 2.0


def test_multiples_of_one_row_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--rows", "5,2", "--rounds", "2"])
    assert args.rows == (1, 2, 5)
    assert run(args, lambda num_rows: 0.004 * num_rows**0.5, {"model": "m.gguf"}) == 0
    lines = [line.split() for line in capsys.readouterr().out.replace("│", "").splitlines()]
    assert ["2", "5.657", "1.41", "0.71"] in lines and ["5", "8.944", "2.24", "0.45"] in lines
    with pytest.raises(SystemExit):
        parser.parse_args(["--rows", "66"])


def test_a_model_is_measured(tmp_path: Path) -> None:
    """Whose prompt takes two steps. What its context has no room for is one line."""
    write_gguf_model(tmp_path / "m.gguf", Shape("qwen3", layers=1, context=128, **SMALL), "q8_0")
    words = ("bench", "rows", str(tmp_path / "m.gguf"), "--rows", "3,9", "--rounds", "3", "--threads", "1")
    ended = run_command(
        *words, "--context", "100", "--max-num-batched-tokens", "64", "--json", str(tmp_path / "rows.json")
    )
    assert ended.returncode == 0, ended.stderr
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert (saved["kind"], saved["context"], [each["rows"] for each in saved["steps"]]) == ("rows", 100, [1, 3, 9])
    assert all(len(each["seconds"]) == 3 and min(each["seconds"]) > 0 for each in saved["steps"])
    assert saved["steps"][0]["of_one_row"] == 1 and saved["facts"]["KV"] == "f16"
    for more in (("--context", "120"), ("--context", "120", "--max-model-len", "128")):
        ended = run_command(*words, *more)
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended
