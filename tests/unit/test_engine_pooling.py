"""Pooling requests in the engine core: one output that is a vector, chunked and cached where that changes nothing, and
whole in one step where the model keeps no KV."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import StepFailed
from tokenmill.core.errors import ContextTooLong
from tokenmill.core.events import Output, Submit
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.core.step import RowResult, StepPlan, StepResult
from tokenmill.engine.core import EngineCore
from tokenmill.sched.admission import refusal

CONFIG = EngineConfig(groups=full_groups(32), max_model_len=64, block_size=4, max_num_batched_tokens=16)
NO_KV = EngineConfig(
    groups=full_groups(0), max_model_len=16, max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=False
)


def pooling(name: str, num_prompt: int, how: str = "last", *, first: int = 1) -> Request:
    prompt = tuple(range(first, first + num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens=1), 1, 0, pooling=PoolingParams(how))


def run(core: EngineCore) -> tuple[list[StepPlan], dict[str, Output]]:
    """To the end; a vector names the sequence."""
    plans, outputs, in_flight = [], {}, deque()
    while core.has_work:
        while (plan := core.plan(0.0)) is not None:
            core.check()
            plans.append(plan)
            in_flight.append(plan)
        plan = in_flight.popleft()
        rows = tuple(
            RowResult(row.seq, vector=f"vector {row.seq}".encode() if row.sample else b"") for row in plan.rows
        )
        outputs |= {output.request_id: output for output in core.commit(StepResult(plan.step, rows), 1.0).outputs}
        core.check()
    assert core.stats().num_held_blocks == 0
    return plans, outputs


def test_a_vector_is_the_one_output_and_ends_the_request() -> None:
    """A long prompt goes in chunks; the last chunk gives the vector, which comes with the end."""
    core = EngineCore(CONFIG)
    assert not core.handle(Submit((pooling("a", 37),)), 0.0).outputs
    plans, outputs = run(core)
    rows = [plan.rows[0] for plan in plans]
    assert [row.num_tokens for row in rows] == [16, 16, 5] and [row.sample for row in rows] == [False, False, True]
    assert rows[0].intro is not None and rows[0].intro.pooling == PoolingParams("last")
    output = outputs["a"]
    assert (output.vector, output.finish_reason, output.tokens, output.num_output) == (b"vector 0", "stop", (), 0)
    assert core.stats().generation_tokens == 0 and core.stats().prompt_tokens == 37


@pytest.mark.parametrize("how", ["last", "cls", "mean"])
def test_only_last_token_pooling_takes_prefix_hits(how: str) -> None:
    """The others need states of positions that a hit would not compute."""
    core = EngineCore(CONFIG)
    core.handle(Submit((pooling("a", 13),)), 0.0)
    run(core)
    core.handle(Submit((pooling("b", 13, how),)), 0.0)
    plans, outputs = run(core)
    assert plans[0].rows[0].start == (12 if how == "last" else 0)
    assert outputs["b"].num_cached == (12 if how == "last" else 0)


def test_a_prompt_as_long_as_the_context_is_taken() -> None:
    """A vector takes no position; one token more is refused, naming the limit."""
    assert refusal(pooling("a", 64), CONFIG, 0) is None
    error = refusal(pooling("a", 65), CONFIG, 0)
    assert isinstance(error, ContextTooLong) and error.param == "input" and "64" in error.message
    small = refusal(pooling("a", 12), replace(NO_KV, max_num_seqs=4, max_num_batched_tokens=8), 0)
    assert isinstance(small, ContextTooLong) and "a step" in small.message and "8" in small.message


def test_without_kv_every_prompt_runs_whole() -> None:
    """No blocks, no chunks: what does not fit the rest of a step waits for the next; the worker forgets what ran."""
    core = EngineCore(NO_KV)
    for name, length in (("a", 10), ("b", 7), ("c", 6), ("d", 16), ("e", 1)):
        core.handle(Submit((pooling(name, length, "mean"),)), 0.0)
    plans, outputs = run(core)
    assert [[row.num_tokens for row in plan.rows] for plan in plans] == [[1, 6, 7], [10], [16]]
    assert all(row.sample and row.intro is not None and not row.blocks for plan in plans for row in plan.rows)
    assert {name: output.vector for name, output in outputs.items()} == {
        name: f"vector {number}".encode() for number, name in enumerate("abcde")
    }
    core.handle(Submit((pooling("f", 3),)), 0.0)
    (plan,), _ = run(core)
    assert sorted({number for plan in [*plans, plan] for number in plan.released}) == [0, 1, 2, 3, 4]


def test_after_a_failed_step_whole_prompts_run_again() -> None:
    """Of two steps in flight the first fails: its request ends with an error, the other's runs once more."""
    core = EngineCore(NO_KV)
    core.handle(Submit((pooling("a", 16),)), 0.0)
    core.handle(Submit((pooling("b", 16),)), 0.0)
    first, second = core.plan(0.0), core.plan(0.0)
    assert first is not None and second is not None
    (output,) = core.handle(StepFailed(first.step, "boom"), 1.0).outputs
    assert (output.request_id, output.finish_reason) == ("a", "error")
    assert not core.commit(StepResult(second.step, (RowResult(1),)), 1.0).outputs
    plans, outputs = run(core)
    assert [row.num_tokens for row in plans[0].rows] == [16] and outputs["b"].vector == b"vector 1"
