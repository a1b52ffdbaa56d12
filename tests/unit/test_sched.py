"""Order of service, chunk sizes and admission, by example."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ledger import queue_with, take_next
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work
from tokenmill.core.errors import ContextTooLong, InvalidRequest, Overloaded
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence, Status
from tokenmill.core.work import PATIENCE, due
from tokenmill.sched.admission import blocks_for, max_running, refusal
from tokenmill.sched.budget import chunk_size, num_wanted, tokens_at_loss, with_prefill
from tokenmill.sched.service import seniority


def make_sequence(number: int, priority: int = 0, num_prompt: int = 4, max_tokens: int = 4) -> Sequence:
    request = Request(f"r{number}", (7,) * num_prompt, SamplingParams(), max_tokens, 0, priority=priority)
    return Sequence(number, request, list(request.prompt_tokens))


def test_queue_serves_by_priority_then_arrival() -> None:
    """Lower priority numbers first; equal ones in order of arrival, also after returning to the queue."""
    sequences = [make_sequence(0, 1), make_sequence(1, 0), make_sequence(2, -1), make_sequence(3, 0)]
    queue = queue_with(*sequences)
    first = take_next(queue)
    assert first is sequences[2]
    assert take_next(queue) is sequences[1]
    queue.push(sequences[1])
    assert [take_next(queue).number for _ in range(3)] == [1, 3, 0]
    assert queue.peek() is None


def test_short_prompts_pass_long_ones_for_a_while() -> None:
    """Within a priority the shorter prompt goes first, unless the longer has waited for many times its own work."""
    long, soon, late, urgent = make_sequence(0), make_sequence(1), make_sequence(2), make_sequence(3, -1)
    long.due = due(1000, 500)
    soon.due = due(1000 + 490 * PATIENCE - 1, 10)
    late.due = due(1000 + 490 * PATIENCE, 10)
    urgent.due = due(10**9, 10**6)
    queue = queue_with(late, long, soon, urgent)
    assert [take_next(queue) for _ in range(4)] == [urgent, soon, long, late]
    assert seniority(urgent) < seniority(long) < seniority(soon) < seniority(late)


def test_queue_drops_what_was_discarded() -> None:
    """A sequence that ended while waiting is neither counted nor served."""
    first, second = make_sequence(0), make_sequence(1)
    queue = queue_with(first, second)
    queue.discard(first)
    first.status = Status.FINISHED
    assert len(queue) == 1
    assert take_next(queue) is second


@pytest.mark.parametrize(
    ("start", "num_left", "budget", "aim", "first", "size"),
    [
        (0, 100, 512, 512, True, 100),  # all of it
        (0, 100, 50, 50, True, 48),  # to a border
        (5, 100, 50, 50, False, 43),  # to a border from inside a block
        (0, 100, 10, 10, True, 10),  # no border in reach: the first prefill goes on
        (0, 100, 10, 10, False, 0),  # no border in reach: others wait
        (0, 10, 10, 10, False, 10),  # a short rest fits
        (16, 100, 0, 0, True, 0),
        (0, 100, 90, 64, True, 64),  # what is spared is not for chunks
        (0, 90, 90, 64, True, 90),  # but for ends
        (0, 20, 26, -3, False, 20),
        (0, 30, 26, -3, False, 0),
        (0, 100, 20, 64, True, 16),  # decodes have taken more than was spared
    ],
)
def test_chunk_size(start: int, num_left: int, budget: int, aim: int, first: bool, size: int) -> None:
    """Chunks stop at block borders unless they end the prompt or are the only progress possible."""
    assert chunk_size(start, num_left, budget, aim, 16, first) == size


def test_nothing_is_wanted_once_the_end_is_certain() -> None:
    """With draws in flight up to max_tokens there is nothing left to plan."""
    seq = make_sequence(0, num_prompt=4, max_tokens=2)
    assert num_wanted(seq) == 4
    seq.num_planned, seq.num_pending = 4, 1
    assert num_wanted(seq) == 1
    seq.num_planned, seq.num_pending = 5, 2
    assert num_wanted(seq) == 0


def test_every_running_sequence_has_a_token_in_the_budget() -> None:
    """Seats are limited by the budget, so that no decode is left out of a step."""
    config = EngineConfig(groups=full_groups(10), max_model_len=64, max_num_seqs=100, max_num_batched_tokens=8)
    assert max_running(config) == 8


def test_refusals() -> None:
    """What never fits is the caller's error and names the field; a full queue is overload; what just fits is taken."""
    config = EngineConfig(groups=full_groups(4), max_model_len=100, block_size=16, max_num_waiting=2)
    fits = Request("r", (1,) * 60, SamplingParams(), 5, 0)
    assert blocks_for(64, 16) == 4
    assert refusal(fits, config, 1) is None
    pool = refusal(replace(fits, max_tokens=6), config, 0)
    assert isinstance(pool, ContextTooLong) and "KV cache holds 64" in pool.message
    context = refusal(replace(fits, max_tokens=41), config, 0)
    assert isinstance(context, ContextTooLong) and context.param == "max_tokens"
    prompt = refusal(replace(fits, prompt_tokens=(1,) * 100), config, 0)
    assert isinstance(prompt, ContextTooLong) and prompt.param == "prompt"
    assert isinstance(refusal(replace(fits, output_tokens=(1,) * 5), config, 0), InvalidRequest)
    full = refusal(fits, config, 2)
    assert isinstance(full, Overloaded) and full.retryable


def test_a_shorter_step_keeps_to_its_loss_wherever_the_prompt_goes_on() -> None:
    """Of the same tokens, those of steps in the middle cost as many times more as was asked at most, by any costs."""
    rng = random.Random(7)
    for _ in range(2000):
        step_s, row_s, token_s, position_s, context_s, experts_s = (
            rng.choice((0.0, 1.0)) * 10 ** rng.uniform(low, low + 3) for low in (-4, -5, -6, -10, -9, -4)
        )
        chosen = rng.choice((0.0, 0.05))
        costs = Costs(step_s, row_s, token_s + 1e-6, position_s, context_s, experts_s * (chosen > 0), chosen)
        num_rows, start, most = rng.choice((0, 1, 100)), rng.choice((0, 900, 32_000, 100_000)), rng.randint(1, 4096)
        work = Work(num_rows, num_rows, 700 * num_rows, 700 * num_rows)
        loss = rng.choice((0.01, 0.025, 0.2))
        num, price = tokens_at_loss(loss, costs, work, start, most)
        full_s = costs.predict(with_prefill(work, most, start)) / most
        middle = start + (most - num) // 2
        assert 0 <= num <= most and 0 < price <= most
        if num:
            short_s = costs.predict(with_prefill(work, num, middle)) / num
            assert short_s <= (1 + loss) * full_s * (1 + 1e-9), (costs, work, start, most, num)
        if num > 1 and not (chosen or context_s):
            shorter_s = costs.predict(with_prefill(work, num - 1, middle)) / (num - 1)
            assert shorter_s > (1 + loss) * full_s * (1 - 1e-3), (costs, work, start, most, num)
