"""`bench overload`: objectives of each prompt, traces at a rate, what a run comes to, and the command on a server."""

from __future__ import annotations

import asyncio
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from synthetic_server import Script, Sent, serve
from tokenmill.bench.load.overload import Objectives, Overload, Served, at_rate, cut_prompts, level_of, prediction_error
from tokenmill.bench.load.overload_command import print_result
from tokenmill.bench.load.plan import Call, Drawn, Message, Plan
from tokenmill.bench.load.run import Load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.cli.main import main

ALONE = Objectives(0.5, 2.0, 0.05, ((32, 0.1), (128, 0.2), (512, 0.8)))


def call(index: int, num_tokens: int, at_s: float = 0.0) -> Call:
    return Call(index, (Message("user", (Drawn("a", 5), Drawn(f"b{index}", num_tokens - 5))),), 9, (), at_s)


def test_a_prompts_time_alone_lies_between_those_that_were_measured() -> None:
    """Below the shortest it is that one's, above the longest it grows with the length; targets follow from it."""
    assert [ALONE.alone_s(num) for num in (1, 32, 80, 512, 1024)] == pytest.approx([0.1, 0.1, 0.15, 0.8, 1.6])
    assert ALONE.ttft_s(128) == pytest.approx(0.9)
    assert ALONE.field(call(0, 128)) == {"ttft_ms": 900, "tpot_ms": 50}


def test_a_trace_is_played_at_any_rate_with_its_own_gaps_and_short_prompts() -> None:
    """Ten requests of which nine come within a second keep their order and gaps at a tenth of the rate."""
    times = [0.1 * i for i in range(9)] + [9.0]
    plan = Plan(tuple(call(i, 100, at_s) for i, at_s in enumerate(times)), 1, {}, True)
    load = Load(lambda num, seed, rate: plan, lambda seed, form: None, Schedule(), 10, 1)  # type: ignore[arg-type]
    slow = at_rate(load, 0.1, 10, 2, 40)
    made = slow.schedule.apply(slow.make_plan(10, 2, None))
    assert [each.delay_s for each in made.calls] == pytest.approx([10 * at_s for at_s in times])
    assert {each.input_tokens for each in made.calls} == {40}
    assert cut_prompts(plan, 5).calls[0].parts == (Drawn("a", 5),)
    timeless = at_rate(replace(load, make_plan=lambda num, seed, rate: replace(plan, has_times=False)), 2.0, 10, 2, 40)
    assert max(each.delay_s for each in timeless.make_plan(10, 2, None).calls) > 1.0


def test_errors_of_predictions_are_those_of_the_run() -> None:
    name = "tokenmill:ttft_prediction_error_ratio_bucket"
    before = {f'{name}le="0.15"': 10.0, f'{name}le="0.4"': 20.0, f'{name}le="+Inf"': 20.0}
    after = {f'{name}le="0.15"': 16.0, f'{name}le="0.4"': 29.0, f'{name}le="+Inf"': 30.0}
    assert prediction_error(before, after) == {"num": 10.0, "0.15": 0.6, "0.4": 0.9}
    assert prediction_error({}, {}) == {"num": 0.0}


def test_the_command_finds_a_rate_and_counts_what_became_of_more(tmp_path: Path, capsys: Any) -> None:
    """Of a server that runs four requests of 0.1 s at once and lets others wait; it refuses none, and none hangs."""
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{46 + i // 20:02}.{i % 20 * 5:02}00000,{20 + i % 7},5" for i in range(200)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    result = tmp_path / "out.json"

    async def run() -> int:
        server, port, records = await serve(Script(ttft_s=0.06, itl_s=0.01, max_running=4, fail_status=429))
        command = [
            "bench", "overload", f"toy=http://127.0.0.1:{port}", "--dataset-path", str(trace), "--ttft-base", "100",
            "--start-rate", "20", "--probe-s", "0.7", "--run-s", "0.5", "--max-probes", "3", "--min-requests", "10",
            "--factors", "1,4", "--json", str(result),
        ]  # fmt: skip
        code = await asyncio.to_thread(main, command)
        server.close()
        assert all("slo" in each.body for each in records[-20:])
        return code

    assert asyncio.run(run()) == 0
    written = json.loads(result.read_text())
    (server,) = written["servers"]
    one, four = server["levels"]
    assert (written["kind"], server["name"]) == ("overload", "toy")
    assert server["request_rate"] > 0 and four["request_rate"] == pytest.approx(4 * one["request_rate"])
    for level in (one, four):
        parts = ("num_met", "num_missed", "num_refused", "num_hung", "num_failed")
        assert sum(level[part] for part in parts) == level["num_requests"] >= 10
        assert level["num_hung"] == level["num_refused"] == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in re.split("[│┃]", line)[1:-1]] for line in lines]
    cells = {row[0]: row[1:] for row in rows if row}
    assert cells["load"] == ["1x", "4x"]
    assert [cells[name] for name in ("met", "missed", "failed")] == [
        [str(level[f"num_{name}"]) for level in (one, four)] for name in ("met", "missed", "failed")
    ]


def test_a_refused_tenant_fills_each_run_up_to_as_many_calls_as_the_most_has(tmp_path: Path, monkeypatch: Any) -> None:
    """With fixed targets, which need no prompt timed alone. A key that is served ends the command. After the overload
    those who were refused are counted as they come back."""
    monkeypatch.setattr("tokenmill.bench.load.overload.PRESSED_S", 0.2)
    monkeypatch.setattr("tokenmill.bench.load.overload.CALM_S", 1.0)
    result = tmp_path / "out.json"

    async def run(refused_key: str, fail_every: int = 0) -> tuple[int, list[Sent]]:
        script = Script(0.002, 0.001, refused_key="no", fail_status=429, fail_every=fail_every, retry_after_s=1)
        server, port, records = await serve(script)
        command = [
            "bench", "overload", f"http://127.0.0.1:{port}", "--dataset-name", "random", "--input-len", "9",
            "--output-len", "1", "--goodput", "ttft:9000", "tpot:9000", "--rate", "50", "--factors", "1,2,4",
            "--run-s", "0.2", "--min-requests", "1", "--num-warmups", "0", "--refused-key", refused_key, "--json",
            str(result), *(["--returns"] if fail_every else []),
        ]  # fmt: skip
        code = await asyncio.to_thread(main, command)
        server.close()
        return code, records

    code, records = asyncio.run(run("no"))
    sent = [each for each in records if "slo" in each.body]
    assert code == 0 and {json.dumps(each.body["slo"]) for each in sent} == {'{"ttft_ms": 9000, "tpot_ms": 9000}'}
    (served,) = json.loads(result.read_text())["servers"]
    assert [level["num_met"] for level in served["levels"]] == [10, 20, 40]
    assert [each.key for each in sent].count("no") == 30 + 20
    assert "no" not in json.loads(result.read_text())["argv"] and served["returning"] is None
    assert asyncio.run(run("yes"))[0] == 2
    code, records = asyncio.run(run("no", fail_every=3))
    (served,) = json.loads(result.read_text())["servers"]
    told = served["returning"]
    num_refused = sum(each.number % 3 == 2 and each.key != "no" for each in records)
    assert code == 0 and 0 < told["num_entered"] <= told["num_returned"] <= told["num_refused"] < num_refused


def test_the_table_of_a_server_fits_80_columns_with_every_name_whole() -> None:
    """Three loads as columns; a server that held the objectives at no rate has a line instead."""

    class Made:
        requests = ()

    level = level_of(1.0, 123.456, Made(), {}, {})  # type: ignore[arg-type]
    levels = [replace(level, factor=factor) for factor in (1.0, 2.0, 4.0)]
    held = Served("tokenmill-on-the-machine", {}, 1.0, 1.0, None, 1.0, levels, [], [])
    result = Overload(ALONE, {}, [held, replace(held, name="idle", levels=[])], [])
    out = io.StringIO()
    print_result(Console(file=out, width=80), result)
    text = out.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for name in ("1x", "2x", "4x", "requests/s", "of peak", "ttft p99 ms", "predicted within 40 %", held.name):
        assert name in text
    assert "idle: no rate holds the objectives" in text


def test_a_refusal_is_no_failure_and_a_failure_no_refusal() -> None:
    """By the errors of the rows: 429, a time limit, anything else."""

    class Row:
        ok, met_slo, first_s, last_s, output_tokens, due_s = False, False, None, None, None, 0.0

        def __init__(self, error: str) -> None:
            self.error = error

    class Made:
        requests = tuple(Row(error) for error in ("http_429", "http_429", "timeout", "http_500"))

    level = level_of(2.0, 3.0, Made(), {}, {})  # type: ignore[arg-type]
    assert (level.num_refused, level.num_hung, level.num_failed, level.goodput_per_s) == (2, 1, 1, 0.0)
