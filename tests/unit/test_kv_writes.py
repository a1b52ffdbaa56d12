"""What is written to a store with tiers by example: when, under which names, and what a copy under way holds up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_engine_core import CONFIG, Engine, make_request

from tokenmill.core.block import full_groups
from tokenmill.core.effects import (
    SELECTIVE,
    WRITE_BACK,
    WRITE_THROUGH,
    DropBlocks,
    FindBlocks,
    Job,
    JobEnded,
    NoteStepCosts,
    SaveBlocks,
    StoreOpened,
)
from tokenmill.core.events import Drain, Submit
from tokenmill.core.kv_events import KeepKV
from tokenmill.core.request import EXPORT, Request
from tokenmill.core.step import StepResult
from tokenmill.core.tiers import HOST, TierFacts
from tokenmill.kv.blocks.manager import BlockManager


class WritingEngine(Engine):
    """With a store that has nothing, and jobs that end when the test says so, but looks at once."""

    def __init__(self, writes: str, num_blocks: int = 64) -> None:
        super().__init__(replace(CONFIG, groups=full_groups(num_blocks, 1000), max_model_len=4 * num_blocks))
        self.saves: list[SaveBlocks] = []
        self.others: list[Job] = []
        self.hear(StoreOpened(tiers=(TierFacts(HOST),), writes=writes))

    def hear(self, event: object) -> None:
        self.sort(self.core.handle(event, 5.0).jobs)
        self.core.check()

    def sort(self, jobs: tuple[Job, ...]) -> None:
        for job in jobs:
            if isinstance(job, SaveBlocks):
                self.saves.append(job)
            elif isinstance(job, FindBlocks):
                self.hear(JobEnded(job, "0" * len(job.wanted)))
            else:
                self.others.append(job)

    def run(self, *requests: Request) -> None:
        """To their end."""
        self.hear(Submit(requests))
        for _ in range(1000):
            while self.plan() is not None:
                pass
            self.sort(self.core.take_effects().jobs)
            if not self.in_flight:
                break
            plan = self.in_flight.popleft()
            self.sort(self.core.commit(StepResult(plan.step, tuple(map(self.result, plan.rows))), 5.0).jobs)
            self.core.check()

    def end_saves(self, error: str = "") -> list[SaveBlocks]:
        """All under way, and those that follow."""
        ended = []
        while self.saves:
            job = self.saves.pop(0)
            ended.append(job)
            self.hear(JobEnded(job, error=error))
        return ended


def test_write_through_saves_what_was_committed_with_its_facts() -> None:
    """Parents, depths and the owner; every full block of prompt and answer, once."""
    engine = WritingEngine(WRITE_THROUGH)
    engine.run(make_request("a", 22, 8, cache_salt="me"))
    facts = [each for job in engine.end_saves() for each in job.facts]
    assert [each.depth for each in facts] == list(range(7)) and {each.owner for each in facts} == {"me"}
    assert [each.parent for each in facts] == [b"", *(each.block[1] for each in facts[:-1])]
    engine.run(make_request("b", 22, 8, cache_salt="me"))
    engine.hear(Drain())
    assert not engine.saves and engine.core.is_drained
    assert any(isinstance(job, NoteStepCosts) for job in engine.others) == engine.core.state.costs.costs.is_known


def test_nothing_of_a_step_in_flight_is_saved() -> None:
    """It may fail."""
    engine = WritingEngine(WRITE_THROUGH)
    engine.hear(Submit((make_request("a", 60, 4),)))
    engine.plan()
    engine.hear(JobEnded(FindBlocks(99, ()), ""))  # any event: a border
    assert not engine.saves
    engine.fail()
    engine.sort(engine.core.take_effects().jobs)
    assert not engine.saves


def test_selective_saves_what_a_second_sequence_uses() -> None:
    engine = WritingEngine(SELECTIVE)
    engine.run(make_request("a", 22, 1))
    assert not engine.saves
    engine.run(make_request("b", 18, 1))
    assert [len(job.moves) for job in engine.end_saves()] == [4]


def test_write_back_saves_what_is_about_to_be_evicted() -> None:
    """Nothing while there is room; then the oldest first, before it goes."""
    engine = WritingEngine(WRITE_BACK, 96)
    engine.run(make_request("a", 41, 1))
    assert not engine.saves
    written: set[bytes] = set()
    for index in range(1, 20):
        engine.run(make_request(f"r{index}", 41, 1, first=1000 * index))
        written |= {move[1] for job in engine.end_saves() for move in job.moves}
    unwritten = engine.core.state.counters.kv_unwritten
    assert len(written) == engine.core.state.counters.kv_written >= 100 and unwritten == 0


@pytest.mark.parametrize("writes", [WRITE_BACK, SELECTIVE])
def test_what_is_dirty_is_written_when_the_engine_is_drained(writes: str) -> None:
    engine = WritingEngine(writes)
    engine.run(make_request("a", 22, 1))
    engine.hear(Drain())
    assert not engine.core.is_drained
    assert sum(len(job.moves) for job in engine.end_saves()) == 5
    assert engine.core.is_drained and engine.core.stats().num_held_blocks == 0


def test_a_corrupted_sequence_is_dropped_from_the_store_also_what_is_on_its_way() -> None:
    engine = WritingEngine(WRITE_THROUGH)
    engine.run(make_request("a", 62, 1))
    (save, *_) = engine.saves
    engine.corrupted.add(1)
    engine.run(make_request("b", 62, 1))
    (drop,) = [job for job in engine.others if isinstance(job, DropBlocks)]
    assert {move[:2] for move in save.moves} <= set(drop.wanted)
    engine.others.clear()
    engine.end_saves()
    again = {block for job in engine.others if isinstance(job, DropBlocks) for block in job.wanted}
    assert again >= {move[:2] for move in save.moves}


def test_a_handed_over_request_ends_when_others_can_fetch_it() -> None:
    engine = WritingEngine(SELECTIVE)
    engine.run(make_request("a", 22, 1, handoff=EXPORT))
    (save,) = engine.saves
    assert save.is_shared and [each.depth for each in save.facts] == [0, 1, 2, 3, 4] and engine.core.has_work
    engine.end_saves()
    assert not engine.core.has_work


def test_a_store_that_fails_costs_nothing_but_the_blocks() -> None:
    engine = WritingEngine(WRITE_THROUGH)
    engine.run(make_request("a", 22, 1))
    assert engine.end_saves("gone") and engine.core.state.counters.kv_written == 0
    assert engine.core.stats().num_held_blocks == 0


def test_a_copied_block_is_evicted_but_not_handed_out() -> None:
    """It keeps its place in the order, so that its parent does not go before it."""
    pool = BlockManager(3)
    blocks = pool.reserve(3)
    pool.publish([b"a", b"b", b"c"], blocks, 0, 3)
    pool.begin_copy(blocks[2:])
    pool.release(blocks, -1)
    assert (pool.num_cached, pool.num_available) == (3, 2)
    taken = pool.reserve(2)
    assert sorted(taken) == sorted(blocks[:2]) and pool.find(b"c") is None and pool.num_available == 0
    pool.check([taken])
    pool.end_copy(blocks[2:])
    assert pool.num_free == 1
    pool.check([taken])


@pytest.mark.parametrize("writes", [SELECTIVE, WRITE_BACK])
def test_what_is_to_be_kept_is_written_though_nobody_has_used_it_again(writes: str) -> None:
    engine = WritingEngine(writes)
    engine.run(make_request("a", 22, 2))
    assert not engine.saves
    published = [key for key, _ in engine.core.state.blocks.pools[0].published()]
    engine.hear(KeepKV(b"".join(published), 0.0))
    assert not engine.saves, "it is let go"
    engine.hear(KeepKV(b"".join(published), 60.0))
    assert sorted(key for save in engine.saves for _, key, _ in save.moves) == sorted(published)


@pytest.mark.parametrize("writes", [WRITE_THROUGH, SELECTIVE])
def test_a_store_that_was_away_is_told_again_of_what_is_used(writes: str) -> None:
    """It may have lost its memory. What nobody uses any more is not told, and nothing is told twice."""
    engine = WritingEngine(writes)
    engine.run(make_request("a", 22, 4, cache_salt="me"), make_request("b", 22, 4, cache_salt="you"))
    engine.run(make_request("a2", 22, 4, cache_salt="me"), make_request("b2", 22, 4, cache_salt="you"))
    before = [each for job in engine.end_saves() for each in job.facts]
    assert before and not engine.end_saves()
    engine.hear(StoreOpened(tiers=(TierFacts(HOST),), writes=writes))
    assert not engine.saves, "nobody has used it yet"
    engine.run(make_request("a3", 22, 4, cache_salt="me"))
    again = [each for job in engine.end_saves() for each in job.facts]
    assert [each.depth for each in again] == list(range(5)) and {each.owner for each in again} == {"me"}
    assert set(again) <= set(before)
    engine.run(make_request("a4", 22, 4, cache_salt="me"))
    assert not engine.end_saves()
