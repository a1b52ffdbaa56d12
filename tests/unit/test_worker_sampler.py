"""Sampling settings against a slow, obvious statement of each."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenmill.core.request import SamplingParams
from tokenmill.core.step import Introduction
from tokenmill.ops.api import NEVER, RawTensor, SampleBatch, StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker.sampler import Sampler, told

VOCAB = 40
native = pytest.mark.skipif(available() is not None, reason=str(available()))
PROMPT = (3, 3, 7, 12)
EOS = (2,)


def _intro(params: SamplingParams, *, prompt=PROMPT, output=(), seed=5, choice=0, bad_words=()) -> Introduction:
    return Introduction(tuple(prompt), tuple(output), params, seed, choice, EOS, bad_words=bad_words)


def adjusted_slowly(logits, params: SamplingParams, prompt, output) -> list[float]:
    """Every adjustment, token by token."""
    values = [float(v) for v in logits]
    for token in range(VOCAB):
        if token in prompt or token in output:
            r = params.repetition_penalty
            values[token] = values[token] / r if values[token] > 0 else values[token] * r
        values[token] -= params.frequency_penalty * output.count(token)
        values[token] -= params.presence_penalty * (token in output)
        values[token] += dict(params.logit_bias).get(token, 0.0)
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            values[token] = float(NEVER)
        if len(output) < params.min_tokens and token in (*EOS, *params.stop_token_ids):
            values[token] = float(NEVER)
    return values


def drawn_slowly(logits, params: SamplingParams, prompt, output, seed, choice) -> int:
    row = np.array([adjusted_slowly(logits, params, prompt, output)], np.float32)
    column = lambda value, dtype: np.array([value], dtype)  # noqa: E731
    how = SampleBatch(
        column(params.temperature, np.float32),
        column(params.top_k, np.int32),
        column(params.top_p, np.float32),
        column(params.min_p, np.float32),
        column(seed, np.uint64),
        column(choice, np.int32),
        column(len(output), np.int32),
    )
    return int(ReferenceOps().sample(row, how)[0])


class Step:
    """A step of each backend whose logits are given."""

    def __init__(self, ops) -> None:
        self.ops = ops

    def __call__(self, sampler: Sampler, logits, slots, positions):
        draws = sampler.prepare(slots, positions).draws(slots, np.zeros(64, np.int32))
        sampler.hand_over_masks()
        count = len(slots)
        given = self.ops.pack([RawTensor("f32", count, VOCAB, logits.view(np.uint8))])
        program = self.ops.compile(
            lambda ops, batch: ops.gather_rows(ops.embed(given, batch.tokens_T), batch.logit_rows_L),
            StepLimits(count, count, 1, count),
        )
        rows = np.arange(count, dtype=np.int32)
        ones, starts = np.ones(count, np.int32), np.arange(count + 1, dtype=np.int32)
        tables = np.zeros((count, 1), np.int32)
        program(StepBatch(rows, rows * 0, starts, ones, tables, rows), draws)
        return draws


@pytest.fixture(params=["numpy", pytest.param("native", marks=native)])
def step(request):
    made = ReferenceOps() if request.param == "numpy" else NativeOps(2)
    yield Step(made)
    made.close()


def draw(step: Step, sampler: Sampler, logits, slots, positions) -> np.ndarray:
    return step(sampler, logits, slots, positions).tokens_L


VARIED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=5),
    SamplingParams(temperature=0, repetition_penalty=1.9),
    SamplingParams(temperature=1.2, frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(temperature=0.7, repetition_penalty=0.6, presence_penalty=2.0, frequency_penalty=-1.0),
    SamplingParams(temperature=1.0, logit_bias=((9, 4.0), (10, -100.0), (2, 3.0))),
    SamplingParams(temperature=1.0, allowed_token_ids=(1, 2, 9, 30, 31)),
    SamplingParams(temperature=0, min_tokens=6, stop_token_ids=(4, 5), logit_bias=((4, 50.0), (2, 60.0))),
    SamplingParams(temperature=0, frequency_penalty=1.0, logit_bias=((9, 8.0),)),  # draws 9 until its count tells
    SamplingParams(temperature=1.0, min_p=0.2, top_p=0.9, repetition_penalty=1.3, allowed_token_ids=tuple(range(20))),
]


def test_every_setting_over_many_steps(step):
    """Ten differently set sequences drawn together, in shrinking batches, draw what each would draw alone and slowly,
    with counts that follow the outputs."""
    rng = np.random.default_rng(8)
    sampler = Sampler(ReferenceOps(), VOCAB, 2, 200)
    for slot, params in enumerate(VARIED):
        sampler.introduce(slot, _intro(params, seed=slot, choice=slot % 3))
    outputs: list[list[int]] = [[] for _ in VARIED]
    for turn in range(12):
        slots = np.array([s for s in range(len(VARIED)) if (s + turn) % 4], np.int32)[::-1].copy()
        logits = (rng.normal(size=(len(slots), VOCAB)) * 2).astype(np.float32)
        before = logits.copy()
        positions = np.array([len(PROMPT) + len(outputs[s]) for s in slots], np.int32)
        drawn = draw(step, sampler, logits, slots, positions)
        assert np.array_equal(logits, before), "logits must survive: logprobs are of the raw ones"
        for row, slot in enumerate(slots.tolist()):
            expected = drawn_slowly(before[row], VARIED[slot], PROMPT, outputs[slot], slot, slot % 3)
            assert drawn[row] == expected, (turn, VARIED[slot])
            outputs[slot].append(expected)


@pytest.mark.parametrize("params", VARIED)
def test_resumption_continues(step, params):
    """A sampler introduced with the outputs so far draws what the one that drew them draws next."""
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(10, 1, VOCAB)) * 2).astype(np.float32)
    slot = np.zeros(1, np.int32)
    steady, output = Sampler(ReferenceOps(), VOCAB, 1, 200), []
    steady.introduce(0, _intro(params))
    for turn in range(10):
        position = np.array([len(PROMPT) + turn], np.int32)
        resumed = Sampler(ReferenceOps(), VOCAB, 1, 200)
        resumed.introduce(0, _intro(params, output=output))
        token = int(draw(step, steady, logits[turn], slot, position)[0])
        assert token == int(draw(step, resumed, logits[turn], slot, position)[0])
        output.append(token)


def test_a_slot_forgets_its_former_sequence(step):
    """A plain sequence in a slot that held an adjusted one is not adjusted."""
    sampler = Sampler(ReferenceOps(), VOCAB, 1, 200)
    sampler.introduce(0, _intro(SamplingParams(temperature=0, logit_bias=((5, 100.0),), logprobs=2)))
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 8] = 1
    slot, position = np.zeros(1, np.int32), np.array([4], np.int32)
    assert draw(step, sampler, logits, slot, position).tolist() == [5]
    sampler.introduce(0, _intro(SamplingParams(temperature=0)))
    assert draw(step, sampler, logits, slot, position).tolist() == [8]
    assert told(step(sampler, logits, slot, position)) == {}


def test_logprobs_are_raw_and_per_request(step):
    """Rows that want them get their own number of alternatives, of the raw logits; others get nothing."""
    rng = np.random.default_rng(2)
    count = 40  # more than one slice
    sampler = Sampler(ReferenceOps(), VOCAB, count, 200)
    wants = [None if slot % 3 == 0 else slot % 5 for slot in range(count)]
    for slot, want in enumerate(wants):
        sampler.introduce(slot, _intro(SamplingParams(temperature=0, logprobs=want, logit_bias=((6, 9.0),))))
    logits = rng.normal(size=(count, VOCAB)).astype(np.float32)
    slots = np.arange(count, dtype=np.int32)
    draws = step(sampler, logits, slots, np.full(count, 4, np.int32))
    tokens, got = draws.tokens_L, told(draws)
    assert sorted(got) == [slot for slot, want in enumerate(wants) if want is not None]
    for row, entry in got.items():
        values = logits[row].astype(np.float64)
        total = math.log(np.exp(values).sum())
        order = sorted(range(VOCAB), key=lambda t: (-values[t], t))
        assert entry.token == tokens[row] and entry.rank == order.index(entry.token) + 1
        assert math.isclose(entry.logprob, values[entry.token] - total, rel_tol=1e-5, abs_tol=1e-6)
        assert [t for t, _ in entry.top] == order[: wants[row]]


def test_some_token_is_always_possible(step):
    """Where only stop tokens are allowed, min_tokens gives way; unknown ids in settings are ignored."""
    sampler = Sampler(ReferenceOps(), VOCAB, 1, 200)
    params = SamplingParams(temperature=1, min_tokens=9, allowed_token_ids=(2,), logit_bias=((VOCAB + 5, 3.0),))
    sampler.introduce(0, _intro(params))
    logits = np.zeros((1, VOCAB), np.float32)
    assert draw(step, sampler, logits, np.zeros(1, np.int32), np.array([4], np.int32)).tolist() == [2]


def test_bad_words_against_the_definition(step):
    """Random words over few tokens, of one to four: at each draw the last token of every word whose others were just
    produced is out; the prompt does not count. A sampler that resumes from the outputs draws the same."""
    rng = np.random.default_rng(12)
    few = 6
    for trial in range(30):
        sizes = rng.integers(1, 5, rng.integers(1, 12))
        words = (*(tuple(rng.integers(0, few, size).tolist()) for size in sizes), (1, VOCAB + 3))
        params = SamplingParams(temperature=0 if trial % 2 else 1.0, frequency_penalty=trial % 3)
        intro = _intro(params, bad_words=words)
        sampler, output = Sampler(ReferenceOps(), VOCAB, 1, 200), []
        sampler.introduce(0, intro)
        for turn in range(40):
            logits = np.full((1, VOCAB), -9, np.float32)
            logits[0, :few] = rng.normal(size=few)
            logits[0, VOCAB - 1] = -3
            position = np.array([len(PROMPT) + turn], np.int32)
            resumed = Sampler(ReferenceOps(), VOCAB, 1, 200)
            resumed.introduce(0, _intro(params, output=output, bad_words=words))
            allowed = logits[0].copy()
            for word in words:
                before = len(word) - 1
                if before <= len(output) and output[len(output) - before :] == list(word[:-1]) and word[-1] < VOCAB:
                    allowed[word[-1]] = NEVER
            expected = drawn_slowly(allowed, params, PROMPT, output, 5, 0)
            token = int(draw(step, sampler, logits, np.zeros(1, np.int32), position)[0])
            assert token == expected, (words, output)
            assert token == int(draw(step, resumed, logits, np.zeros(1, np.int32), position)[0])
            output.append(token)


def test_bad_words_give_way_where_nothing_else_is_left(step):
    """All tokens are bad, or all that are allowed."""
    for params, words in (
        (SamplingParams(temperature=0), tuple((token,) for token in range(VOCAB))),
        (SamplingParams(temperature=0, allowed_token_ids=(7, 9)), ((7,), (9,))),
    ):
        sampler = Sampler(ReferenceOps(), VOCAB, 1, 200)
        sampler.introduce(0, _intro(params, bad_words=words))
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, 9] = 1
        assert draw(step, sampler, logits, np.zeros(1, np.int32), np.array([4], np.int32)).tolist() == [9]


def test_dry_against_the_definition(step):
    """Sequences of few tokens, with and without breakers and a limited reach: each token that would go on with a
    repetition loses what the longest one says."""
    rng = np.random.default_rng(21)
    for trial in range(40):
        prompt = rng.integers(0, 4, 12).tolist()
        breakers, last_n, allowed = ((), (2,))[trial % 2], (-1, 9, 0)[trial % 3], (1, 2, 3)[trial % 3]
        params = SamplingParams(
            temperature=0, dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last_n
        )
        intro = Introduction(tuple(prompt), (), params, 5, 0, EOS, dry_breakers=breakers)
        sampler, tokens = Sampler(ReferenceOps(), VOCAB, 1, 200), list(prompt)
        sampler.introduce(0, intro)
        for _ in range(12):
            logits = np.full((1, VOCAB), -99, np.float32)
            logits[0, :4] = rng.normal(size=4)
            seen = tokens if last_n < 0 else tokens[len(tokens) - last_n :]
            expected = logits[0].astype(np.float64)
            for token in {0, 1, 2, 3} - set(breakers):
                lengths = [
                    n
                    for end in range(1, len(seen))
                    for n in range(allowed, end + 1)
                    if seen[end] == token and seen[end - n : end] == seen[-n:] and not set(breakers) & set(seen[-n:])
                ]
                if lengths:
                    expected[token] -= 0.8 * 1.75 ** (max(lengths) - allowed)
            position = np.array([len(tokens)], np.int32)
            token = int(draw(step, sampler, logits, np.zeros(1, np.int32), position)[0])
            assert token == int(expected.argmax()), (trial, tokens)
            tokens.append(token)
