"""A head is computed while the tail of its prefix loads, by example: where they meet, and what else becomes of it."""

from __future__ import annotations

import pytest
from test_engine_core import make_request
from test_kv_tier_catalogue import BLOCK_BYTES, COSTS, TieredEngine

from tokenmill.core.effects import FetchBlocks
from tokenmill.core.tiers import DISK, TierFacts
from tokenmill.kv.connector.scheduler import load_or_recompute as rates
from tokenmill.kv.connector.scheduler import overlapped_load
from tokenmill.kv.connector.scheduler.load_or_recompute import Computing, Place, Run, Speed, meeting

EVEN = TierFacts(DISK, 0, 0.00001, BLOCK_BYTES / 0.004)
"""Loads a block in the time that it takes to compute its 4 tokens."""

PLACE, END = Place([2] * 10, BLOCK_BYTES), 10


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TieredEngine:
    """It knows the tier from the start, and fetches two blocks a job."""
    monkeypatch.setattr(rates, "NUM_KNOWN", 0)
    monkeypatch.setattr(overlapped_load, "TAIL_BYTES", 2 * BLOCK_BYTES)
    return TieredEngine(EVEN)


def begin(engine: TieredEngine) -> list[FetchBlocks]:
    """42 tokens, 10 blocks of which are stored: the first step is planned, and two jobs have started."""
    (find,) = engine.ask(make_request("a", 42, 2))
    assert engine.plan() is None
    engine.end(find, "2" * 10)
    plan = engine.plan()
    assert plan is not None and plan.rows[0].start == 0 and plan.rows[0].num_tokens == 20
    assert engine.plan() is None  # it waits where they are to meet
    jobs = engine.jobs(FetchBlocks)
    assert [len(job.moves) for job in jobs] == [1, 2]
    return jobs


def test_the_tail_comes_from_the_back_and_is_adopted_where_the_head_has_come_to(engine: TieredEngine) -> None:
    last, second = begin(engine)
    keys = engine.core.state.by_id["a"].keys
    assert [move[1] for move in last.moves] == keys[9:10] and [move[1] for move in second.moves] == keys[7:9]
    engine.end(last)
    engine.end(second)
    (first,) = engine.jobs(FetchBlocks)
    engine.end(first)
    plan = engine.plan()  # behind a step in flight
    assert plan is not None and (plan.rows[0].start, plan.rows[0].num_tokens) == (40, 2)
    assert [output.num_cached for output in engine.finish()][-1] == 20
    stats = engine.core.stats()
    assert stats.external_hits == 20 and stats.external_recomputed == 20 and stats.num_cached_blocks == 10


def test_where_the_load_is_late_the_head_computes_on_and_meets_it_later(engine: TieredEngine) -> None:
    last, second = begin(engine)
    engine.end(last)
    engine.commit()
    plan, _ = engine.step()
    assert plan.rows[0].start == 20 and 4 <= plan.rows[0].num_tokens < 20
    engine.end(second)
    for job in engine.jobs(FetchBlocks):
        engine.end(job)
    assert engine.finish()[-1].num_cached >= 8


def test_a_load_that_never_ends_is_not_waited_for(engine: TieredEngine) -> None:
    jobs = begin(engine)
    for _ in range(20):
        if engine.in_flight:
            engine.commit()
        engine.plan()
    assert not engine.core.has_work and engine.core.stats().num_held_blocks == 5
    for job in jobs:
        engine.end(job)
    assert engine.core.stats().num_held_blocks == 0 and not engine.jobs(FetchBlocks)


def test_a_tail_that_hangs_on_a_failed_step_is_withdrawn(engine: TieredEngine) -> None:
    jobs = begin(engine)
    while jobs:
        engine.end(jobs.pop(0))
        jobs += engine.jobs(FetchBlocks)
    assert engine.core.stats().num_cached_blocks == 0  # quarantined with the step that it hangs on
    engine.fail()
    stats = engine.core.stats()
    assert (stats.num_held_blocks, stats.num_cached_blocks) == (0, 0)


@pytest.mark.parametrize("how", ["abort", "lose"])
def test_what_is_under_way_is_held_until_it_ends(engine: TieredEngine, how: str) -> None:
    """Of a sequence that goes, and of one that goes on alone; nothing more is asked for."""
    first, second = begin(engine)
    if how == "abort":
        engine.abort("a")
        engine.end(first)
    else:
        engine.end(first, "0")
        assert engine.core.stats().external_missed == 1
    assert engine.core.stats().num_held_blocks >= 5 and not engine.jobs(FetchBlocks)
    engine.end(second)
    engine.finish()


def test_others_that_wait_have_the_processor(engine: TieredEngine) -> None:
    """While others wait too, what is stored of a prompt is fetched or computed, not both."""
    finds = engine.ask(make_request("a", 42, 2), make_request("b", 42, 2, first=100))
    for find in finds:
        engine.end(find, "2" * 10)
    engine.plan()
    assert not engine.core.state.by_id["a"].pause


@pytest.mark.parametrize(("byte_s", "low", "high"), [(4e-6, 5, 5), (1.2e-5, 7, 8), (1.3e-6, 2, 3)])
def test_both_end_at_the_same_time(byte_s: float, low: int, high: int) -> None:
    computing = Computing(COSTS, 0, 42, 64, 0.001)
    assert low <= meeting(PLACE, Run(0), END, 4, computing, Speed([0.0] * 5, [byte_s] * 5)) <= high


def test_what_gains_next_to_nothing_is_left() -> None:
    computing = Computing(COSTS, 0, 42, 64, 0.001)
    for byte_s in (1e-8, 1e-3):
        best = Run(10, 10 * BLOCK_BYTES * byte_s, computing.saved_s(40)) if byte_s < 1e-6 else Run(0)
        assert not meeting(PLACE, best, END, 4, computing, Speed([0.0] * 5, [byte_s] * 5))
