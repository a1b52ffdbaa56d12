"""The prefix tree in few words, against a slow count over the tree, and how long an engine is asked for it."""

from __future__ import annotations

import asyncio
import random

import pytest

from scripted import attached
from tokenmill.control.observe import cache_views
from tokenmill.core.block import full_groups, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import CacheShown, ShowCache, Submit
from tokenmill.core.kv_events import PoolCounts, PrefixRun, PrefixSummary
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import RowResult, StepResult
from tokenmill.engine.build import LocalEngineEnd
from tokenmill.engine.core import EngineCore
from tokenmill.kv.blocks import radix
from tokenmill.kv.blocks.manager import BlockManager
from tokenmill.server.client import EngineClient


def fill(manager: BlockManager, prompts: list[str]) -> dict[str, list[int]]:
    """Publish prompts, a letter a block; they share what they begin with. Returns the blocks of each."""
    tables: dict[str, list[int]] = {}
    for prompt in prompts:
        keys = [prompt[: i + 1].encode() for i in range(len(prompt))]
        blocks = manager.match(keys, 0, len(keys))
        manager.adopt(blocks)
        shared = len(blocks)
        blocks += manager.reserve(len(keys) - shared)
        manager.publish(keys, blocks, shared, len(keys))
        tables[prompt] = blocks
    return tables


def test_runs_are_what_prompts_share_and_what_they_do_not() -> None:
    manager = BlockManager(32)
    tables = fill(manager, ["abcd", "abef", "x"])
    manager.release(tables["abcd"], 0)
    manager.end_step(0)
    said = manager.summary(10)
    assert said == PrefixSummary(
        (
            PrefixRun(0, -1, 0, 2, 2, 6, 2, 2),  # a b, held by the second prompt
            PrefixRun(1, 0, 2, 2, 0, 2, 1, 0),  # c d, cached
            PrefixRun(2, 0, 2, 2, 2, 2, 1, 0),  # e f
            PrefixRun(3, -1, 0, 1, 1, 1, 1, 0),  # x
        ),
        7,
        7,
    )
    assert [run.id for run in manager.summary(2).runs] == [0, 1]
    assert BlockManager(8, window=4).summary(5) == PrefixSummary()


@pytest.mark.parametrize("seed", range(30))
def test_sums_agree_with_a_slow_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are in one run each; totals are what is below; of a part, parents are there and the largest are taken."""
    rng = random.Random(seed)
    prompts = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 25))]
    manager = BlockManager(512)
    tables = fill(manager, prompts)
    prefixes = {prompt[: i + 1] for prompt in prompts for i in range(len(prompt))}
    said = manager.summary(10_000)
    assert sum(run.num_blocks for run in said.runs) == said.num_published == said.num_seen == len(prefixes)
    assert sum(run.num_held for run in said.runs) == len({block for table in tables.values() for block in table})
    ends = [prefix for prefix in prefixes if len({p for p in prefixes if p[:-1] == prefix}) != 1]
    assert len(said.runs) == len(ends)
    by_id = {run.id: run for run in said.runs}
    for run in said.runs:
        below = [other.total_blocks for other in said.runs if other.parent == run.id]
        assert run.total_blocks == run.num_blocks + sum(below) and len(below) == run.num_children
        if run.parent >= 0:
            assert run.start == by_id[run.parent].start + by_id[run.parent].num_blocks and run.parent < run.id
    few = manager.summary(3).runs
    assert {run.parent for run in few} <= {run.id for run in few} | {-1}
    assert (
        sorted((run.total_blocks for run in few), reverse=True)
        == sorted((run.total_blocks for run in said.runs), reverse=True)[:3]
    )
    monkeypatch.setattr(radix, "MOST_SEEN", 4)
    part = manager.summary(10_000)
    assert part.num_seen == min(4, len(prefixes)) == sum(run.num_blocks for run in part.runs)


def test_an_engine_tells_what_it_holds() -> None:
    """At once, with the number of the question; pools with a window are counted beside."""
    config = EngineConfig((*full_groups(64), window_group(32, 7)), max_model_len=64, block_size=4)
    core = EngineCore(config)
    core.handle(Submit((Request("a", tuple(range(1, 30)), SamplingParams(max_tokens=2), 2, 0),)), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.commit(StepResult(plan.step, tuple(RowResult(row.seq, (7,)) for row in plan.rows)), 1.0)
    (said,) = core.handle(ShowCache(3, 10), 1.0).answers
    assert isinstance(said, CacheShown) and (said.number, said.block_size) == (3, 4)
    assert said.pools[0] == PoolCounts(0, 64, 64 - 8, 0, 8) and said.pools[1].window == 7
    (run,) = said.summary.runs
    assert (run.num_blocks, run.num_held, run.num_children) == (7, 7, 0)
    core.check()


@attached
async def test_an_engine_is_not_asked_for_each_who_wants_to_know(client: EngineClient, engine: LocalEngineEnd) -> None:
    """One question serves all who ask within half a second; an engine that goes is left out."""
    asking = [asyncio.create_task(client.cache_views.ask()) for _ in range(5)]
    question = await engine.receive()
    assert isinstance(question, ShowCache)
    await engine.send(CacheShown(question.number + 1, 16))  # of another question
    await engine.send(CacheShown(question.number, 16))
    answers = await asyncio.gather(*asking)
    assert all(list(answer.values()) == [CacheShown(question.number, 16)] for answer in answers)
    assert await client.cache_views.ask() == answers[0], "the last answer still serves"
    client.cache_views._asked_s[0] -= cache_views.FRESH_S
    late = asyncio.create_task(client.cache_views.ask())
    assert isinstance(await engine.receive(), ShowCache)
    engine.close()
    assert await late == {} and await client.cache_views.ask() == {}
