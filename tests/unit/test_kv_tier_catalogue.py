"""Stores with tiers by example: what is asked, fetched, computed though it is stored, and missed."""

from __future__ import annotations

from dataclasses import replace

from test_engine_core import CONFIG, Engine, make_request

from tokenmill.core.block import full_groups
from tokenmill.core.cost import Costs
from tokenmill.core.effects import SELECTIVE, FetchBlocks, FindBlocks, Job, JobEnded, PromoteBlocks, StoreOpened
from tokenmill.core.events import Submit
from tokenmill.core.request import Request
from tokenmill.core.tiers import DISK, HOST, TierFacts
from tokenmill.kv.connector.scheduler import tiers

COSTS = Costs(step_s=0.001, token_s=0.001)
FAST, SLOW = TierFacts(HOST, 0, 0.0001, 1e9), TierFacts(DISK, 0, 0.1, 1e6)
BLOCK_BYTES = 1000


class TieredEngine(Engine):
    """With a store whose answers the test gives."""

    def __init__(self, *facts: TierFacts) -> None:
        super().__init__(replace(CONFIG, groups=full_groups(64, BLOCK_BYTES)))
        self.core.handle(StoreOpened(tiers=facts or (FAST, SLOW), writes=SELECTIVE), 0.0)
        self.core.state.costs.costs = COSTS
        self.told: list[Job] = []

    def jobs(self, kind: type) -> list[Job]:
        """Jobs of a kind, each told once."""
        self.told += self.core.take_effects().jobs
        found = [job for job in self.told if isinstance(job, kind)]
        self.told = [job for job in self.told if not isinstance(job, kind)]
        return found

    def ask(self, *requests: Request, now: float = 0.0) -> list[FindBlocks]:
        """Submit them; what is looked for."""
        self.told += self.core.handle(Submit(requests), now).jobs
        return self.jobs(FindBlocks)

    def end(self, job: Job, result: str = "", error: str = "", now: float = 1.0) -> None:
        self.told += self.core.handle(JobEnded(job, result, error), now).jobs
        self.core.check()


def test_a_sequence_asks_as_it_enters_and_waits_for_the_answer_at_its_turn() -> None:
    """Then what is stored is fetched, and the rest computed."""
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 2))
    assert len(find.wanted) == 5 and find.within_s
    assert engine.plan() is None  # LOADING
    engine.end(find, "11100")
    assert engine.plan() is None
    (fetch,) = engine.jobs(FetchBlocks)
    assert [move[1] for move in fetch.moves] == [key for _, key in find.wanted[:3]] and fetch.within_s
    engine.end(fetch)
    plan, _ = engine.step()
    assert plan.rows[0].start == 12 and len(plan.rows[0].tokens) == 10
    assert [output.num_cached for output in engine.finish()] == [12]


def test_what_loads_more_slowly_than_it_computes_is_computed() -> None:
    """All of it, or the part that lies in the slow tier."""
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 1))
    engine.end(find, "22222")
    plan, _ = engine.step()
    assert plan.rows[0].start == 0 and not engine.jobs(FetchBlocks)
    (find,) = engine.ask(make_request("b", 22, 1, first=50))
    engine.end(find, "11222")
    assert engine.plan() is None
    (fetch,) = engine.jobs(FetchBlocks)
    assert len(fetch.moves) == 2


def test_a_long_run_from_a_slow_tier_is_asked_for_early() -> None:
    """As it waits behind others; host memory is not asked to promote what it has."""
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 240, 2))
    engine.end(find, "1" * 9 + "2" * 50)
    (promote,) = engine.jobs(PromoteBlocks)
    assert promote.wanted == find.wanted[9:]


def test_missed_blocks_are_computed_after_those_before_them() -> None:
    """The digits say which came; the rest is not asked for again."""
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 2))
    engine.end(find, "11111")
    engine.plan()
    (fetch,) = engine.jobs(FetchBlocks)
    engine.end(fetch, "11011")
    plan, _ = engine.step()
    assert plan.rows[0].start == 8 and not engine.jobs(FetchBlocks)
    assert [output.num_cached for output in engine.finish()] == [8]


def test_pieces_come_in_order_and_no_more_once_nobody_waits(monkeypatch) -> None:
    """Two at a time; what has come is published at once; after an abort the jobs under way end, and hold until then."""
    monkeypatch.setattr(tiers, "CHUNK_BYTES", BLOCK_BYTES)
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 2))
    engine.end(find, "11111")
    engine.plan()
    first, second = engine.jobs(FetchBlocks)
    engine.end(second)
    (third,) = engine.jobs(FetchBlocks)
    engine.end(first)
    (fourth,) = engine.jobs(FetchBlocks)
    engine.abort("a")
    assert engine.core.stats().num_held_blocks == 5
    engine.end(third)
    engine.end(fourth)
    assert not engine.jobs(FetchBlocks)
    assert (engine.core.stats().num_held_blocks, engine.core.stats().num_cached_blocks) == (0, 4)


def test_an_answer_that_fails_is_no_answer() -> None:
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 1))
    assert engine.plan() is None
    engine.end(find, error="gone")
    plan, _ = engine.step()
    assert plan.rows[0].start == 0


def test_what_the_pools_lose_while_it_waits_is_asked_for_at_its_turn() -> None:
    """As it entered, all was here."""
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 1))
    engine.end(find, "00000", now=0.001)
    engine.finish()
    assert not engine.ask(make_request("b", 22, 1))
    pool = engine.core.state.blocks.pools[0]
    pool.release(pool.reserve(64), -1)
    assert engine.plan() is None
    (find,) = engine.jobs(FindBlocks)
    assert len(find.wanted) == 5
    engine.end(find, "11111")
    assert engine.plan() is None and engine.jobs(FetchBlocks)


def test_a_store_that_hangs_is_asked_less() -> None:
    """After an answer that took its whole time and had nothing, requests compute at once for two seconds, however many
    they are; then it is asked."""
    engine = TieredEngine()
    (find,) = engine.ask(make_request("a", 22, 1))
    engine.end(find, "00000", now=tiers.FIND_S)
    engine.finish()
    for nth, after_s in enumerate((0.0, 0.1, 0.99 * tiers.UNASKED_S, 1.01 * tiers.UNASKED_S), 1):
        request = make_request(f"r{nth}", 22, 1, first=100 * nth)
        assert bool(engine.ask(request, now=tiers.FIND_S + after_s)) == (nth == 4), nth
