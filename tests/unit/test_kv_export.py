"""Handing KV over by example: a sequence ends when its KV is saved, whatever becomes of jobs, clients and steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from test_engine_core import CONFIG, Engine, make_request
from test_kv_transfers import end, jobs, stored_engine

from tokenmill.core.block import full_groups, window_group
from tokenmill.core.effects import FetchBlocks, FindBlocks, JobEnded, SaveBlocks, StoreOpened
from tokenmill.core.events import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Drain, Output
from tokenmill.core.request import EXPORT, IMPORT, Request
from tokenmill.core.sequence import Status
from tokenmill.kv.blocks.hashing import extend_keys, root_key
from tokenmill.kv.connector.scheduler.saves import SAVE_BYTES

REQUEST = make_request("a", 22, 1, handoff=EXPORT)


def keys_of(request: Request) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(CONFIG.numerics_id, "", ""), request.prompt_tokens, CONFIG.block_size)
    return keys


def export(engine: Engine, request: Request = REQUEST) -> SaveBlocks:
    """Runs a request to its end, of which its client has heard nothing yet."""
    engine.add(request)
    assert engine.step()[1] == []
    return last_job(engine)


def last_job(engine: Engine) -> SaveBlocks:
    (job,) = engine.jobs
    engine.jobs.clear()
    assert isinstance(job, SaveBlocks)
    return job


class ExportingEngine(Engine):
    """Keeps the jobs of commits, too."""

    def __init__(self, config: object = CONFIG, answer: Callable[[object], int] = lambda row: 7) -> None:
        super().__init__(config, answer)
        self.jobs: list[object] = []
        handle, commit = self.core.handle, self.core.commit

        def noting(call: Callable[..., object]) -> Callable[..., object]:
            def noted(*arguments: object) -> object:
                effects = call(*arguments)
                self.jobs += effects.jobs
                return effects

            return noted

        self.core.handle, self.core.commit = noting(handle), noting(commit)
        self.core.handle(StoreOpened(tuple(() for _ in config.groups)), 0.0)


def test_the_answer_comes_when_the_kv_is_saved() -> None:
    """All full blocks in one job; until its end the sequence is EXPORTING, holds its blocks and has no row."""
    engine = ExportingEngine()
    job = export(engine)
    assert [key for _, key, _ in job.moves] == keys_of(REQUEST)[:5]
    (seq,) = engine.core.state.by_id.values()
    assert seq.status is Status.EXPORTING and engine.core.stats().num_held_blocks == 6
    assert engine.plan() is None and engine.core.has_work
    (output,) = end(engine, job).outputs
    assert (output.tokens, output.finish_reason, output.is_saved) == ((7,), FINISH_LENGTH, True)
    assert output.timing is not None and (output.timing.first_token_s, output.timing.finished_s) == (2.0, 1.0)
    assert seq.status is Status.FINISHED and not engine.core.has_work
    assert engine.core.stats().num_held_blocks == 0


def test_a_failed_save_loses_nothing_but_the_save() -> None:
    """The answer is whole, says that nothing was saved, and the next request may try again."""
    engine = ExportingEngine()
    (output,) = end(engine, export(engine), "the disk is full").outputs
    assert (output.tokens, output.finish_reason, output.error, output.is_saved) == ((7,), FINISH_LENGTH, "", False)
    again = export(engine, replace(REQUEST, id="b"))
    assert len(again.moves) == 5 and not again.stored
    (output,) = end(engine, again).outputs
    assert output.is_saved
    third = export(engine, replace(REQUEST, id="c"))
    assert third.stored == again.moves and not third.moves, "the store may have given some of them up"


def test_an_end_that_was_heard_of_before_is_ignored() -> None:
    """Also while the next save is under way."""
    engine = ExportingEngine()
    job = export(engine)
    assert len(end(engine, job).outputs) == 1
    assert end(engine, job).outputs == ()
    other = export(engine, replace(REQUEST, id="b"))
    assert end(engine, job).outputs == () and engine.core.stats().num_held_blocks == 6
    assert len(end(engine, other).outputs) == 1


def test_an_abort_ends_the_request_and_not_the_save() -> None:
    """The client hears at once, with what was drawn; the blocks are held until the job has ended."""
    engine = ExportingEngine()
    job = export(engine)
    (output,) = engine.abort("a")
    assert (output.tokens, output.num_output, output.finish_reason, output.is_saved) == ((7,), 1, FINISH_ABORT, False)
    assert not engine.core.has_work and engine.core.stats().num_held_blocks == 6
    assert end(engine, job).outputs == () and engine.core.stats().num_held_blocks == 0


def test_saves_go_one_after_the_other() -> None:
    """A save of more than a job may copy at once has several, and its sequence ends with the last of them."""
    groups = full_groups(64, SAVE_BYTES // 3)
    engine = ExportingEngine(replace(CONFIG, groups=groups))
    engine.add(REQUEST, replace(REQUEST, id="b", cache_salt="other"))
    engine.step()
    ended: list[Output] = []
    counts = []
    while engine.jobs:
        job = last_job(engine)
        counts.append(len(job.moves))
        ended += end(engine, job).outputs
    assert counts == [3, 2, 3, 2] and [output.request_id for output in ended] == ["a", "b"]


def test_a_stop_token_exports_and_a_failed_step_does_not() -> None:
    """Rows in flight behind the stop token are dropped when they come back, or fail, without harm."""
    for fails in (False, True):
        engine = ExportingEngine(answer=lambda row: 99)
        engine.add(make_request("a", 22, 8, handoff=EXPORT))
        engine.plan()
        engine.plan()
        assert engine.commit() == []
        job = last_job(engine)
        assert (engine.fail if fails else engine.commit)() == []
        (output,) = end(engine, job).outputs
        assert (output.finish_reason, output.stop_token, output.is_saved) == (FINISH_STOP, 99, True)
    engine = ExportingEngine()
    engine.add(REQUEST)
    engine.plan()
    (output,) = engine.fail()
    assert output.finish_reason == FINISH_ERROR and not engine.jobs


def test_a_drain_waits_for_exports() -> None:
    """And saves the rest after them; what was exported is not saved again."""
    engine = ExportingEngine()
    job = export(engine)
    engine.core.handle(Drain(), 1.0)
    assert not engine.core.is_drained and not engine.jobs
    end(engine, job)
    assert engine.core.is_drained and not engine.jobs


def test_without_a_store_a_request_is_refused_unless_it_was_let_in_before() -> None:
    """By the field that asked for it; a resumed one ends as any other."""
    engine = Engine()
    for handoff in (EXPORT, IMPORT):
        (output,) = engine.add(replace(REQUEST, handoff=handoff))
        assert output.error_param == "kv_transfer_params" and "--kv-save" in output.error
    engine.add(replace(REQUEST, is_resumed=True))
    (output,) = engine.step()[1]
    assert (output.finish_reason, output.is_saved) == (FINISH_LENGTH, False)


def test_an_import_looks_for_what_others_stored() -> None:
    """Once, before its first turn; what is there is fetched, and what is not is computed."""
    request = make_request("a", 22, 2, handoff=IMPORT)
    engine = stored_engine(request, 1)
    engine.add(request)
    assert engine.plan() is None
    (job,) = jobs(engine)
    assert job == FindBlocks(0, tuple((0, key) for key in keys_of(request)[1:5]))
    engine.core.handle(JobEnded(job, "1100"), 1.0)
    engine.core.handle(JobEnded(job, "1111"), 1.0)
    assert engine.plan() is None
    (job,) = jobs(engine)
    assert isinstance(job, FetchBlocks) and len(job.moves) == 3
    end(engine, job)
    plan, _ = engine.step()
    assert plan.rows[0].start == 12
    assert engine.finish()[-1].num_cached == 12


@pytest.mark.parametrize("gone", ["failed", "cancelled"])
def test_a_look_that_comes_to_nothing(gone: str) -> None:
    """A store that does not answer costs its blocks; a client that is gone is not waited for."""
    request = make_request("a", 22, 2, handoff=IMPORT)
    engine = stored_engine(request, 0)
    engine.add(request)
    engine.plan()
    (job,) = jobs(engine)
    if gone == "cancelled":
        engine.abort("a")
    engine.core.handle(JobEnded(job, "11111", error="no answer" if gone == "failed" else ""), 1.0)
    engine.core.check()
    plan = engine.plan()
    assert (plan is None) == (gone == "cancelled") and (plan is None or plan.rows[0].start == 0)


def test_a_window_keeps_what_the_next_engine_sees() -> None:
    """The block before the last border has slid out of the window of the last token, yet whoever takes the prompt up
    computes its last token anew, and sees it."""
    config = replace(CONFIG, groups=(*full_groups(64), window_group(64, 5)))
    engine = ExportingEngine(config)
    request = make_request("a", 24, 1, handoff=EXPORT)
    job = export(engine, request)
    saved = [[keys_of(request).index(key) for group, key, _ in job.moves if group == index] for index in (0, 1)]
    assert saved == [[0, 1, 2, 3, 4, 5], [4, 5]]
    end(engine, job)
    other = ExportingEngine(config)
    other.core.handle(StoreOpened(tuple(tuple(keys_of(request)[i] for i in group) for group in saved)), 0.0)
    other.add(make_request("a", 24, 1))
    assert other.plan() is None
    (fetch,) = jobs(other)
    assert isinstance(fetch, FetchBlocks) and len(fetch.moves) == 5 + 1
