"""Errors of a simulation: right figures of runs that are known, and loads made again only where they are the same."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.html.report import read_results, render
from tokenmill.bench.load import fidelity, options
from tokenmill.bench.load.body import BodyFormat, BodyWriter
from tokenmill.bench.load.recorded_load import digest_of, recorded_load
from tokenmill.core.errors import ConfigError

Json = dict[str, Any]


def dist(values: list[float]) -> Json:
    ranked = sorted(values)
    parts = {"mean": sum(ranked) / len(ranked), "p50": ranked[(len(ranked) - 1) // 2], "p90": ranked[-1]}
    return {"num": len(ranked), **parts, "p99": ranked[-1]}


def make_run(
    slower: float = 1.0,
    digest: str = "d",
    num: int = 20,
    failed: tuple[int, ...] = (),
    concurrency: int | None = None,
    repeat: int = 0,
) -> Json:
    """Requests a second apart, TTFT 0.1 s, a gap of 0.01 s between 11 tokens, all times `slower`."""
    rows = []
    for i in range(num):
        ttft, gap = 0.1 * slower * (1 + i / num), 0.01 * slower
        row = {
            "index": i, "due_s": float(i), "sent_s": float(i), "first_s": i + ttft, "last_s": i + ttft + 10 * gap,
            "end_s": i + ttft + 10 * gap, "output_tokens": 11, "input_tokens": 64, "ok": i not in failed,
            "event_s": None,
        }  # fmt: skip
        rows.append(row)
    return {
        "kind": "run", "schema": 2, "name": "x", "started_at": "2026-01-01T00:00", "endpoint": {"model": "m"},
        "dataset": {"digest": digest, "seed": 0}, "requests": rows, "warnings": [],
        "schedule": {"concurrency": concurrency, "repeat": repeat},
        "ttft_s": dist([row["first_s"] - row["due_s"] for row in rows]),
        "tpot_s": dist([0.01 * slower] * num),
        "itl_s": dist([0.01 * slower] * num),
        "e2el_s": dist([row["last_s"] - row["due_s"] for row in rows]),
        "requests_per_s": 1.0, "output_tokens_per_s": 11.0, "mean_in_flight": 0.2 * slower, "prefix_hit_share": None,
    }  # fmt: skip


def test_errors_are_what_was_put_in() -> None:
    """A simulation that is 10 % slow is 10 % off in every latency, request by request too."""
    found = fidelity.compare("x", [make_run()], [make_run(1.1)])
    for metric in ("ttft_s.mean", "ttft_s.p99", "tpot_s.p50", "e2el_s.p50"):
        figure = found.figure(metric)
        assert figure is not None and figure.error == pytest.approx(0.1), metric
        assert figure.live_to_live is None
    for metric in fidelity.OF_REQUESTS:
        error = found.request(metric)
        assert error is not None and error.num == 20
        assert (error.median, error.median_size, error.p90_size) == pytest.approx((0.1, 0.1, 0.1))
    assert found.figure("requests_per_s").error == 0.0  # type: ignore[union-attr]
    assert found.figure("prefix_hit_share") is None
    assert found.queues[0].distance is not None and 0 < found.queues[0].distance < 0.3


def test_sizes_do_not_cancel_and_live_runs_are_held_against_each_other() -> None:
    """One pair too slow and one too fast: no error on average, but of size 10 %. Live runs 5 % apart differ by that."""
    found = fidelity.compare("x", [make_run(), make_run(1.05)], [make_run(1.1), make_run(1.05 * 0.9)])
    figure, request = found.figure("e2el_s.p50"), found.request("e2el_s")
    assert figure is not None and request is not None
    assert figure.error == pytest.approx(0.0, abs=1e-9) and figure.size == pytest.approx(0.1)
    assert figure.live_to_live == pytest.approx((0.05 + 0.05 / 1.05) / 2)
    assert request.median_size == pytest.approx(0.1) and request.live_to_live == pytest.approx((0.05 + 0.05 / 1.05) / 2)


def test_one_plan_with_more_clients_is_no_repeat() -> None:
    """A closed loop's plan does not say how many sent it at once."""
    pairs = [make_run(concurrency=1), make_run(2.0, concurrency=8)], [make_run(), make_run(2.0)]
    assert fidelity.compare("x", *pairs).figure("e2el_s.p50").live_to_live is None  # type: ignore[union-attr]
    again = [make_run(concurrency=1), make_run(2.0, concurrency=1, repeat=1)], pairs[1]
    assert fidelity.compare("x", *again).figure("e2el_s.p50").live_to_live is not None  # type: ignore[union-attr]


def test_requests_that_failed_are_left_out_and_counted() -> None:
    found = fidelity.compare("x", [make_run(failed=(1, 2))], [make_run(failed=(3,))])
    assert (found.num_matched, found.num_left_out) == (17, 3)


def test_other_loads_and_other_results_are_refused() -> None:
    with pytest.raises(ConfigError, match="different loads"):
        fidelity.compare("x", [make_run()], [make_run(digest="e")])
    with pytest.raises(ConfigError, match="No request succeeded"):
        fidelity.compare("x", [make_run(num=2)], [make_run(num=2, failed=(0, 1))])
    with pytest.raises(ConfigError, match="against a goodput"):
        fidelity.runs_in({"kind": "goodput"})


def test_a_page_shows_both(tmp_path: Path) -> None:
    """`bench report` draws what was written as JSON."""
    path = tmp_path / "fidelity.json"
    path.write_text(json.dumps(fidelity.compare("one worker", [make_run()], [make_run(1.1)], [1.02]).to_json()))
    text = render(read_results([path]))
    assert "one worker: live and simulated" in text and "+10.0 %" in text and "1.020" in text
    assert "Requests in flight" in text and "Errors of single requests" in text


def recorded(*words: str, seed: int = 7) -> Json:
    argv = ["tokenmill", "bench", "serve", "--url", "http://127.0.0.1:1", "--seed", "3", *words]
    endpoint = {
        "api": "completions", "prompt_format": "tokens", "model": "m", "ignore_eos": True, "extra_body": {},
        "scripted_replies": True,
    }  # fmt: skip
    return {"argv": argv, "dataset": {"seed": seed, "digest": ""}, "endpoint": endpoint}


def with_digest(run: Json) -> Json:
    """The run as it would have been recorded, made by bench's own parts."""
    parser = argparse.ArgumentParser()
    options.add_serve_arguments(parser)
    args = parser.parse_args(run["argv"][3:])
    seed = run["dataset"]["seed"]
    load = replace(options.make_load(args, [], None), seed=seed)
    plan = load.schedule.apply(load.make_plan(load.num_prompts, seed, load.schedule.request_rate))
    writer = BodyWriter(BodyFormat("completions", "tokens", "m", True), load.make_material(seed, "tokens"))
    writer.prepare(plan)
    return dict(run, dataset=dict(run["dataset"], digest=writer.digest(plan)))


def test_a_load_is_made_again() -> None:
    """The recorded command gives the plan again, with the seed of the run (a repeat has one of its own)."""
    words = ("--num-prompts", "9", "--request-rate", "3", "--input-len", "12", "--output-len", "4")
    run = with_digest(recorded(*words))
    again = recorded_load(run)
    assert again.load.seed == 7 and len(again.plan.calls) == 9
    assert all(call.output_tokens == 4 for call in again.plan.calls)
    assert digest_of(again) == run["dataset"]["digest"]
    assert digest_of(replace(again, load=replace(again.load, seed=8))) != run["dataset"]["digest"]


def test_a_load_that_cannot_be_made_again_is_refused() -> None:
    run = with_digest(recorded("--num-prompts", "5"))
    with pytest.raises(ConfigError, match="another digest"):
        recorded_load(dict(run, argv=[*run["argv"], "--num-prompts", "6"]))
    with pytest.raises(ConfigError, match="not written by"):
        recorded_load(dict(run, argv=["other", "tool"]))
    with pytest.raises(ConfigError, match="not one that this version reads"):
        recorded_load(dict(run, argv=[*run["argv"], "--no-such-flag"]))
    with pytest.raises(ConfigError, match="is missing"):
        recorded_load(dict(run, endpoint={}))
    with pytest.raises(ConfigError, match="sweep"):
        recorded_load(dict(run, argv=[*run["argv"], "--sweep-rates", "1,2"]))
