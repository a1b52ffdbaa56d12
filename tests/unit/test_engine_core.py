"""EngineCore by example, driven by hand: plans in flight, finishing, aborting, preemption and failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from tokenmill.core import config as core_config
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work
from tokenmill.core.effects import StepFailed
from tokenmill.core.events import Abort, Drain, ForgetTenants, Output, Submit
from tokenmill.core.request import IDLE_PRIORITY, Request, SamplingParams
from tokenmill.core.speculation import CorpusConfig, SpeculationConfig
from tokenmill.core.step import Drafts, PlanRow, RowResult, StepPlan, StepResult, TokenLogprob
from tokenmill.core.terms import Terms
from tokenmill.engine.core import EngineCore
from tokenmill.engine.speculation import Candidate
from tokenmill.sched.budget import UNMEASURED_CHUNK

CONFIG = EngineConfig(
    groups=full_groups(64), max_model_len=256, block_size=4, max_num_batched_tokens=64, steps_in_flight=2
)
EOS = 99


def make_request(name: str, num_prompt: int, max_tokens: int = 8, *, first: int = 1, **more: object) -> Request:
    """A request whose prompt counts up from `first`; `more` are fields of Request or of SamplingParams."""
    known = {key: more.pop(key) for key in list(more) if key in Request.__dataclass_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **more)
    prompt = tuple(range(first, first + num_prompt))
    return Request(name, prompt, sampling, max_tokens, 0, eos_token_ids=(EOS,), **known)


class Engine:
    """A core and the results it is to be given: row by row, the token that `answer` says (7 by default)."""

    def __init__(self, config: EngineConfig = CONFIG, answer: Callable[[PlanRow], int] = lambda row: 7) -> None:
        self.core = EngineCore(config)
        self.answer = answer
        self.in_flight: deque[StepPlan] = deque()
        self.num_prompt: dict[int, int] = {}
        self.corrupted: set[int] = set()  # sequences whose rows are not finite
        self.errors: dict[int, str] = {}  # of sequences whose rows have one

    def add(self, *requests: Request) -> list[Output]:
        return list(self.core.handle(Submit(requests), 0.0).outputs)

    def abort(self, name: str) -> list[Output]:
        return list(self.core.handle(Abort((name,)), 1.5).outputs)

    def plan(self) -> StepPlan | None:
        plan = self.core.plan(1.0)
        self.core.check()
        if plan is not None:
            self.in_flight.append(plan)
            self.num_prompt |= {row.seq: len(row.intro.prompt_tokens) for row in plan.rows if row.intro is not None}
        return plan

    def commit(self) -> list[Output]:
        plan = self.in_flight.popleft()
        effects = self.core.commit(StepResult(plan.step, tuple(map(self.result, plan.rows))), 2.0)
        self.core.check()
        return list(effects.outputs)

    def result(self, row: PlanRow) -> RowResult:
        end = min(row.start + row.num_tokens, self.num_prompt[row.seq] - 1)
        scores = tuple(TokenLogprob(0, -1.0, 1) for _ in range(row.start, end)) if row.score else ()
        if row.seq in self.corrupted:
            return RowResult(row.seq, is_corrupted=True)
        if row.seq in self.errors:
            return RowResult(row.seq, error=self.errors[row.seq])
        return RowResult(row.seq, (self.answer(row),) if row.sample else (), (), scores)

    def fail(self) -> list[Output]:
        effects = self.core.handle(StepFailed(self.in_flight.popleft().step, "boom"), 2.0)
        self.core.check()
        return list(effects.outputs)

    def step(self) -> tuple[StepPlan, list[Output]]:
        plan = self.plan()
        assert plan is not None and len(self.in_flight) == 1
        return plan, self.commit()

    def finish(self) -> list[Output]:
        """Run until nothing is left; returns all outputs."""
        outputs: list[Output] = []
        for _ in range(1000):
            while self.plan() is not None:
                pass
            if not self.in_flight:
                assert not self.core.has_work, "work is left, but nothing is planned"
                assert self.core.stats().num_held_blocks == 0
                return outputs
            outputs += self.commit()
        raise AssertionError("does not end")


def test_a_request_from_prompt_to_end() -> None:
    """The first row introduces the sequence with its table; decode rows carry one token; the end is max_tokens."""
    engine = Engine()
    engine.add(make_request("a", 6, 3))
    plan, (output,) = engine.step()
    (row,) = plan.rows
    assert (row.start, row.tokens, row.sample, len(row.blocks)) == (0, (1, 2, 3, 4, 5, 6), True, 2)
    assert row.intro is not None and row.intro.prompt_tokens == row.tokens and row.intro.eos_token_ids == (EOS,)
    assert output.tokens == (7,) and output.finish_reason is None and output.timing is not None
    plan, (output,) = engine.step()
    (row,) = plan.rows
    assert (row.start, row.tokens, row.blocks, row.intro) == (6, (7,), (), None)
    plan, (output,) = engine.step()
    assert (output.tokens, output.finish_reason, output.num_output) == ((7,), "length", 3)
    assert output.timing is not None and output.timing.finished_s == 2.0
    assert not engine.core.has_work and engine.plan() is None


def test_steps_planned_ahead_name_the_step_of_their_token() -> None:
    """With a step in flight, the next row's input is that step's draw; nothing is planned past max_tokens."""
    engine = Engine(replace(CONFIG, steps_in_flight=3))
    engine.add(make_request("a", 4, 2))
    first, second = engine.plan(), engine.plan()
    assert first is not None and second is not None
    (row,) = second.rows
    assert (row.tokens, row.from_step, row.start, row.num_tokens, len(row.blocks)) == ((), first.step, 4, 1, 1)
    assert engine.plan() is None
    assert [output.tokens for output in engine.finish()] == [(7,), (7,)]


def test_a_stop_token_ends_and_drops_the_row_in_flight() -> None:
    """The stop token is counted, not shown; the wasted row is ignored, and its blocks wait for its step."""
    engine = Engine(answer=lambda row: EOS)
    engine.add(make_request("a", 3))
    engine.plan(), engine.plan()
    (output,) = engine.commit()
    assert (output.tokens, output.finish_reason, output.stop_token, output.num_output) == ((), "stop", EOS, 1)
    assert engine.core.has_work and engine.core.stats().num_held_blocks == 1
    assert engine.commit() == []
    assert not engine.core.has_work and engine.core.stats().num_free_blocks == CONFIG.groups[0].num_blocks


def test_min_tokens_ignore_eos_and_stop_token_ids() -> None:
    """Stop tokens count from min_tokens on; end tokens do not when ignored, other stop tokens still do."""
    engine = Engine(answer=lambda row: EOS)
    engine.add(make_request("min", 3, 5, min_tokens=2), make_request("ignore", 3, 5, ignore_eos=True))
    engine.add(make_request("both", 3, 5, ignore_eos=True, stop_token_ids=(EOS,)))
    ends = {output.request_id: output for output in engine.finish() if output.finish_reason}
    assert (ends["min"].finish_reason, ends["min"].num_output) == ("stop", 3)
    assert (ends["ignore"].finish_reason, ends["ignore"].num_output) == ("length", 5)
    assert (ends["both"].finish_reason, ends["both"].num_output) == ("stop", 1)


def test_a_resumed_request_counts_from_its_original_prompt() -> None:
    """Output made elsewhere is recomputed as input, introduced as output, and counted by the limits."""
    engine = Engine()
    engine.add(make_request("a", 3, 4, output_tokens=(50, 51)))
    plan, (output,) = engine.step()
    (row,) = plan.rows
    assert row.tokens == (1, 2, 3, 50, 51) and row.intro is not None and row.intro.output_tokens == (50, 51)
    assert output.num_output == 3
    assert engine.finish()[-1].num_output == 4


def test_a_long_prompt_is_chunked_and_decodes_go_on() -> None:
    """A prefill shares the budget with every decode, and its chunks stop at block borders."""
    engine = Engine(replace(CONFIG, max_num_batched_tokens=10, steps_in_flight=1))
    engine.add(make_request("a", 3, 20))
    engine.step()
    engine.add(make_request("b", 30, 2, first=100))
    sizes = []
    for _ in range(4):
        plan, outputs = engine.step()
        assert plan.rows[0].num_tokens == 1 and outputs[0].request_id == "a"
        sizes.append(plan.rows[1].num_tokens)
        assert plan.rows[1].sample == (len(sizes) == 4)
    assert sizes == [8, 8, 8, 6]


def test_the_end_of_a_prompt_joins_a_step() -> None:
    """Chunks leave a ninth of a step to the ends of prompts and to decodes; a short prompt may fill what is left."""
    engine = Engine(replace(CONFIG, max_num_batched_tokens=36, steps_in_flight=1))
    engine.add(make_request("a", 68, 4), make_request("b", 3, 4, first=200, priority=1))
    plans = []
    for _ in range(3):
        plans.append([row.num_tokens for row in engine.step()[0].rows])
    assert plans == [[32, 3], [32, 1], [4, 1]]
    engine.add(make_request("c", 34, 1, first=100))
    assert [row.num_tokens for row in engine.step()[0].rows] == [1, 1, 34]


def test_a_short_prompt_joins_the_step_in_which_a_long_one_is_computed() -> None:
    """It passes long prompts that run and that wait, and what the cache holds of a prompt does not make it long; of
    prompts of one length the first comes first."""
    engine = Engine(replace(CONFIG, groups=full_groups(200), max_num_batched_tokens=32, steps_in_flight=1))
    engine.add(make_request("known", 100, 1))
    engine.finish()
    engine.add(make_request("long", 90, 1, first=300), make_request("next", 90, 1, first=500))
    assert [row.seq for row in engine.step()[0].rows] == [1]
    engine.add(make_request("short", 3, 1, first=700), make_request("again", 102, 1))
    assert [row.seq for row in engine.step()[0].rows] == [4, 3, 1]
    served = [row.seq for _ in range(9) if engine.core.has_work for row in engine.step()[0].rows]
    assert list(dict.fromkeys(served)) == [1, 2]


def test_the_last_to_arrive_gives_its_blocks_up_however_short_its_prompt() -> None:
    """Service goes by length, blocks by arrival: a short prompt that came later never costs a long one its own."""
    engine = Engine(replace(CONFIG, groups=full_groups(12), enable_prefix_caching=False, steps_in_flight=1))
    engine.add(make_request("long", 30, 12))
    engine.step()
    engine.add(make_request("short", 6, 12, first=200))
    rows = [row for _ in range(25) if engine.core.has_work for row in engine.step()[0].rows]
    assert not engine.core.has_work and engine.core.stats().num_preemptions >= 1
    assert [row.seq for row in rows if row.intro is not None] == [1, 1]


def test_a_prefix_is_served_from_the_cache_but_for_the_last_token() -> None:
    """A hit covers at most floor((len - 1) / S) blocks; a different salt shares nothing."""
    engine = Engine()
    engine.add(make_request("a", 8, 1))
    engine.finish()
    engine.add(make_request("b", 8, 1), make_request("c", 9, 1), make_request("d", 9, 1, cache_salt="x"))
    outputs = {output.request_id: output for output in engine.finish()}
    assert [outputs[name].num_cached for name in "bcd"] == [4, 8, 0]


def test_choices_share_the_full_blocks_of_their_prompt_in_one_step() -> None:
    """Siblings that arrive together adopt the leader's blocks in the very step that computes them."""
    engine = Engine()
    engine.add(*(make_request(f"a{i}", 10, 4, choice=i) for i in range(3)))
    plan, _ = engine.step()
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(0, 10), (8, 2), (8, 2)]
    assert len({row.blocks[:2] for row in plan.rows}) == 1 and len({row.blocks[2] for row in plan.rows}) == 3


def test_a_follower_matches_again_at_every_block_border() -> None:
    """A running prefill adopts what another has published since, also when both started together."""
    engine = Engine(replace(CONFIG, max_num_batched_tokens=8, steps_in_flight=1))
    engine.add(make_request("low", 24, 1, priority=1))
    engine.step()
    engine.add(make_request("high", 24, 1))
    plans = []
    while engine.core.has_work:
        plan, _ = engine.step()
        plans.append([(row.seq, row.start, row.num_tokens) for row in plan.rows])
    assert plans == [[(1, 8, 8)], [(1, 16, 8)], [(0, 20, 4)]]


def test_nothing_is_adopted_below_a_private_copy() -> None:
    """Two that computed the same block at once keep apart from there on: a holder of a block holds its parent too."""
    engine = Engine(replace(CONFIG, max_num_batched_tokens=3, steps_in_flight=1))
    engine.add(make_request("low", 14, 1, priority=1))
    engine.step()
    engine.add(make_request("high", 14, 6))
    blocks: dict[int, set[int]] = {0: set(), 1: set()}
    starts: list[int] = []
    while engine.core.has_work:
        plan, _ = engine.step()
        for row in plan.rows:
            blocks[row.seq].update(row.blocks)
            starts += [row.start] if row.seq == 0 else []
    assert starts[:2] == [3, 4] and not blocks[0] & blocks[1]


def test_prompt_logprobs_come_whole_and_take_no_hits() -> None:
    """Every prompt position is scored however the prompt is cut, though the blocks may serve others."""
    engine = Engine(replace(CONFIG, max_num_batched_tokens=8))
    engine.add(make_request("plain", 19, 1))
    engine.finish()
    engine.add(make_request("scored", 19, 2, prompt_logprobs=0), make_request("after", 19, 1))
    outputs = engine.finish()
    scored = [output for output in outputs if output.request_id == "scored"]
    assert [len(output.prompt_logprobs) for output in scored] == [18, 0] and scored[0].num_cached == 0
    assert [output.num_cached for output in outputs if output.request_id == "after"] == [16]


def test_an_aborted_leader_leaves_its_blocks_to_its_followers() -> None:
    """Blocks planned in a step in flight are still written by it, and stay shared."""
    engine = Engine()
    engine.add(make_request("leader", 9, 4), make_request("follower", 9, 1))
    engine.plan()
    (output,) = engine.abort("leader")
    engine.core.check()
    assert output.finish_reason == "abort"
    (output,) = engine.commit()
    assert (output.request_id, output.finish_reason, output.num_cached) == ("follower", "length", 8)
    assert engine.core.stats().num_cached_blocks == 2
    assert engine.abort("leader") == []


def test_blocks_run_out_and_the_worst_ranked_gives_way() -> None:
    """Lowest priority first, then latest arrival; it comes back with its output and everyone ends as alone."""
    engine = Engine(replace(CONFIG, groups=full_groups(8), steps_in_flight=1))
    engine.add(make_request("a", 7, 9), make_request("b", 7, 9, first=50, priority=1))
    engine.add(make_request("c", 7, 9, first=90))
    rows: list[PlanRow] = []
    while engine.core.has_work:
        plan, _ = engine.step()
        rows += plan.rows
    returns = [row for row in rows if row.intro is not None and row.intro.output_tokens]
    assert [row.seq for row in returns] == [1] and engine.core.stats().num_preemptions == 1
    assert returns[0].tokens[:8] == (*range(50, 57), 7)


def test_a_sequence_with_a_row_in_flight_is_not_preempted() -> None:
    """The victim gets no further row, and gives way once its row is committed."""
    engine = Engine(replace(CONFIG, groups=full_groups(5), steps_in_flight=2))
    engine.add(make_request("a", 5, 9), make_request("b", 8, 9, first=50))
    engine.plan()
    for _ in range(3):
        plan = engine.plan()
        assert plan is not None and [row.seq for row in plan.rows] == [0, 1]
        engine.commit()
    assert engine.plan() is None and engine.core.stats().num_preemptions == 0
    engine.commit()
    plan = engine.plan()
    assert plan is not None and [(row.seq, row.start) for row in plan.rows] == [(0, 8)] and plan.released == (1,)
    assert engine.core.stats().num_preemptions == 1
    engine.finish()


def test_a_failed_step_ends_its_requests_and_the_rest_recover() -> None:
    """Rows of the failed step end with an error; later steps in flight are void and their rows come again."""
    engine = Engine(replace(CONFIG, max_num_batched_tokens=8, steps_in_flight=2))
    engine.add(make_request("a", 8, 2), make_request("b", 12, 2))
    first, second = engine.plan(), engine.plan()
    assert first is not None and second is not None
    assert [row.seq for row in first.rows] == [0] and [(row.seq, row.start) for row in second.rows] == [(0, 8), (1, 8)]
    (output,) = engine.fail()
    assert (output.request_id, output.finish_reason, output.error_kind) == ("a", "error", "internal_error")
    assert "boom" in output.error
    again = engine.plan()
    assert again is not None and set(again.released) == {0, 1}
    assert [(row.seq, row.start) for row in again.rows] == [(1, 0)], "adopted blocks were never written"
    assert engine.commit() == [], "the result of a void step is dropped"
    outputs = engine.finish()
    assert [output.request_id for output in outputs] == ["b", "b"] and outputs[-1].finish_reason == "length"


def test_refusals_are_outputs() -> None:
    """A request that cannot be served, or not now, ends at once with a kind of error that says which."""
    engine = Engine(replace(CONFIG, max_num_waiting=1))
    (long,) = engine.add(make_request("long", 300, 1))
    assert (long.finish_reason, long.error_kind, long.error_param) == ("error", "invalid_request_error", "prompt")
    outputs = engine.add(make_request("a", 3), make_request("b", 3))
    assert [(output.request_id, output.error_kind) for output in outputs] == [("b", "overloaded_error")]
    (twice,) = engine.add(make_request("a", 3))
    assert twice.error_kind == "invalid_request_error"
    engine.core.handle(Drain(), 0.0)
    (late,) = engine.add(make_request("late", 3))
    assert late.error_kind == "unavailable_error"
    assert engine.finish()[-1].request_id == "a"


def test_a_waiting_request_can_be_aborted() -> None:
    """It leaves the queue without ever having run."""
    engine = Engine()
    engine.add(make_request("a", 3))
    (output,) = engine.abort("a")
    assert output.finish_reason == "abort" and output.timing is not None and output.timing.scheduled_s == -1.0
    assert engine.plan() is None and not engine.core.has_work


def test_stats_add_up() -> None:
    """Prompt tokens, cache hits and computed tokens of two equal prompts."""
    engine = Engine()
    engine.add(make_request("a", 10, 3), make_request("b", 10, 3))
    engine.finish()
    stats = engine.core.stats()
    assert (stats.prompt_tokens, stats.prompt_tokens_computed, stats.generation_tokens) == (20, 12, 6)
    assert (stats.prefix_queries, stats.prefix_hits) == (20, 8)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks and stats.num_held_blocks == 0


def test_a_corrupted_row_ends_its_sequence_alone() -> None:
    """With steps in flight behind it: an error for one, the other runs on."""
    engine = Engine()
    engine.add(make_request("a", 6, 3), make_request("b", 6, 3, first=30))
    engine.plan(), engine.plan()
    engine.corrupted.add(0)
    error, other = engine.commit()
    assert (error.request_id, error.finish_reason, error.error_kind) == ("a", "error", "internal_error")
    assert "finite" in error.error and not error.tokens and other.tokens == (7,)
    assert [output.request_id for output in engine.finish()] == ["b", "b"]
    assert engine.core.stats().num_corrupted == 1


def test_a_row_with_an_error_ends_its_sequence_alone() -> None:
    """The client hears the error, and what the sequence held stays in the prefix cache."""
    engine = Engine()
    engine.add(make_request("a", 6, 3), make_request("b", 6, 3, first=30))
    engine.plan(), engine.plan()
    engine.errors[0] = "out of fuel"
    error, other = engine.commit()
    assert (error.request_id, error.finish_reason, error.error) == ("a", "error", "out of fuel")
    assert not error.tokens and other.tokens == (7,)
    assert [output.request_id for output in engine.finish()] == ["b", "b"]
    stats = engine.core.stats()
    assert stats.num_corrupted == 0 and stats.num_cached_blocks


def test_what_a_corrupted_sequence_held_is_not_matched_again() -> None:
    """Blocks that it had found in the prefix cache leave that with all below them, and are free."""
    engine = Engine()
    engine.add(make_request("a", 20, 1))
    engine.finish()
    assert engine.core.stats().num_cached_blocks == 5
    engine.corrupted.add(1)
    engine.add(make_request("b", 13, 20))
    plan, (error,) = engine.step()
    assert plan.rows[0].start == 12 and error.finish_reason == "error"
    assert engine.core.stats().num_free_blocks == CONFIG.groups[0].num_blocks
    engine.add(make_request("c", 13, 20))
    plan, _ = engine.step()
    assert plan.rows[0].start == 0


def test_who_shares_blocks_with_a_corrupted_sequence_runs_on() -> None:
    """It publishes them again, and a step that fails afterwards takes back what is still there."""
    engine = Engine()
    engine.add(make_request("a", 16, 20))
    engine.step()
    engine.add(make_request("b", 13, 20))
    plan, _ = engine.step()
    assert [row.start for row in plan.rows] == [16, 12]
    engine.corrupted.add(1)
    engine.step()
    engine.add(make_request("c", 13, 9))
    plan, _ = engine.step()
    assert [row.start for row in plan.rows] == [18, 12]
    engine.plan(), engine.plan()
    engine.corrupted.add(0)
    outputs = engine.commit() + engine.fail() + engine.finish()
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}
    assert ends == {"a": "error", "c": "error"}
    assert engine.core.stats().num_corrupted == 2


def test_idle_work_pauses_while_others_run_and_gives_way_to_them() -> None:
    """Requests of the lowest priority keep their blocks and have no rows, until the other is done; one that needs their
    row takes it; their prompts come in small chunks."""
    config = replace(CONFIG, max_num_seqs=2, max_num_batched_tokens=1024, groups=full_groups(300), max_model_len=1024)
    engine = Engine(config)
    engine.add(
        make_request("x", 600, 4, priority=IDLE_PRIORITY), make_request("y", 4, 4, first=700, priority=IDLE_PRIORITY)
    )
    plan, _ = engine.step()
    assert sum(row.num_tokens for row in plan.rows) <= UNMEASURED_CHUNK
    engine.plan()  # a step of idle work is in flight when another comes
    engine.add(make_request("a", 300, 3, first=800))
    engine.commit()
    plan, _ = engine.step()
    assert [row.num_tokens for row in plan.rows] == [300] and engine.core.stats().num_preemptions == 1
    ended: list[str] = []
    while "a" not in ended:
        plan, outputs = engine.step()
        assert len(plan.rows) == 1
        ended += [output.request_id for output in outputs if output.finish_reason]
    assert ended == ["a"]
    assert {output.request_id for output in engine.finish() if output.finish_reason} == {"x", "y"}


def test_who_is_not_begun_in_time_ends_and_who_is_goes_on() -> None:
    """As a step is planned, by the bound on the wait. Of those that are over no memory is kept."""
    engine = Engine(replace(CONFIG, max_num_seqs=1))
    bound = Terms(queue_s=0.5)
    begun, late = (make_request(name, 4, terms=bound) for name in "ab")
    patient = make_request("c", 4, terms=Terms(queue_s=3.0))
    engine.add(begun, late, patient)
    engine.core.plan(0.2)
    engine.core.plan(1.0)
    (output,) = engine.core.take_effects().outputs
    assert (output.request_id, output.finish_reason, output.error_kind) == ("b", "error", "overloaded_error")
    assert engine.core.open_ids == ("a", "c") and engine.core.stats().num_expired == 1
    for number in range(1000):
        engine.add(make_request(f"r{number}", 4, terms=Terms(queue_s=1e6)))
        engine.abort(f"r{number}")
    assert len(engine.core.state.deadlines) < 80


def proposed(*tokens: int) -> Drafts:
    return Drafts(tokens, "test", (1.0,) * len(tokens))


def drafted(request: Request, *drawn: RowResult, config: EngineConfig = CONFIG) -> tuple[Engine, list[Output]]:
    """An engine with one step in flight that serves `request` by these results, and the last step's outputs."""
    engine = Engine(replace(config, steps_in_flight=1, speculation=SpeculationConfig()))
    assert engine.core.state.speculation is not None
    engine.core.state.speculation.choose = lambda rows, *_: [min(each.room, 5) for each in rows]  # type: ignore
    engine.add(request)
    outputs: list[Output] = []
    for result in drawn:
        plan = engine.plan()
        assert plan is not None
        engine.in_flight.clear()
        outputs = list(engine.core.commit(StepResult(plan.step, (result,)), 2.0).outputs)
        engine.core.check()
    return engine, outputs


def test_drafts_that_are_accepted_come_out_together() -> None:
    """Proposed tokens are in the next row; of them, those that were right are output with the token after them and
    their log probabilities, and the next row begins behind them."""
    first, scores = RowResult(0, (7,), drafts=proposed(8, 9)), tuple(TokenLogprob(token, -1.0, 1) for token in (8, 3))
    engine, outputs = drafted(make_request("a", 4), first, RowResult(0, (8, 3), scores))
    assert [(each.tokens, each.logprobs, each.num_output) for each in outputs] == [((8, 3), scores, 3)]
    assert [each.draft_steps for each in outputs] == [((2, 1),)]
    plan = engine.plan()
    assert plan is not None and plan.rows == (PlanRow(0, 6, (3,), sample=True),)
    stats = engine.core.stats()
    assert stats.generation_tokens == 3
    assert (stats.num_drafts, stats.num_draft_tokens, stats.accepted_per_pos) == (1, 2, (1,))


def test_drafts_are_shared_within_a_tenant_and_salt() -> None:
    """A worker is told which sequences may have drafts of one another's outputs: no two pairs of tenant and salt are
    mistaken for each other."""
    pairs = [("", ""), ("ann", ""), ("", "ann"), ("an", "n"), ("1:a", ""), ("ann", "x"), ("ann", "x")]
    engine = Engine(replace(CONFIG, speculation=SpeculationConfig()))
    for number, (tenant, salt) in enumerate(pairs):
        engine.add(make_request(f"r{number}", 4, terms=Terms(tenant=tenant), cache_salt=salt))
    plan = engine.plan()
    assert plan is not None
    scopes = {row.seq: row.intro.draft_scope for row in plan.rows if row.intro is not None}
    assert len(scopes) == len(pairs) and len(set(scopes.values())) == len(set(pairs))
    assert scopes[5] == scopes[6] and scopes[0] == ""


def test_deleted_tenants_are_forgotten_where_something_drafts() -> None:
    event = ForgetTenants(("ann",))
    for speculation, jobs in ((SpeculationConfig(), (event,)), (None, ())):
        engine = Engine(replace(CONFIG, speculation=speculation))
        assert tuple(engine.core.handle(event, 0.0).jobs) == jobs


def test_a_corpus_is_for_the_tenants_that_it_is_given_to() -> None:
    """And for all only if that is said: a worker is told for each sequence which corpora it may have drafts of."""
    corpora = (
        CorpusConfig("a", ("ann", "1")),
        CorpusConfig("b", None),
        CorpusConfig("c", ("bob",)),
    )
    engine = Engine(replace(CONFIG, speculation=SpeculationConfig(corpora=corpora)))
    callers = {"ann": (0, 1), "bob": (1, 2), "an": (1,), "ann,1": (1,), "": (1,)}
    for number, tenant in enumerate(callers):
        engine.add(make_request(f"r{number}", 4, terms=Terms(tenant=tenant), cache_salt="ann"))
    plan = engine.plan()
    assert plan is not None
    assert [row.intro.corpora for row in plan.rows if row.intro is not None] == [*callers.values()]


def test_drafts_are_given_room_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes those that fit the last block, and one more if that is to spare, and the answer's length; a step
    those that fit its budget and the worker's logits. A block that was taken too early is the sequence's next one."""
    first = RowResult(0, (7,), drafts=proposed(1, 2, 3, 4, 5))
    for num_blocks, num_drafts in ((3, 3), (4, 5)):
        engine, _ = drafted(make_request("a", 4), first, config=replace(CONFIG, groups=full_groups(num_blocks)))
        plan = engine.plan()
        assert plan is not None and [(row.start, row.drafts) for row in plan.rows] == [
            (4, (1, 2, 3, 4, 5)[:num_drafts])
        ]
    engine, _ = drafted(make_request("a", 4), first, *[RowResult(0, (token,)) for token in (9, 8, 7, 6)])
    (seq,) = engine.core.state.running
    plan = engine.plan()
    assert plan is not None and [(row.start, row.blocks) for row in plan.rows] == [(8, ())] and len(seq.tables[0]) == 3
    engine, _ = drafted(make_request("a", 4, 3), RowResult(0, (7,), drafts=proposed(1, 2, 3, 4, 5)))
    plan = engine.plan()
    assert plan is not None and [row.drafts for row in plan.rows] == [(1,)]
    found: list[int] = []

    def choose(rows: list[Candidate], work: Work, costs: Costs, most: int) -> list[int]:
        found.append(most)
        return [0 for _ in rows]

    for most_drafts in (2, 1000):
        monkeypatch.setattr(core_config, "MOST_DRAFTS", most_drafts)
        engine, _ = drafted(make_request("a", 4), RowResult(0, (7,), drafts=proposed(1, 2, 3, 4, 5)))
        assert engine.core.state.speculation is not None
        engine.core.state.speculation.choose = choose  # type: ignore
        assert engine.plan() is not None
    assert found == [2, CONFIG.max_num_batched_tokens - 1]


def test_an_answer_ends_inside_what_was_accepted() -> None:
    """At a stop token, which is left out, and at max_tokens; what was drawn after it is dropped."""
    first = RowResult(0, (7,), drafts=proposed(8, EOS, 9))
    _, outputs = drafted(make_request("a", 4), first, RowResult(0, (8, EOS, 9, 9)))
    assert [(each.tokens, each.finish_reason, each.stop_token, each.num_output) for each in outputs] == [
        ((8,), "stop", EOS, 3)
    ]
    assert outputs[0].draft_steps == ((3, 1),)
    _, outputs = drafted(make_request("a", 4, 3), first, RowResult(0, (8, 5, 6)))
    assert [(each.tokens, each.finish_reason, each.num_output) for each in outputs] == [((8, 5), "length", 3)]
