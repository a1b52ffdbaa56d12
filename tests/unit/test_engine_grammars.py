"""Requests with a grammar in the engine: they enter when it is ready, and nothing runs before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import JobEnded, PrepareGrammar, StepFailed
from tokenmill.core.errors import Overloaded
from tokenmill.core.events import Abort, Drain, LoadAdapter, Submit, UnloadAdapter
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import RowResult, StepResult
from tokenmill.core.terms import Terms
from tokenmill.engine.core import EngineCore

CONFIG = EngineConfig(groups=full_groups(64), max_model_len=64, block_size=4, max_num_batched_tokens=16)
JOB = PrepareGrammar("g")
END = 9


def request(name: str, grammar: str = "g", **settings) -> Request:
    sampling = SamplingParams(max_tokens=8, grammar=grammar, **settings)
    return Request(name, (1, 2, 3), sampling, 8, 0, eos_token_ids=(END,))


def test_requests_enter_when_their_grammar_is_ready():
    """One job for all that wait for the same; others run meanwhile."""
    core = EngineCore(CONFIG)
    effects = core.handle(Submit((request("a"), request("b"), request("c", "other"), request("d", ""))), 0.0)
    assert effects.jobs == (JOB, PrepareGrammar("other")) and core.stats().num_waiting == 4
    plan = core.plan(0.0)
    assert plan is not None and len(plan.rows) == 1
    core.handle(JobEnded(JOB), 0.0)
    plan = core.plan(0.0)
    assert plan is not None and [row.intro.sampling.grammar for row in plan.rows if row.intro] == ["g", "g"]
    assert core.handle(JobEnded(JOB), 0.0).outputs == ()
    core.check()


def test_a_grammar_that_cannot_be_prepared_refuses_its_requests():
    core = EngineCore(CONFIG)
    core.handle(Submit((request("a"),)), 0.0)
    ended = JobEnded(JOB, error="no good", error_kind="invalid_request_error", error_param="grammar")
    (output,) = core.handle(ended, 1.0).outputs
    assert (output.request_id, output.finish_reason, output.error) == ("a", "error", "no good")
    assert (output.error_kind, output.error_param) == ("invalid_request_error", "grammar")
    assert not core.has_work


def test_a_request_may_leave_before_its_grammar_is_ready():
    """Its id is taken until then; the end of the job finds nobody; a drained engine waits for neither."""
    core = EngineCore(CONFIG)
    core.handle(Submit((request("a"),)), 0.0)
    (twice,) = core.handle(Submit((request("a", ""),)), 0.0).outputs
    assert twice.error_param == "request_id"
    core.handle(Drain(), 0.0)
    assert not core.is_drained and core.open_ids == ("a",)
    (output,) = core.handle(Abort(core.open_ids), 0.0).outputs
    assert (output.request_id, output.finish_reason) == ("a", "abort") and core.is_drained
    assert core.handle(JobEnded(JOB), 0.0).outputs == () and core.plan(0.0) is None
    core.check()


def test_requests_that_wait_for_their_grammar_count_as_waiting():
    """For the bound on the queue."""
    core = EngineCore(replace(CONFIG, max_num_waiting=2))
    effects = core.handle(Submit(tuple(request(name, name) for name in "abc")), 0.0)
    (refused,) = effects.outputs
    assert refused.request_id == "c" and refused.error_kind == Overloaded.kind


def test_an_adapter_may_go_while_a_request_waits_for_its_grammar():
    core = EngineCore(CONFIG)
    load = LoadAdapter(0, "")
    core.handle(load, 0.0), core.handle(JobEnded(load, "digest"), 0.0)
    waiting = Request("a", (1,), SamplingParams(grammar="g"), 8, 0, adapter="digest")
    assert core.handle(Submit((waiting,)), 0.0).jobs == (JOB,)
    core.handle(UnloadAdapter("digest"), 0.0)
    (output,) = core.handle(JobEnded(JOB), 0.0).outputs
    assert output.error_param == "model" and not core.has_work


def test_the_end_of_a_grammar_is_the_end():
    """An end token that comes before min_tokens or under ignore_eos ends what has a grammar: it allowed nothing else.
    Without a grammar the answer goes on."""
    for settings in ({"min_tokens": 5}, {"ignore_eos": True}):
        for grammar, is_over in (("g", True), ("", False)):
            core = EngineCore(CONFIG)
            core.handle(Submit((request("a", grammar, **settings),)), 0.0)
            if grammar:
                core.handle(JobEnded(JOB), 0.0)
            plan = core.plan(0.0)
            assert plan is not None
            (output,) = core.commit(StepResult(plan.step, (RowResult(plan.rows[0].seq, (END,)),)), 0.0).outputs
            assert (output.finish_reason == "stop") == is_over


def test_what_a_grammar_cannot_go_on_with_is_the_callers_to_mend():
    """A limit that is met in mid-answer is a bad request; a fault of the worker is not."""
    for is_invalid, kind in ((True, "invalid_request_error"), (False, "internal_error")):
        core = EngineCore(CONFIG)
        core.handle(Submit((request("a"),)), 0.0)
        core.handle(JobEnded(JOB), 0.0)
        plan = core.plan(0.0)
        assert plan is not None
        failed = RowResult(plan.rows[0].seq, error="too large", is_invalid=is_invalid)
        (output,) = core.commit(StepResult(plan.step, (failed,)), 0.0).outputs
        assert (output.finish_reason, output.error, output.error_kind) == ("error", "too large", kind)


@pytest.mark.parametrize("has_failed", [True, False])
def test_the_tenant_pays_for_what_its_grammar_took(has_failed):
    """As for tokens: who spent it is served after others, whether or not the answer goes on."""
    core = EngineCore(CONFIG)
    mine, other = (replace(request(name), terms=Terms(tenant=name)) for name in ("mine", "other"))
    core.handle(Submit((mine, other)), 0.0)
    core.handle(JobEnded(JOB), 0.0)
    plan = core.plan(0.0)
    assert plan is not None and len(plan.rows) == 2
    before = [core.state.service.steps_served(core.state.by_id[name]) for name in ("mine", "other")]
    core.handle(Submit((replace(request("next", ""), terms=Terms(tenant="mine")),)), 0.0)
    took = RowResult(plan.rows[0].seq, () if has_failed else (1,), error="too large" if has_failed else "", spent_s=1.0)
    core.commit(StepResult(plan.step, (took, RowResult(plan.rows[1].seq, (1,)))), 0.0)
    after = [core.state.service.steps_served(core.state.by_id[name]) for name in ("next", "other")]
    assert after[0] > before[0] and after[1] == before[1]


def test_who_asked_first_pays_for_the_making_of_a_grammar():
    core = EngineCore(CONFIG)
    several = [replace(request(name), terms=Terms(tenant=name)) for name in ("first", "second")]
    core.handle(Submit(tuple(several)), 0.0)
    core.handle(JobEnded(JOB, "1.5"), 0.0)
    first, second = (core.state.service.steps_served(core.state.by_id[each.id]) for each in several)
    assert first > second == 0
    core.check()


def test_small_costs_of_masks_are_charged_too():
    """Each is less than a token; a thousand are not."""
    core = EngineCore(CONFIG)
    core.handle(Submit((request("a", ""),)), 0.0)
    service, seq = core.state.service, core.state.by_id["a"]
    before = service.steps_served(seq)
    for _ in range(1000):
        service.note_masks(seq, 0.0004)
    assert service.steps_served(seq) > before


def test_a_mask_is_charged_that_its_request_did_not_wait_for():
    """The row behind the end tells of it; also where nothing else of the tenant is open, if others are."""
    core = EngineCore(replace(CONFIG, steps_in_flight=2))
    mine, other = (replace(request(name, ""), terms=Terms(tenant=name)) for name in ("mine", "other"))
    core.handle(Submit((mine, other)), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.handle(Abort(("mine",)), 0.0)
    rows = RowResult(plan.rows[0].seq, (1,), spent_s=1.0), RowResult(plan.rows[1].seq, (1,))
    assert [each.request_id for each in core.commit(StepResult(plan.step, rows), 0.0).outputs] == ["other"]
    core.handle(Submit((replace(mine, id="next"),)), 0.0)
    served = [core.state.service.steps_served(core.state.by_id[name]) for name in ("next", "other")]
    assert served[0] > served[1] == 0
    core.check()


def test_a_mask_is_heard_of_when_nobody_is_left():
    core = EngineCore(CONFIG)
    core.handle(Submit((request("a", ""),)), 0.0)
    plan = core.plan(0.0)
    assert plan is not None
    core.handle(Abort(("a",)), 0.0)
    core.commit(StepResult(plan.step, (RowResult(plan.rows[0].seq, (1,), spent_s=1.0),)), 0.0)
    core.check()


@pytest.mark.parametrize("is_planned_ahead", [True, False])
def test_a_row_without_its_mask_draws_in_another_step(is_planned_ahead):
    """Nothing is said of it; it is introduced anew with what it has, and a row that was in flight changes nothing."""
    core = EngineCore(replace(CONFIG, steps_in_flight=2))
    core.handle(Submit((request("a"), request("b"))), 0.0)
    core.handle(JobEnded(JOB), 0.0)
    first = core.plan(0.0)
    assert first is not None
    a, b = (row.seq for row in first.rows)
    spent = RowResult(a, (5,), spent_s=0.02, slow_s=0.01)
    core.commit(StepResult(first.step, (spent, RowResult(b, (6,)))), 0.0)
    second = core.plan(0.0)
    ahead = core.plan(0.0) if is_planned_ahead else None
    assert second is not None
    (told,) = core.commit(StepResult(second.step, (RowResult(a, lacks_mask=True), RowResult(b, (7,)))), 0.0).outputs
    core.check()
    assert told.request_id == "b" and core.stats().num_preemptions == 1
    again = core.plan(0.0)
    assert again is not None and a in again.released
    (row,) = (row for row in again.rows if row.seq == a)
    assert row.intro is not None and row.intro.output_tokens == (5,) and row.sample and row.from_step < 0
    assert row.intro.slow_s == 0.01
    core.check()
    if ahead is not None:
        (told,) = core.commit(StepResult(ahead.step, (RowResult(a, lacks_mask=True), RowResult(b, (8,)))), 0.0).outputs
        core.check()
        assert told.request_id == "b"
    rows = tuple(RowResult(row.seq, (9 if row.seq == a else 4,)) for row in again.rows)
    outputs = core.commit(StepResult(again.step, rows), 0.0).outputs
    assert [(each.finish_reason, each.num_output) for each in outputs if each.request_id == "a"] == [("stop", 2)]
    core.check()


def test_a_step_may_fail_that_has_a_row_of_a_sequence_that_was_put_off():
    """The sequence is not failed with it."""
    core = EngineCore(replace(CONFIG, steps_in_flight=2))
    core.handle(Submit((request("a"),)), 0.0)
    core.handle(JobEnded(JOB), 0.0)
    first, ahead = core.plan(0.0), core.plan(0.0)
    assert first is not None and ahead is not None
    core.commit(StepResult(first.step, (RowResult(first.rows[0].seq, lacks_mask=True),)), 0.0)
    assert core.handle(StepFailed(ahead.step, "why"), 0.0).outputs == ()
    core.check()
    assert core.plan(0.0) is not None
