"""What a run of the load generator does about time, failures and overload, and what its exit code and output say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_bench_serve import SERVER, measure

from commands import run_command
from synthetic_server import Script
from tokenmill.bench.load import datasets
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.plan import Plan
from tokenmill.bench.load.retries import EarlyStop
from tokenmill.bench.load.schedule import Schedule


def test_a_closed_loop_lasts_as_long_as_it_should() -> None:
    """Five requests are not enough for half a second: the plan begins again, each time with text of its own."""
    schedule = Schedule(concurrency=2, stop_after_s=0.5)
    run, records = measure(Script(ttft_s=0.01, itl_s=0.0), schedule, 5)
    due = [row.due_s for row in run.requests]
    assert run.num_failed == 0 and len(records) == run.num_ok > 5 and run.dataset["num_rounds"] > 1
    assert max(due) < 0.5 <= max(row.end_s or 0.0 for row in run.requests) and run.max_in_flight == 2
    prompts = Counter(tuple(record.body["prompt"]) for record in records)
    assert max(prompts.values()) == 1 and {len(prompt) for prompt in prompts} == {16}


def test_conversations_go_on_into_further_rounds() -> None:
    """More clients than conversations; every turn follows its own, also in a later round."""

    def make(num: int, seed: int) -> Plan:
        return datasets.conversations(num, seed, Lengths(4, 3), num_turns=3, think_time_s=0.0)

    chat = {"api": "chat", "prompt_format": "text", "scripted_replies": False}
    schedule = Schedule(concurrency=4, stop_after_s=1.0)
    run, records = measure(Script(ttft_s=0.005, itl_s=0.0), schedule, 6, plan=make, **chat)
    assert run.num_failed == 0 and run.max_in_flight == 4 and len(run.requests) > 12
    for record in records:
        roles = [message["role"] for message in record.body["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(m["content"] == " word word word" for m in record.body["messages"] if m["role"] == "assistant")


def test_a_run_that_fails_is_given_up() -> None:
    """A closed loop of minutes does not hammer a server that refuses everything."""
    script = Script(ttft_s=0.001, itl_s=0.0, fail_every=1, fail_status=503)
    schedule = Schedule(concurrency=4, stop_after_s=60.0)
    run, _ = measure(script, schedule, 10, num_warmups=0)
    assert run.given_up is not None and "requests failed" in run.given_up and run.duration_s < 30.0
    assert any("given up" in warning for warning in run.warnings)


def test_a_hopeless_overload_is_given_up() -> None:
    """One request at a time, a hundred at once: when the first has waited too long, there is no use in going on."""
    script = Script(ttft_s=0.5, itl_s=0.0, max_running=1)
    run, _ = measure(script, Schedule(), 60, num_warmups=0, give_up=EarlyStop(max_wait_s=2.0))
    assert run.given_up is not None and "waited" in run.given_up and 1 <= run.num_ok < 60


@contextmanager
def synthetic(*flags: str) -> Iterator[str]:
    """The synthetic server as a process of its own: its URL."""
    command = [sys.executable, str(SERVER), "--ttft", "0.005", "--itl", "0.001", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.stdout.close()
        process.wait()


FEW = ("--num-prompts", "12", "--input-len", "8", "--output-len", "4", "--concurrency", "2")


def test_the_exit_code_tells_partial_failure() -> None:
    """A quarter fails: 1, unless that was allowed for; the table says what its latencies leave out."""
    with synthetic("--fail-every", "4") as url:
        few = (*FEW, "--num-warmups", "0", "--prompt-format", "tokens")
        done = run_command("bench", "serve", "--url", url, *few)
        assert done.returncode == 1 and "3 failed, left out" in done.stdout, done.stdout + done.stderr
        assert run_command("bench", "serve", "--url", url, *few, "--fail-above", "0.2").returncode == 1
        assert run_command("bench", "serve", "--url", url, *few, "--fail-above", "0.3").returncode == 0


def test_json_goes_to_standard_output_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--json -` can be piped; tables go to standard error, with the percentiles that were asked for."""
    monkeypatch.chdir(tmp_path)
    with synthetic() as url:
        args = ("--json", "-", "--metric-percentiles", "25,99.5", "--percentile-metrics", "ttft,ttfo")
        done = run_command("bench", "serve", "--url", url, *FEW, *args)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_ok"] == 12 and result["ttft_s"]["more"].keys() == {"25", "99.5"}
    assert "p99.5" in done.stderr and "TTFO" in done.stderr and not list(tmp_path.iterdir())
