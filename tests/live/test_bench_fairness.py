"""bench fairness: a server that serves calls as they come is found unfair, one with room for all is not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from test_bench_run import synthetic

from commands import run_command
from tokenmill.bench.load.fairness import Phase, conclude

LOAD = (
    "--api-key", "one", "--greedy-key", "other", "--request-rate", "20", "--duration", "2", "--repeats", "1",
    "--random-input-len", "4", "--random-output-len", "2", "--num-warmups", "0",
)  # fmt: skip


def test_first_come_first_served_is_not_fair(tmp_path: Path) -> None:
    """The other tenant's queue is everybody's; the exit code and the verdict say so."""
    with synthetic("--ttft", "0.02", "--itl", "0.001", "--max-running", "1") as url:
        ended = run_command(
            "bench", "fairness", "--url", url, *LOAD, "--times", "4", "--json", str(tmp_path / "out.json")
        )
    assert ended.returncode == 1, ended.stderr
    assert "not fair" in ended.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    even, greedy = found["phases"]
    assert found["ratio"] == pytest.approx(greedy["ttft_p99_s"] / even["ttft_p99_s"]) and found["ratio"] > 1.5
    assert (even["num_other"], greedy["num_other"]) == (40, 160) and "other" not in found["argv"], "no key"


def test_a_server_with_room_for_all_answers_all(tmp_path: Path) -> None:
    """Every call of both tenants, and the verdict is that of the ratio which the watched one saw."""
    with synthetic("--ttft", "0.1", "--itl", "0.001", "--jitter", "0.1") as url:
        ended = run_command(
            "bench", "fairness", "--url", url, *LOAD, "--times", "2", "--json", str(tmp_path / "out.json")
        )
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(each["num_failed"], each["num_other_ok"]) for each in found["phases"]] == [(0, 40), (0, 80)]
    assert found["is_fair"] == (found["ratio"] <= 1.5) == (ended.returncode == 0), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("slowest_s", "num_failed", "verdict"),
    [(0.149, 0, ": fair"), (0.151, 0, ": not fair"), (0.1, 1, ": not fair")],
)
def test_the_verdict_is_of_the_watched_tenants_slowest_calls_and_failures(
    capsys: pytest.CaptureFixture[str], slowest_s: float, num_failed: int, verdict: str
) -> None:
    """Against those beside a tenant that sends its share; the limit is half as much again."""
    even = Phase("its share", [0.1] * 100, 100, 0, 100, 100, 200, 200)
    greedy = Phase("more", [slowest_s] * (100 - num_failed), 100, num_failed, 400, 400, 200, 800)
    code = conclude(argparse.Namespace(most_ratio=1.5, json=None), [even, greedy], [])
    assert verdict in capsys.readouterr().out and code == (verdict != ": fair")


def test_calls_beside_long_prompts_of_another_tenant(tmp_path: Path) -> None:
    """Both tenants alone, then both at once, with as many calls of the watched one each time."""
    out = tmp_path / "out.json"
    with synthetic("--ttft", "0.02", "--itl", "0.001") as url:
        more = ("--other-concurrency", "8", "--other-input-len", "50", "--json", str(out))
        ended = run_command("bench", "fairness", "--url", url, *LOAD, *more)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(out.read_text())
    alone, beside = found["phases"]
    assert (alone["num_ok"], beside["num_ok"]) == (40, 40) and not beside["num_failed"]
    assert found["throughput_loss"] == pytest.approx(1 - beside["prompts_per_s"] / alone["prompts_per_s"])
    assert 0 < alone["ttft_p50_s"] <= alone["ttft_p90_s"]
    assert "throughput" in ended.stdout


def test_one_key_is_not_two_tenants() -> None:
    """Nor is a rate left out: the share is what the verdict is about."""
    ended = run_command("bench", "fairness", "--url", "http://127.0.0.1:9", "--api-key", "k", "--greedy-key", "k")
    assert ended.returncode != 0 and "two keys" in ended.stderr
