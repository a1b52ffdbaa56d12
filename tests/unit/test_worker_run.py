"""Steps on a tiny real model: the worker built as the product builds it, on the numpy backend."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

import numpy as np
import pytest

from tiny import VOCAB_SIZE, tensor, tiny_checkpoint, tiny_config
from tiny_moe import moe_config
from tokenmill.core.block import KVGroup, full_groups
from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.ops.api import Routing, StepLimits
from tokenmill.ops.kv_pool import HostPool
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.memory import LOGITS_BYTES, HeldBytes, plan_memory, step_limits
from workers import build_worker

GREEDY = SamplingParams(temperature=0)
native = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture
def make_worker(monkeypatch):
    """Workers over the tiny model, closed at the end. The digest is of a file, and the tiny model has none."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: f"digest of {path}")
    made = []

    def make(checkpoint=None, ops=None, **options):
        options = {"max_model_len": 128, "groups": full_groups(32), "block_size": 8, "kv_dtype": "f32"} | options
        made.append(build_worker(checkpoint or tiny_checkpoint(), ops or ReferenceOps(), **options))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


def _prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist())


def _intro(prompt, params=GREEDY, output=()) -> Introduction:
    return Introduction(tuple(prompt), tuple(output), params, 11, 0, ())


def _generate(worker, prompt, count, params=GREEDY, blocks=range(16), seq=0) -> list:
    """Results of the only row of each step: the whole prompt, then each drawn token fed back."""
    execute = worker.executor.execute_now
    row = PlanRow(seq, 0, tuple(prompt), blocks=tuple(blocks), intro=_intro(prompt, params), sample=True)
    results = [execute(StepPlan(0, (row,))).rows[0]]
    for step in range(1, count):
        row = PlanRow(seq, len(prompt) + step - 1, (), from_step=step - 1, sample=True)
        results.append(execute(StepPlan(step, (row,))).rows[0])
    return results


def _tokens(results) -> list[int]:
    return [token for result in results for token in result.tokens]


def test_chunks_shared_blocks_and_growing_tables_change_nothing(make_worker):
    """A prompt in chunks with blocks handed over as needed, beside another sequence that reads its first block, draws
    the same tokens as whole runs."""
    worker = make_worker()
    prompt = _prompt(21)
    other = prompt[:8] + _prompt(9, seed=1)
    expected, expected_other = _tokens(_generate(worker, prompt, 4)), _tokens(_generate(worker, other, 3))
    execute = worker.executor.execute_now
    steps = [
        # The second row starts behind the block that the first row of this same step writes.
        (
            PlanRow(5, 0, prompt[:12], blocks=(3, 9), intro=_intro(prompt)),
            PlanRow(6, 8, other[8:], blocks=(3, 17, 20), intro=_intro(other), sample=True),
        ),
        (PlanRow(5, 12, prompt[12:], blocks=(1,), sample=True), PlanRow(6, 17, (), from_step=10, sample=True)),
        (PlanRow(6, 18, (), from_step=11, sample=True), PlanRow(5, 21, (), from_step=11, sample=True)),
        (PlanRow(5, 22, (), from_step=12, sample=True),),
        (PlanRow(5, 23, (), from_step=13, sample=True),),
    ]
    drawn = {5: [], 6: []}
    for number, rows in enumerate(steps):
        result = execute(StepPlan(10 + number, rows))
        assert result.step == 10 + number and [r.seq for r in result.rows] == [r.seq for r in rows]
        for row in result.rows:
            drawn[row.seq] += row.tokens
    assert drawn == {5: expected, 6: expected_other}


def test_carrying_steps_on_changes_nothing(make_worker):
    """Steps made from the step before (one token on for every row, over block borders, with rows drawn in different
    ways, one of them twice) give what steps made anew give, and so does a row that sits out for a while."""
    settings = [
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=2),
        SamplingParams(temperature=0, frequency_penalty=1.5, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, min_p=0.02),
    ]
    prompts = [_prompt(6, seed=1), _prompt(15, seed=2), _prompt(9, seed=3)]
    tables = [range(10 * seq, 10 * seq + 9) for seq in range(3)]
    outcomes = []
    for anew in (False, True):
        worker = make_worker()
        runner = worker.executor._runner
        carried, results = 0, []
        ends, held, last = [0] * 3, [0] * 3, [-1] * 3
        for step in range(30):
            rows = []
            for seq, (prompt, params) in enumerate(zip(prompts, settings, strict=True)):
                if seq == 2 and 10 <= step < 13:
                    continue
                first = step == 0
                ends[seq] += len(prompt) if first else 1
                missing = tables[seq][held[seq] : -(-ends[seq] // 8)]
                held[seq] += len(missing)
                intro = _intro(prompt, params) if first else None
                tokens, start = (prompt, 0) if first else ((), ends[seq] - 1)
                rows.append(PlanRow(seq, start, tokens, -1 if first else last[seq], tuple(missing), intro, sample=True))
                last[seq] = step
            if anew and runner._latest is not None:
                runner._latest.ends = None  # as if not all of its rows had drawn
            prepared = runner.prepare(StepPlan(step, tuple(rows)))
            carried += prepared.is_carried
            prepared.work()
            results.append(runner.collect(prepared, 0.0).rows)
        assert carried == (0 if anew else 27)
        outcomes.append(results)
    assert outcomes[0] == outcomes[1]


def test_drafts_are_accepted_up_to_the_first_that_is_wrong(make_worker):
    """A row gives the right drafts and one token more, each with its logprobs, also where it is cut into several calls;
    the next row goes on over what was written for the others. Penalties count the drafts before a draw."""
    params = SamplingParams(temperature=0.8, frequency_penalty=0.7, repetition_penalty=1.3, logprobs=1)
    prompt = _prompt(17)
    single = _generate(make_worker(), prompt, 7, params)
    tokens, entries = _tokens(single), [entry for result in single for entry in result.logprobs]
    wrong = (tokens[3] + 1) % VOCAB_SIZE
    worker = make_worker(max_num_seqs=2)
    rows = [
        PlanRow(0, 0, prompt, blocks=tuple(range(8)), intro=_intro(prompt, params), sample=True),
        PlanRow(0, 17, (tokens[0],), sample=True, drafts=(*tokens[1:3], wrong, 5)),
        PlanRow(0, 20, (tokens[3],), sample=True, drafts=(*tokens[4:6],)),
    ]
    beside = [PlanRow(1, 0, prompt, blocks=tuple(range(8, 12)), intro=_intro(prompt), sample=True)]
    beside += [PlanRow(1, 17, (9,), sample=True, drafts=(1, 2, 3, 4, 5, 6))] * 2
    assert _limits(worker).max_logit_rows == 16
    worker.executor._runner._limits = dataclasses.replace(_limits(worker), max_logit_rows=8)
    found = [
        worker.executor.execute_now(StepPlan(n, pair)).rows[0] for n, pair in enumerate(zip(rows, beside, strict=True))
    ]
    assert [result.tokens for result in found] == [(tokens[0],), tuple(tokens[1:4]), tuple(tokens[4:7])]
    got = [entry for result in found for entry in result.logprobs]
    assert [(e.token, e.rank) for e in got] == [(e.token, e.rank) for e in entries]
    np.testing.assert_allclose([e.logprob for e in got], [e.logprob for e in entries], atol=1e-4)


def test_a_draw_without_a_token_ends_what_a_row_gives(make_worker):
    """The logits behind an accepted draft are not finite: the row gives the tokens before, and the next one fails."""
    prompt = _prompt(9)
    checkpoint = tiny_checkpoint()
    broken = _tokens(_generate(make_worker(checkpoint), prompt, 1))[0]
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    values = np.frombuffer(embedding.data, np.float32).reshape(embedding.shape).copy()
    values[broken] = np.nan
    checkpoint.tensors[embedding.name] = tensor(embedding.name, values)
    worker = make_worker(checkpoint)
    intro = _intro(prompt)
    rows = [
        PlanRow(0, 0, prompt[:-1], blocks=(0, 1), intro=intro),
        PlanRow(0, 8, prompt[-1:], sample=True, drafts=(broken, 3)),
        PlanRow(0, 9, (broken,), sample=True, drafts=(3,)),
    ]
    found = [worker.executor.execute_now(StepPlan(n, (row,))).rows[0] for n, row in enumerate(rows)]
    assert found[1].tokens == (broken,) and not found[1].is_corrupted
    assert found[2].is_corrupted and not found[2].tokens


def test_resumed_sequence_continues(make_worker):
    """Released and introduced again with its outputs (sampled, with penalties), a sequence draws on as before."""
    worker = make_worker()
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=2)
    prompt = _prompt(10)
    whole = _generate(worker, prompt, 8, params)
    output = tuple(_tokens(whole[:5]))
    row = PlanRow(0, 0, prompt + output, blocks=(20, 21), intro=_intro(prompt, params, output), sample=True)
    resumed = worker.executor.execute_now(StepPlan(100, (row,), released=(0,))).rows[0]
    assert resumed.tokens == whole[5].tokens
    assert resumed.logprobs[0].top[0][0] == whole[5].logprobs[0].top[0][0]


def test_prompt_logprobs_in_pieces(make_worker, monkeypatch):
    """Scores of every known prompt token do not depend on chunks nor on how few logit rows fit at once."""
    params = SamplingParams(temperature=0, prompt_logprobs=3, logprobs=1)
    prompt = _prompt(40)
    row = PlanRow(0, 0, prompt, blocks=tuple(range(5)), intro=_intro(prompt, params), sample=True, score=True)
    whole = make_worker(max_num_seqs=64).executor.execute_now(StepPlan(0, (row,))).rows[0]
    assert [entry.token for entry in whole.prompt_logprobs] == list(prompt[1:])
    assert all(len(entry.top) == 3 for entry in whole.prompt_logprobs)

    small = make_worker(max_num_seqs=2)
    assert _limits(small).max_logit_rows < len(prompt)
    beside = PlanRow(1, 0, prompt[:3], blocks=(9,), intro=_intro(prompt[:3]), sample=True)
    got = small.executor.execute_now(StepPlan(0, (beside, row))).rows[1]
    chunks = [row._replace(tokens=prompt[:13], sample=False)]
    chunks.append(PlanRow(0, 13, prompt[13:], sample=True, score=True))
    parts = [small.executor.execute_now(StepPlan(n + 1, (chunk,))).rows[0] for n, chunk in enumerate(chunks)]
    joined = parts[1]._replace(prompt_logprobs=parts[0].prompt_logprobs + parts[1].prompt_logprobs)
    for other in (got, joined):
        assert other.tokens == whole.tokens
        assert [(e.token, e.rank) for e in other.prompt_logprobs] == [(e.token, e.rank) for e in whole.prompt_logprobs]
        close = [e.logprob for e in whole.prompt_logprobs]
        np.testing.assert_allclose([e.logprob for e in other.prompt_logprobs], close, atol=1e-4)


def _limits(worker):
    return worker.executor._runner._limits


def test_empty_steps_and_rows_that_want_nothing(make_worker):
    """A plan without rows is legal; a chunk in mid-prompt returns an empty result."""
    execute = make_worker().executor.execute_now
    assert execute(StepPlan(3, ())).rows == ()
    prompt = _prompt(9)
    (row,) = execute(StepPlan(4, (PlanRow(2, 0, prompt[:8], blocks=(1,), intro=_intro(prompt)),))).rows
    assert (row.seq, row.tokens, row.logprobs, row.prompt_logprobs) == (2, (), (), ())


def test_steps_overlap_in_order(make_worker):
    """Steps submitted together run in order: each reads what the one before drew."""
    worker = make_worker()
    prompt = _prompt(6)
    expected = _tokens(_generate(worker, prompt, 5))
    first = PlanRow(1, 0, prompt, blocks=(8, 9), intro=_intro(prompt), sample=True)
    plans = [StepPlan(50, (first,))]
    plans += [StepPlan(50 + n, (PlanRow(1, 5 + n, (), from_step=49 + n, sample=True),)) for n in range(1, 5)]

    async def run():
        return await asyncio.gather(*[worker.executor.execute(plan) for plan in plans])

    assert [result.rows[0].tokens[0] for result in asyncio.run(run())] == expected


@native
def test_steps_that_follow_one_another_give_what_single_ones_do(make_worker):
    """On the native backend plain steps are single calls. Between them come steps that need more (logprobs), a step
    that is refused, and another event loop; the order of all stays."""
    prompt, other = _prompt(6), _prompt(9, seed=4)
    ops = NativeOps(2)
    expected = _tokens(_generate(make_worker(ops=ops), prompt, 12))
    params = SamplingParams(temperature=0, logprobs=1)
    expected_other = _tokens(_generate(make_worker(ops=ops), other, 3, params))
    worker = make_worker(ops=ops)
    execute = worker.executor.execute
    row = PlanRow(1, 0, prompt, blocks=(8, 9, 10), intro=_intro(prompt), sample=True)
    first = PlanRow(2, 0, other, blocks=(1, 2), intro=_intro(other, params), sample=True)

    def steps(begin, end):
        return [execute(StepPlan(n, (PlanRow(1, 5 + n, (), from_step=n - 1, sample=True),))) for n in range(begin, end)]

    async def run():
        plain = [execute(StepPlan(0, (row,))), *steps(1, 4)]
        both = execute(StepPlan(4, (PlanRow(1, 9, (), from_step=3, sample=True), first)))
        with pytest.raises(KeyError):
            await execute(StepPlan(5, (PlanRow(77, 3, (), from_step=0, sample=True),)))
        found = [*await asyncio.gather(*plain), await both]
        second = await execute(StepPlan(5, (PlanRow(2, 9, (), from_step=4, sample=True),)))
        third = await execute(StepPlan(6, (PlanRow(2, 10, (), from_step=5, sample=True),)))
        return found, second, third

    async def go_on():
        later = execute(StepPlan(7, (PlanRow(1, 10, (), from_step=4, sample=True),)))
        rows = [PlanRow(1, 3 + n, (), from_step=n - 1, sample=True) for n in range(8, 14)]
        futures = [later, *(execute(StepPlan(8 + place, (each,))) for place, each in enumerate(rows))]
        futures[3].cancel()
        return await asyncio.gather(*futures, return_exceptions=True)

    found, second, third = asyncio.run(run())
    assert [result.rows[0].tokens[0] for result in found] == expected[:5]
    assert [found[4].rows[1].tokens[0], second.rows[0].tokens[0], third.rows[0].tokens[0]] == expected_other
    rest = asyncio.run(go_on())
    assert isinstance(rest.pop(3), asyncio.CancelledError), "it ran all the same"
    assert [result.rows[0].tokens[0] for result in rest] == [*expected[5:8], *expected[9:12]]
    assert all(result.duration_s > 0 for result in rest)
    worker.executor.close()
    ops.close()


class Held:
    """A worker whose queue waits for `gate`, so that no step has begun when the next one is submitted."""

    def __init__(self, make_worker):
        self.expected = _tokens(_generate(make_worker(ops=NativeOps(1)), _prompt(6), 8))
        self.executor = make_worker(ops=NativeOps(1)).executor
        self.gate = threading.Event()

    def hold(self):
        self.executor._queue.submit(self.gate.wait, lambda ticket: None)

    def first(self):
        row = PlanRow(1, 0, _prompt(6), blocks=(8, 9, 10), intro=_intro(_prompt(6)), sample=True)
        return self.executor.execute(StepPlan(0, (row,)))

    def steps(self, begin, end):
        rows = [PlanRow(1, 5 + n, (), from_step=n - 1, sample=True) for n in range(begin, end)]
        return [self.executor.execute(StepPlan(n, (row,))) for n, row in enumerate(rows, begin)]


@native
def test_steps_of_all_kinds_keep_their_order(make_worker):
    """Single calls, and between them a step that does more."""
    subject = Held(make_worker)
    params = SamplingParams(temperature=0, logprobs=1)

    async def run():
        subject.hold()
        futures = [subject.first(), *subject.steps(1, 4)]
        beside = PlanRow(2, 0, _prompt(9), blocks=(1, 2), intro=_intro(_prompt(9), params), sample=True)
        futures.append(subject.executor.execute(StepPlan(4, (PlanRow(1, 9, (), from_step=3, sample=True), beside))))
        futures += subject.steps(5, 8)
        subject.gate.set()
        return await asyncio.gather(*futures)

    assert [result.rows[0].tokens[0] for result in asyncio.run(run())] == subject.expected


@native
def test_a_step_behind_one_of_another_loop_ends_in_its_own(make_worker):
    subject = Held(make_worker)

    async def begin():
        subject.hold()
        subject.first()

    async def go_on():
        (future,) = subject.steps(1, 2)
        subject.gate.set()
        return await asyncio.wait_for(future, 20)

    asyncio.run(begin())
    assert asyncio.run(go_on()).rows[0].tokens[0] == subject.expected[1]


@native
def test_closing_settles_steps_whose_ends_nobody_has_read(make_worker):
    """What has begun gives its result, what has not fails."""
    subject = Held(make_worker)

    async def run():
        futures = [subject.first(), *subject.steps(1, 4)]
        subject.executor._queue.run(lambda: None)
        subject.hold()
        dropped = subject.steps(4, 6)
        subject.gate.set()
        subject.executor.close()
        return [future.result().rows[0].tokens[0] for future in futures], dropped

    done, dropped = asyncio.run(run())
    assert done == subject.expected[:4]
    assert all(future.done() for future in dropped)
    assert "closed before it began" in str(dropped[-1].exception()) or dropped[-1].result()


def test_a_failed_step_raises_and_the_next_one_runs(make_worker):
    """An impossible plan raises where it was awaited; later good plans are not affected."""
    worker = make_worker()
    prompt = _prompt(6)
    bad = PlanRow(9, 0, (VOCAB_SIZE,), blocks=(8,), intro=_intro((VOCAB_SIZE,)), sample=True)

    async def run():
        with pytest.raises(AssertionError, match="beyond the vocabulary"):
            await worker.executor.execute(StepPlan(0, (bad,)))
        with pytest.raises(KeyError):
            await worker.executor.execute(StepPlan(1, (PlanRow(77, 3, (), from_step=0, sample=True),)))

    asyncio.run(run())
    assert len(_tokens(_generate(worker, prompt, 3))) == 3


def test_memory_is_committed_ahead_while_there_is_nothing_to_compute(make_worker, monkeypatch):
    """Piece after piece until there is nothing more to do, up from the highest block that was used."""
    asked: list[int] = []
    done = threading.Event()

    def commit_ahead(pool, num_used):
        asked.append(num_used)
        if len(asked) == 3:
            done.set()
        return len(asked) < 3

    monkeypatch.setattr(HostPool, "commit_ahead", commit_ahead)
    worker = make_worker()
    _generate(worker, _prompt(5), 1, blocks=(9, 4))
    assert done.wait(30)
    worker.executor.close()
    assert asked == [10, 10, 10]


def test_close_is_final_and_repeatable(make_worker):
    """After close no step runs, and closing again is harmless."""
    worker = make_worker()
    worker.executor.close()
    worker.executor.close()
    with pytest.raises(RuntimeError):
        worker.executor.execute_now(StepPlan(0, ()))


def _config(**changes):
    return dataclasses.replace(tiny_config(), **changes)


def test_memory_plan(make_worker):
    """The plan's parts are what was asked for and packed, and its lines show the sum."""
    worker = make_worker(queue_bytes=12345)
    plan, (group,) = worker.memory, worker.kv_groups
    assert plan.kv == 32 * group.bytes_per_block and plan.queue == 12345
    assert plan.weights >= sum(t.num_values * 4 for t in tiny_checkpoint().tensors.values())
    assert plan.total == plan.weights + plan.kv + plan.scratch + plan.logits + plan.queue + plan.grammars
    assert "32 blocks, 256 tokens" in "\n".join(plan.lines()) and "in all" in plan.lines()[-1]


def test_logit_rows_are_bounded():
    """Few sequences need few rows, and drafts some more; a large vocabulary is held to the buffer's aim, with some rows
    at least, and with those of a row that has all drafts."""
    config = _config(vocab_size=1000)
    shape = {"max_model_len": 100, "max_num_batched_tokens": 512, "block_size": 16}
    assert step_limits(config, max_num_seqs=256, **shape).max_logit_rows == 256
    assert step_limits(config, max_num_seqs=1, **shape).max_logit_rows == 16
    assert step_limits(config, max_num_seqs=256, **shape).max_blocks_per_seq == 7
    huge = step_limits(_config(vocab_size=256_000), max_num_seqs=256, **shape).max_logit_rows
    assert huge >= 16 and huge * 256_000 * 4 <= LOGITS_BYTES
    assert step_limits(config, max_num_seqs=8, num_drafts=64, **shape).max_logit_rows == 16 + 64
    assert step_limits(_config(vocab_size=10**6), max_num_seqs=8, num_drafts=64, **shape).max_logit_rows == 1 + 64


def test_numerics_id(make_worker, monkeypatch):
    """Weights, the forward pass, KV dtype, block size, kernel family and RoPE are in it; batch and pool are not."""
    base = make_worker().config.numerics_id
    assert (
        make_worker(
            groups=full_groups(40), max_num_seqs=3, max_num_batched_tokens=64, max_model_len=64
        ).config.numerics_id
        == base
    )
    other_rope = tiny_checkpoint()
    other_rope.metadata["rope_parameters"] = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    other_weights = tiny_checkpoint(kind="gguf")
    others = [
        make_worker(kv_dtype="f16"),
        make_worker(kv_dtype="int8"),
        make_worker(block_size=16),
        make_worker(ops=ReferenceOps(exact_activations=True)),
        make_worker(other_rope),
        make_worker(other_weights),
    ]
    with monkeypatch.context() as release:
        release.setattr("tokenmill.worker.build.FORWARD", "forward-of-another-release")
        others.append(make_worker())
    others.append(make_worker(kv_dtype="bf16"))
    monkeypatch.setattr("tokenmill.worker.build.ROTATED", "as they are")
    monkeypatch.setattr("tokenmill.worker.build.PAIRS", "as float32")
    others += [make_worker(kv_dtype="int8"), make_worker(kv_dtype="bf16")]
    assert len({base, *(worker.config.numerics_id for worker in others)}) == 11
    assert make_worker().config.numerics_id == base, "of int8 and bf16 KV alone"


def test_a_mixture_is_planned_for_every_row_at_one_expert():
    """Where the backend cannot tell, scratch grows with the experts of a row, and with shared ones."""
    shape = StepLimits(max_tokens=512, max_seqs=1, max_blocks_per_seq=1, max_logit_rows=16)
    group = KVGroup("full", 3, 2, 16, 16, "f16")

    def scratch(config):
        return plan_memory(config, [group], shape, HeldBytes(weights=0), sizes=[1], program_bytes=None).scratch

    few, many = (scratch(moe_config(Routing(8, top_k))) for top_k in (3, 6))
    assert many - few == 512 * 4 * 3 * (2 + 3 * 32 + 64)
    assert scratch(moe_config(Routing(8, 6), shared_width=64)) - many == 512 * 4 * 3 * 64
