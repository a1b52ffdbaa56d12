"""A simulated run as a trace: everything that happened is in it, once, at its time."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.simulate import loads, trace
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.errors import ConfigError
from tokenmill.plan.config import Config
from tokenmill.plan.load import add_load_arguments
from tokenmill.sim.deployment import Deployment, WorkerPlan

CONFIG = EngineConfig(groups=full_groups(512), max_model_len=4096, max_num_batched_tokens=256, max_num_seqs=8)
LOAD = ("--num-prompts", "40", "--input-len", "64", "--output-len", "12", "--request-rate", "30")


def traced(path: Path, *flags: str, fast_path: bool = True, pools: tuple[str, ...] = ("mixed", "mixed")) -> Any:
    """(the trace, the service, the run)."""
    workers = tuple(WorkerPlan(f"w{i}", pool, CONFIG, Costs(step_s=0.01, token_s=1e-4)) for i, pool in enumerate(pools))

    config = Config(Deployment(workers), fast_path=fast_path)
    parser = argparse.ArgumentParser()
    add_load_arguments(parser)
    args = parser.parse_args([*LOAD, "--trace", str(path), *flags])
    run, services = loads.run(args, [], None, config, lambda changes: config)
    return json.loads(path.read_text()), services[0], run


def slices(found: Any, category: str) -> list[Any]:
    return [each for each in found["traceEvents"] if each["ph"] == "X" and each["cat"] == category]


def test_every_step_and_every_request_is_there(tmp_path: Path) -> None:
    """Steps of a worker follow one another and add up to what it was busy; a request is its queue, prefill, decode."""
    found, service, run = traced(tmp_path / "t.json")
    steps = slices(found, "step")
    assert len(steps) == sum(service.report.steps.values())
    assert sum(step["dur"] for step in steps) / 1e6 == pytest.approx(sum(service.report.busy_s.values()), rel=1e-4)
    for track in {step["tid"] for step in steps}:
        own = [step for step in steps if step["tid"] == track]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in pairwise(own))
    requests = slices(found, "request")
    for row in run.requests:
        track = next(each["tid"] for each in requests if each["name"] == f"bench-0-{row.index}")
        parts = {each["name"]: each for each in requests if each["tid"] == track}
        whole = parts.pop(f"bench-0-{row.index}")
        assert whole["dur"] / 1e6 == pytest.approx((row.end_s or 0.0) - row.due_s, abs=1e-5)
        assert set(parts) == {"queue", "prefill", "decode"} and whole["args"]["output_tokens"] == row.output_tokens
        assert sum(part["dur"] for part in parts.values()) == pytest.approx(whole["dur"], abs=0.01)
        first_s = (parts["queue"]["dur"] + parts["prefill"]["dur"]) / 1e6
        assert first_s == pytest.approx((row.first_s or 0.0) - row.due_s, abs=1e-5) and parts["prefill"]["dur"] > 0
    assert any(part["name"] == "queue" and part["dur"] > 0 for part in requests)
    assert any(each["ph"] == "C" and each["args"]["running"] for each in found["traceEvents"])


def test_leaps_leave_no_gap_in_it(tmp_path: Path) -> None:
    """The same steps as without them."""
    key = lambda step: (step["tid"], step["ts"], step["dur"], step["name"])  # noqa: E731
    fast, service, _ = traced(tmp_path / "a.json")
    slow, _, _ = traced(tmp_path / "b.json", fast_path=False)
    assert service.report.num_fast_forwarded > 0
    assert sorted(map(key, slices(fast, "step"))) == sorted(map(key, slices(slow, "step")))


def test_kv_on_its_way_is_there(tmp_path: Path) -> None:
    """From the worker that computed a prompt to the one that draws the answer, as pairs that may overlap."""
    found, service, _ = traced(tmp_path / "t.json", pools=("prefill", "decode"))
    moves = [each for each in found["traceEvents"] if each["ph"] in "be"]
    begun = {each["id"]: each for each in moves if each["ph"] == "b"}
    assert service.report.num_moved > 0 and len(begun) >= service.report.num_moved and len(moves) == 2 * len(begun)
    assert all(each["ts"] > begun[each["id"]]["ts"] for each in moves if each["ph"] == "e")
    assert {each["name"] for each in moves} == {"w0 to w1"}


def test_a_trace_that_is_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of several runs, or to nowhere, is refused."""
    monkeypatch.setattr(trace, "MAX_EVENTS", 50)
    found, service, _ = traced(tmp_path / "t.json")
    kept = sum(each["ph"] == "X" for each in found["traceEvents"])
    assert kept <= 50 and found["otherData"]["left_out"] == sum(service.report.steps.values()) + 4 * 40 - kept
    with pytest.raises(ConfigError, match="of one run"):
        traced(tmp_path / "t.json", "--sweep-rates", "1,2")
    with pytest.raises(ConfigError, match="folder"):
        traced(tmp_path / "no" / "t.json")
