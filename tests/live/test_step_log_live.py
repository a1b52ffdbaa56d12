"""`serve --step-log`: what a live engine writes can be read while it runs, and after."""

from __future__ import annotations

import stat
from pathlib import Path

from serving import Server

from tokenmill.core.step_records import StepRecords, read_steps


def _records(path: Path) -> StepRecords:
    return read_steps(path.read_bytes(), path.name)


def test_a_live_engine_logs_its_steps(smollm2: Path, tmp_path: Path) -> None:
    """Steps come to what the request had, and the engine is named."""
    path = tmp_path / "steps"
    with Server("--kv-cache-memory-bytes", "200MiB", "--threads", "1", "--step-log", str(path)) as server:
        body = {"model": "smollm2", "prompt": "Once upon a time, " * 20, "max_tokens": 12, "ignore_eos": True}
        assert server.request("POST", "/v1/completions", body)[0] == 200
        live = _records(path)
    after = _records(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert live.facts == after.facts and live.steps == after.steps[: len(live.steps)]
    (request,) = after.requests
    assert request.num_output == 12 and request.num_cached == 0
    assert sum(step.num_tokens for step in after.steps) >= request.num_prompt + 11
    assert sum(step.num_drawn for step in after.steps) >= 12
    first = after.steps[0]
    assert first.planned_s <= first.submitted_s <= first.ended_s <= first.committed_s
    assert 0 < first.duration_s <= first.ended_s - first.planned_s  # it may begin before `submit` returns
    assert request.arrival_s <= request.scheduled_s <= first.planned_s + 1e-3
    facts = after.facts
    assert facts.threads == 1 and "native" in facts.isa and "threads" not in facts.isa and facts.num_blocks > 0, facts
