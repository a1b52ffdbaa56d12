"""Transfers of KV by example: what is fetched, held and saved, whatever becomes of requests, steps and jobs."""

from __future__ import annotations

from test_engine_core import CONFIG, Engine, make_request

from tokenmill.core.effects import Effects, FetchBlocks, Job, JobEnded, SaveBlocks, StoreOpened
from tokenmill.core.events import FINISH_LENGTH, Drain
from tokenmill.core.request import Request
from tokenmill.kv.blocks.hashing import extend_keys, root_key


def stored_engine(request: Request, num_blocks: int) -> Engine:
    """An engine with a store that holds the first blocks of the request's prompt."""
    engine = Engine()
    keys: list[bytes] = []
    extend_keys(keys, root_key(CONFIG.numerics_id, "", ""), request.prompt_tokens, CONFIG.block_size)
    engine.core.handle(StoreOpened((tuple(keys[:num_blocks]),)), 0.0)
    return engine


def jobs(engine: Engine) -> list[Job]:
    return list(engine.core.take_effects().jobs)


def end(engine: Engine, job: Job, error: str = "") -> Effects:
    effects = engine.core.handle(JobEnded(job, error=error), 1.0)
    engine.core.check()
    return effects


def test_a_request_runs_with_what_was_stored() -> None:
    """Nothing is planned while it is LOADING; then it computes the rest of its prompt alone."""
    request = make_request("a", 22, 2)
    engine = stored_engine(request, 3)
    engine.add(request)
    assert engine.plan() is None
    (job,) = jobs(engine)
    assert isinstance(job, FetchBlocks) and len(job.moves) == 3
    end(engine, job)
    plan, _ = engine.step()
    assert plan.rows[0].start == 12 and len(plan.rows[0].tokens) == 10
    assert [output.num_cached for output in engine.finish()] == [12]


def test_a_transfer_holds_its_blocks_after_its_request_has_gone() -> None:
    """Until the job's end, heard of once or twice; then the blocks serve the next."""
    request = make_request("a", 22, 2)
    engine = stored_engine(request, 3)
    engine.add(request)
    engine.plan()
    (job,) = jobs(engine)
    engine.abort("a")
    assert not engine.core.has_work and engine.core.stats().num_held_blocks == 3
    end(engine, job)
    end(engine, job)
    assert (engine.core.stats().num_held_blocks, engine.core.stats().num_cached_blocks) == (0, 3)
    engine.add(make_request("b", 22, 2))
    plan, _ = engine.step()
    assert plan.rows[0].start == 12 and not jobs(engine)


def test_a_failed_step_leaves_transfers_alone() -> None:
    """The request that waits for KV runs when it has come; the step's own request fails."""
    request = make_request("a", 22, 2)
    engine = stored_engine(request, 3)
    engine.add(make_request("other", 9, 4, first=50), request)
    engine.plan()
    (job,) = jobs(engine)
    (failed,) = engine.fail()
    assert failed.request_id == "other" and engine.core.stats().num_held_blocks == 3
    end(engine, job)
    assert engine.finish()[-1].finish_reason == FINISH_LENGTH


def test_what_a_corrupted_sequence_held_is_not_fetched_again() -> None:
    """The fault may lie in what was stored: the retry computes all of its prompt, and that is what is saved."""
    request = make_request("a", 22, 1)
    engine = stored_engine(request, 3)
    engine.add(request)
    engine.plan()
    (job,) = jobs(engine)
    end(engine, job)
    engine.corrupted.add(0)
    assert engine.step()[1][0].finish_reason == "error"
    engine.add(make_request("b", 22, 1))
    plan, _ = engine.step()
    assert plan.rows[0].start == 0 and not jobs(engine)
    (save,) = engine.core.handle(Drain(), 1.0).jobs
    assert isinstance(save, SaveBlocks) and len(save.moves) == 5


def test_an_engine_is_drained_when_its_transfers_are() -> None:
    """A fetch that nobody waits for any more is waited for; then what is not stored is saved, until that fails."""
    request = make_request("a", 22, 1)
    engine = stored_engine(request, 3)
    engine.add(request)
    engine.plan()
    (fetch,) = jobs(engine)
    engine.abort("a")
    assert not engine.core.handle(Drain(), 1.0).jobs and not engine.core.is_drained
    assert not end(engine, fetch, "lost").jobs and engine.core.is_drained
    other = stored_engine(request, 3)
    other.add(request)
    other.plan()
    (fetch,) = jobs(other)
    end(other, fetch)
    other.finish()
    (save,) = other.core.handle(Drain(), 1.0).jobs
    assert isinstance(save, SaveBlocks) and len(save.moves) == 2 and not other.core.is_drained
    assert not end(other, save, "The disk is full.").jobs and other.core.is_drained
    assert other.core.stats().num_held_blocks == 0
