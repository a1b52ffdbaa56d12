"""Draws inside a compiled forward: tokens go into slots and come out of them, and the tokens are those of `sample`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from ops_cases import raw_tensor

from tokenmill.ops.api import Draws, SampleBatch, StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps

NUM_TOKENS, NUM_SLOTS, VOCAB = 6, 9, 200
native = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(params=["numpy", pytest.param("native", marks=native)])
def ops(request):
    made = ReferenceOps() if request.param == "numpy" else NativeOps(2)
    yield made
    made.close()


@pytest.fixture
def ops_of_two_threads():
    made = NativeOps(2)
    yield made
    made.close()


def _program(ops):
    """Logits that depend on the token alone."""
    rng = np.random.default_rng(3)
    table, head = (ops.pack([raw_tensor(rng, "f32", rows, 32)]) for rows in (VOCAB, VOCAB))

    def forward(ops, batch):
        return ops.linear(ops.gather_rows(ops.embed(table, batch.tokens_T), batch.logit_rows_L), head)

    return ops.compile(forward, StepLimits(NUM_TOKENS, NUM_TOKENS, 1, NUM_TOKENS))


def _batch(tokens: list[int], logit_rows: list[int]) -> StepBatch:
    count = len(tokens)
    return StepBatch(
        tokens_T=np.array(tokens, np.int32),
        positions_T=np.zeros(count, np.int32),
        row_starts_S1=np.arange(count + 1, dtype=np.int32),
        context_lens_S=np.ones(count, np.int32),
        block_tables_SB=np.zeros((count, 1), np.int32),
        logit_rows_L=np.array(logit_rows, np.int32),
    )


def _draws(slots: list[int], drawn: np.ndarray) -> Draws:
    """Greedy and random rows in turn."""
    count = len(slots)
    how = SampleBatch(
        temperature_L=np.array([0.0, 1.0] * count, np.float32)[:count],
        top_k_L=np.full(count, 50, np.int32),
        top_p_L=np.full(count, 0.9, np.float32),
        min_p_L=np.zeros(count, np.float32),
        seed_L=np.arange(count, dtype=np.uint64),
        choice_L=np.zeros(count, np.int32),
        position_L=np.arange(count, dtype=np.int32),
    )
    return Draws(how, np.array(slots, np.int32), np.full(count, -7, np.int32), drawn)


def test_tokens_come_out_of_slots_and_go_into_them(ops):
    """The last rows of logits draw; a token id below 0 is what lay in its slot when the call began."""
    program = _program(ops)
    drawn = np.arange(100, 100 + NUM_SLOTS).astype(np.int32)
    draws = _draws([2, 5, 0], drawn)
    logits = program(_batch([7, ~5, 9, ~2], [0, 1, 2, 3]), draws).copy()
    assert np.array_equal(logits, program(_batch([7, 105, 9, 102], [0, 1, 2, 3])))
    assert np.array_equal(draws.tokens_L, ops.sample(logits[1:], draws.how))
    assert drawn[[2, 5, 0]].tolist() == draws.tokens_L.tolist()
    assert drawn[[1, 3, 4, 6, 7, 8]].tolist() == [101, 103, 104, 106, 107, 108]


def test_a_call_bound_before_the_one_it_waits_for_has_run(ops):
    """Two calls are bound, then made: the second takes the tokens that the first draws."""
    program = _program(ops)
    drawn = np.zeros(NUM_SLOTS, np.int32)
    first, second = _draws([4, 3], drawn), _draws([4, 3], drawn)
    calls = [program.bind(_batch([8, 9], [0, 1]), first), program.bind(_batch([~4, ~3], [0, 1]), second)]
    logits = [call().copy() for call in calls]
    assert np.array_equal(logits[1], program(_batch(first.tokens_L.tolist(), [0, 1])))
    assert drawn[[4, 3]].tolist() == second.tokens_L.tolist()


@native
def test_bad_draws_are_refused_untouched():
    ops = NativeOps(1)
    program = _program(ops)
    drawn = np.zeros(NUM_SLOTS, np.int32)
    good = _draws([1, 2], drawn)
    cases = [
        (_batch([3, 4], [0, 1]), replace(good, slots_L=np.array([1, NUM_SLOTS], np.int32)), "draw's slot"),
        (_batch([3, ~NUM_SLOTS], [0, 1]), good, "token's slot"),
        (_batch([3, 4], [1]), good, "more draws than rows"),
        (_batch([3, ~1], [0, 1]), None, "token id out of range"),
    ]
    for batch, draws, message in cases:
        with pytest.raises(AssertionError, match=message):
            program(batch, draws)
        assert not drawn.any() and (good.tokens_L == -7).all()
    ops.close()


@native
def test_calls_in_a_queue_follow_one_another(ops_of_two_threads):
    """Each takes what the one before drew; one that is refused stops none; all are told of, in order."""
    program = _program(ops_of_two_threads)
    drawn = np.zeros(NUM_SLOTS, np.int32)
    draws = [_draws([4, 3], drawn) for _ in range(5)]
    tokens = [[8, 9], *[[~4, ~3]] * 4]
    tokens[2] = [3, ~NUM_SLOTS]
    calls = [program.bind(_batch(given, [0, 1]), draw) for given, draw in zip(tokens, draws, strict=True)]
    queue = ops_of_two_threads.open_queue(lambda: False)

    async def run():
        told, last = [], asyncio.Event()
        for call in calls:
            queue.submit(call, told.append)
        queue.submit(int, lambda ticket: last.set())
        await asyncio.wait_for(last.wait(), 20)
        return told

    told = asyncio.run(run())
    queue.close()
    assert [ticket.work for ticket in told] == calls
    with pytest.raises(AssertionError, match="token's slot"):
        told[2].outcome()
    assert (draws[2].tokens_L == -7).all()
    assert all(ticket.began_s <= ticket.ended_s for ticket in told)
    assert all(earlier.ended_s <= later.began_s for earlier, later in pairwise(told))
    last = [8, 9]
    for place in (0, 1, 3, 4):
        told[place].outcome()
        again = _draws([4, 3], np.zeros(NUM_SLOTS, np.int32))
        program(_batch(last, [0, 1]), again)
        last = again.tokens_L.tolist()
        assert draws[place].tokens_L.tolist() == last
    assert drawn[[4, 3]].tolist() == last


@native
def test_no_call_of_a_closed_program_is_submitted(ops_of_two_threads):
    program = _program(ops_of_two_threads)
    call = program.bind(_batch([8], [0]), _draws([4], np.zeros(NUM_SLOTS, np.int32)))
    queue = ops_of_two_threads.open_queue(lambda: False)
    program.close()
    with pytest.raises(AssertionError, match="closed"):
        queue.run(call)
    queue.close()
