"""Steps of sequences that follow a grammar, planned ahead of one another, on a tiny real model."""

from __future__ import annotations

import asyncio
import math

import pytest

from grammar_cases import END, Characters, regex, vocabulary
from tiny import tiny_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction, PlanRow, RowResult, StepPlan
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker import grammars as grammars_module
from workers import build_worker

native = pytest.mark.skipif(available() is not None, reason=str(available()))
PROMPT = (3, 4, 5)


@pytest.fixture(params=["numpy", pytest.param("native", marks=native), pytest.param("one native thread", marks=native)])
def worker(request, monkeypatch):
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    monkeypatch.setattr(grammars_module, "STEP_S", math.inf)  # how long a mask takes here puts nobody off
    ops = ReferenceOps() if request.param == "numpy" else NativeOps(1 if request.param.startswith("one") else 2)
    made = build_worker(tiny_checkpoint(), ops, max_model_len=64, groups=full_groups(32), block_size=8, kv_dtype="f32")
    made.executor._grammars.load = vocabulary
    yield made
    made.executor.close()


def plan(step: int, *seqs: int, grammar: str = "") -> StepPlan:
    """A step of each sequence: its prompt at first, then one token on."""
    sampling = SamplingParams(temperature=0, grammar=grammar)
    intro = Introduction(PROMPT, (), sampling, 0, 0, (END,))
    if step == 0:
        rows = [PlanRow(seq, 0, PROMPT, blocks=(3 * seq, 3 * seq + 1), intro=intro, sample=True) for seq in seqs]
    else:
        rows = [PlanRow(seq, len(PROMPT) + step - 1, (), from_step=step - 1, sample=True) for seq in seqs]
    return StepPlan(step, tuple(rows))


def run(worker, plans: list[StepPlan]) -> list[list[RowResult] | Exception]:
    """All handed over at once."""

    async def work():
        futures = [worker.executor.execute(each) for each in plans]
        return await asyncio.gather(*futures, return_exceptions=True)

    return [ended if isinstance(ended, Exception) else list(ended.rows) for ended in asyncio.run(work())]


def test_a_step_is_computed_while_its_mask_is_made(worker):
    """Six steps in the queue from the start: each row draws what the grammar allows after tokens that nobody had seen
    when its step was planned, and after the end of the answer nothing waits."""
    found = run(worker, [plan(step, 0, 1, grammar=regex("[a-c]x[0-9]y")) for step in range(7)])
    for place in (0, 1):
        rows = [rows[place] for rows in found]
        assert not any(row.error for row in rows)
        tokens = [row.tokens[0] for row in rows]
        first, text = Characters().decode(tokens[:1]), Characters().decode(tokens[1:4])
        assert first in "abc" and text[0] == "x" and text[1].isdigit() and text[2] == "y" and tokens[4] == END


def test_rows_tell_what_slow_masks_took(worker, monkeypatch):
    """What is new, to be charged, and what all have taken, to be told when the sequence is introduced again."""
    monkeypatch.setattr(grammars_module, "_SLOW_S", 0.0)
    rows = [row for (row,) in run(worker, [plan(step, 0, grammar=regex("[a-c]{20}")) for step in range(4)])]
    assert all(row.tokens and row.spent_s > 0 for row in rows)
    assert rows[0].slow_s == 0 < rows[1].slow_s < rows[2].slow_s < rows[3].slow_s


@pytest.mark.parametrize("when", ["prepared", "computed"])
def test_no_row_waits_for_a_token_of_a_step_that_failed(when, worker, monkeypatch):
    """The step behind it is void, but ends at once, and other sequences are not touched."""
    prepare = worker.executor._runner.prepare

    def failing(given: StepPlan):
        step = prepare(given)
        if given.step == 1:
            assert when == "computed" or 1 // 0
            step.work = lambda: 1 // 0
        return step

    monkeypatch.setattr(worker.executor._runner, "prepare", failing)
    grammar = regex("[a-c]{20}")
    first, failed, behind = run(worker, [plan(step, 0, grammar=grammar) for step in range(3)])
    assert first[0].tokens and isinstance(failed, ZeroDivisionError)
    assert isinstance(behind, list) and not behind[0].error


def test_an_error_of_the_grammar_is_the_rows(worker):
    """What is drawn instead of the token is dropped; the row beside it is as ever."""
    bad = plan(0, 0, grammar=regex("(a"))
    good = plan(0, 1, grammar=regex("[a-c]{20}"))
    ((one, other),) = run(worker, [StepPlan(0, bad.rows + good.rows)])
    assert "cannot be used" in one.error and not one.tokens
    assert Characters().decode(other.tokens) in "abc" and not other.error
