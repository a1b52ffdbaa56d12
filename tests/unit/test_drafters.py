"""Drafters without a model: the native one against the slow statement of what they propose, its bounds, and what a
worker tells it."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest

from tiny import VOCAB_SIZE, tiny_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import CORPUS, NGRAM, SUFFIX, SpeculationConfig
from tokenmill.core.step import Drafts, Introduction, PlanRow, RowResult, StepPlan
from tokenmill.ops.contexts import followed_places, sort_contexts
from tokenmill.ops.drafts import Corpus, Wanted
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.drafter import NativeDrafter
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_drafts import ReferenceDrafter
from tokenmill.worker import build
from tokenmill.worker.drafters import LOOKUPS, MOST_PASSED, TOLD_AT_ONCE, Drafters
from tokenmill.worker.prediction import Prediction
from workers import build_worker

VOCAB = 50
native = pytest.mark.skipif(available() is not None, reason=str(available()))
both = pytest.mark.parametrize("make", [ReferenceDrafter, pytest.param(NativeDrafter, marks=native)])


def random_text(rng: random.Random, count: int) -> list[int]:
    """Of few tokens, and with pieces of itself, so that much occurs more than once."""
    text: list[int] = []
    while len(text) < count:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 40)]
        else:
            text += rng.choices(range(rng.choice((2, 6, VOCAB))), k=rng.randint(1, 12))
    return text[:count]


def random_config(rng: random.Random) -> SpeculationConfig:
    least = rng.randint(1, 5)
    return SpeculationConfig(
        methods=rng.choice(((NGRAM,), (SUFFIX,), (NGRAM, SUFFIX), (SUFFIX, NGRAM))),
        num_speculative_tokens=16,
        prompt_lookup_min=least,
        prompt_lookup_max=least + rng.choice((0, 1, 7)),
        suffix_decoding_max_tree_depth=rng.choice((2, 9, 24)),
        suffix_decoding_max_cached_requests=rng.choice((0, 3, 100)),
        suffix_decoding_max_spec_factor=rng.choice((0.5, 1.0, 2.5)),
        suffix_decoding_min_token_prob=rng.choice((0.0, 0.1, 0.6)),
    )


def corpus(*texts: list[int]) -> Corpus:
    tokens = np.array([-1, *chain.from_iterable([*text, -1] for text in texts)], np.int32)
    return Corpus(tokens, sort_contexts(tokens, followed_places(tokens)))


@native
@pytest.mark.parametrize("seed", range(40))
def test_the_index_proposes_what_a_look_at_every_place_does(seed):
    """Sequences of two scopes that grow, end and begin anew, some of whose outputs are forgotten, and of which some are
    drafted for from one or two corpora."""
    rng = random.Random(seed)
    config = random_config(rng)
    texts = [random_text(rng, 300) for _ in range(3)]
    corpora = [corpus(*(random_text(rng, rng.randint(1, 200)) for _ in range(5))), corpus(texts[0], texts[2])]
    drafters = [make(config, VOCAB - 3, corpora) for make in (NativeDrafter, ReferenceDrafter)]
    running: dict[int, list[int]] = {}
    num_proposed = 0
    for _ in range(120):
        for seq in range(3):
            if seq not in running or rng.random() < 0.03:
                num_before, scope = rng.randint(0, 20), rng.choice("ab")
                used = rng.choice(((), (0,), (0, 1)))
                for drafter in drafters:
                    drafter.end(seq)
                    drafter.begin(seq, scope, 10, num_before, used)
                running[seq] = rng.choice(texts)[rng.randrange(100) :] + random_text(rng, 200)
        rows = []
        for seq in range(3):
            count = rng.choice((0, 1, 1, 1, 2, 5, 30))
            taken, running[seq] = running[seq][:count], running[seq][count:]
            rows.append(Wanted(seq, taken, rng.choice((0, 1, 8, 17))))
        found, wanted = (drafter.propose(rows) for drafter in drafters)
        assert found == wanted, config
        num_proposed += sum(each is not None for each in found)
    assert num_proposed > 30
    drafters[0].close()


def propose(drafter, text, scope="", most=8, corpora=()) -> Drafts | None:
    drafter.begin(0, scope, len(text), len(text), corpora)
    (drafts,) = drafter.propose([Wanted(0, text, most)])
    return drafts


def put_out(drafter, text, scope="", seq=1) -> None:
    """A sequence that has nothing but output, and ends."""
    drafter.begin(seq, scope, len(text), 0)
    drafter.propose([Wanted(seq, text, 0)])
    drafter.end(seq)


@both
def test_ngrams_go_on_as_they_did_the_last_time_and_a_period_goes_on(make):
    drafter = make(SpeculationConfig(methods=(NGRAM,), prompt_lookup_min=2, prompt_lookup_max=3), VOCAB)
    assert propose(drafter, [1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], most=2) == Drafts((5, 6), NGRAM, (1.0, 1.0))
    assert propose(drafter, [1, 2, 3, 4, 9, 3]) is None  # one token is too short a match
    assert propose(drafter, [9, 1, 2, 3, 1, 2, 3], most=7).tokens == (1, 2, 3, 1, 2, 3, 1)


@both
def test_suffixes_go_on_as_they_did_most_often_as_far_as_that_is_sure(make):
    drafter = make(SpeculationConfig(suffix_decoding_min_token_prob=0.4), VOCAB)
    text = [8, 9, 1, 2, 7, 8, 9, 1, 3, 6, 8, 9, 1, 2, 5, 8, 9]
    found = propose(drafter, text)
    assert found.tokens == (1, 2) and found.chances == pytest.approx((1.0, 2 / 3))  # two match, so two are drafted
    twice = propose(make(SpeculationConfig(suffix_decoding_max_spec_factor=2.0), VOCAB), text)
    assert twice.tokens == (1, 2, 5, 8) and twice.chances == pytest.approx((1.0, 2 / 3, 1 / 2, 1.0))
    surer = make(SpeculationConfig(suffix_decoding_max_spec_factor=2.0, suffix_decoding_min_token_prob=0.6), VOCAB)
    assert propose(surer, text).tokens == (1, 2)


@both
@pytest.mark.parametrize("num_texts", [3, 1000])
def test_a_corpus_drafts_what_follows_most_of_its_places(make, num_texts):
    """As far as its text goes, for those that may use it, and where more tokens of it are expected to be right than of
    the sequence's own text. Of many places, so many count as are looked at."""
    texts = [[number % 7 + 20, 3, 4, 5, *((8, 9) if number % 3 else (6,))] for number in range(num_texts)]
    drafter = make(SpeculationConfig(), VOCAB, [corpus([3, 4, 5, 7]), corpus(*texts)])
    found = propose(drafter, [1, 2, 3, 4, 5], corpora=(1,))
    assert found.source == CORPUS and found.tokens == (8, 9)
    assert found.chances == pytest.approx((2 / 3, 1.0), abs=0.05)
    assert propose(drafter, [1, 2, 3, 4, 5], corpora=(0, 1)).tokens == (8, 9)
    assert propose(drafter, [1, 2, 3, 4, 5], corpora=(0,)).tokens == (7,)
    assert propose(drafter, [1, 2, 3, 4, 5]) is None
    assert propose(drafter, [3, 4, 5, 1, 2, 9, 3, 4, 5], corpora=(0, 1)).source == SUFFIX
    assert propose(drafter, [1, 2, 9], corpora=(1,)) is None  # nothing follows it


@both
def test_no_token_beyond_the_vocabulary_is_proposed(make):
    drafter = make(SpeculationConfig(), VOCAB)
    assert propose(drafter, [1, 2, 3, 4, VOCAB, 5, 1, 2, 3]).tokens == (4,)


@both
def test_outputs_are_proposed_within_their_scope_alone(make):
    drafter = make(SpeculationConfig(), VOCAB)
    text = list(range(1, 12))
    put_out(drafter, text, scope="4:ann\0")
    for scope in ("", "4:ann", "4:ann\xff", "3:ann\0", "4:ann\0\0"):
        assert propose(drafter, text[:4], scope=scope) is None, scope
    assert propose(drafter, text[:4], scope="4:ann\0").tokens == (5, 6, 7, 8)


@both
def test_who_puts_out_much_drives_out_its_own(make):
    """Of a scope that goes on and on, the texts that were of use longest ago leave; those of another stay until it has
    been away for long."""
    drafter = make(SpeculationConfig(suffix_decoding_max_cached_requests=8), 10_000)
    texts = [list(range(100 * n, 100 * n + 40)) for n in range(60)]
    put_out(drafter, texts[0], scope="b")
    for text in texts[1:9]:
        put_out(drafter, text, scope="a")
        assert propose(drafter, texts[1][:4], scope="a") is not None  # the first is in use
    assert propose(drafter, texts[0][:4], scope="b") is not None
    assert propose(drafter, texts[2][:4], scope="a") is None
    for text in texts[9:]:
        put_out(drafter, text, scope="a")
        propose(drafter, text[:4], scope="a")
    assert propose(drafter, texts[0][:4], scope="b") is None


@native
def test_outputs_have_bounded_bytes():
    """Two million tokens, of which 16,384 have room: the last are known, the first are not, and memory stays."""
    drafter = NativeDrafter(SpeculationConfig(), 10**9, output_bytes=1)
    pages = Path("/proc/self/statm")
    before = 0
    for start in range(0, 2_000_000, 2000):
        put_out(drafter, range(start, start + 2000))
        drafter.propose([])
        drafter.propose([])
        if start == 200_000 and pages.exists():
            before = int(pages.read_text().split()[1])
    if before:
        grown = (int(pages.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE")
        assert grown < 32 * 2**20, grown  # with all of it, it would be more than 100 MiB
    assert propose(drafter, range(1_999_000, 1_999_009)).tokens == (*range(1_999_009, 1_999_017),)
    assert propose(drafter, range(500, 509)) is None
    drafter.close()


@native
def test_a_long_output_is_known_across_the_pieces_it_is_kept_in():
    drafter = NativeDrafter(SpeculationConfig(), 10**6)
    put_out(drafter, range(10_000))
    for _ in range(10):
        drafter.propose([])
    for start in (100, 4060, 4072, 4085, 8150, 9980):
        found = propose(drafter, range(start, start + 10), most=4)
        assert found.tokens == (*range(start + 10, start + 14),) and found.chances == (1.0,) * 4, start
    assert len(propose(drafter, range(9_980, 9_994)).tokens) == 6  # up to its end
    drafter.close()


def _intro(prompt, output=(), scope="") -> Introduction:
    params = SamplingParams(temperature=0, stop_token_ids=(41,))
    return Introduction(tuple(prompt), tuple(output), params, 11, 0, (40,), draft_scope=scope)


def _drafts(drafters: Drafters, step: int, seq: int, *tokens: int) -> tuple[int, ...]:
    (result,) = drafters.propose(step, [RowResult(seq, tokens)])
    return result.drafts.tokens if result.drafts else ()


@pytest.fixture
def drafters():
    return Drafters(ReferenceOps().new_drafter(SpeculationConfig(), 10**6), most=8, overlap=24)


@native
def test_a_long_prompt_is_told_in_pieces_and_what_is_drawn_meanwhile_behind_it():
    ops = NativeOps(1)
    drafters = Drafters(ops.new_drafter(SpeculationConfig(), 10**6), most=8, overlap=24)
    prompt = range(2 * TOLD_AT_ONCE + 100)
    drafters.introduce(0, 7, _intro(prompt))
    assert _drafts(drafters, 0, 7, 5) == _drafts(drafters, 1, 7, 6) == ()
    assert _drafts(drafters, 2, 7, 7) == (8, 9, 10)  # 5, 6, 7 match
    ops.close()
    assert _drafts(drafters, 3, 7, 8) == ()


def test_what_a_sequence_draws_after_its_end_or_drew_in_an_earlier_life_is_nothing(drafters):
    drafters.introduce(0, 7, _intro([1, 2, 3]))
    assert _drafts(drafters, 0, 7, 1, 2) == (3, 1)
    assert _drafts(drafters, 1, 7, 41) == _drafts(drafters, 2, 7, 41) == ()
    drafters.introduce(4, 7, _intro([1, 2, 3], [5, 6]))
    assert _drafts(drafters, 3, 7, 9) == ()  # a step that was under way
    assert _drafts(drafters, 4, 7, 1, 2) == (3, 5)
    drafters.release(7)
    drafters.release(7)
    assert _drafts(drafters, 5, 7, 1) == ()


def test_no_token_that_ends_a_sequence_is_drafted_nor_what_follows_it(drafters):
    """Ends are the sequence's own: its model's and its stop tokens."""
    drafters.introduce(0, 7, _intro([1, 2, 3, 4, 5, 40, 1, 2, 6, 7, 41, 8, 9, 10, 11, 9]))
    assert _drafts(drafters, 0, 7, 1, 2, 3) == (4, 5)
    assert _drafts(drafters, 1, 7, 4, 5) == ()
    assert _drafts(drafters, 2, 7, 6, 7) == ()
    assert _drafts(drafters, 3, 7, 8, 9, 10) == (11, 9, 1)


def test_what_was_put_out_before_a_preemption_counts_once(drafters):
    output = range(100, 160)
    drafters.introduce(0, 7, _intro([1]))
    _drafts(drafters, 0, 7, *output[:50])
    drafters.release(7)
    drafters.introduce(1, 7, _intro([1], output[:50]))
    _drafts(drafters, 1, 7, *output[50:])
    drafters.release(7)
    _drafts(drafters, 2, 7)
    (scope,) = drafters._drafter._scopes.values()
    assert scope.texts == [[*output[:50]], [*output[26:]]]  # they overlap by as much as can match


def _counted(drafters: Drafters) -> list[int]:
    """How many lookups each call of its drafter is asked for, from now on."""
    counts: list[int] = []
    propose = drafters._drafter.propose

    def count(rows):
        counts.append(sum(row.most > 0 for row in rows))
        return propose(rows)

    drafters._drafter.propose = count
    return counts


def test_steps_are_passed_over_where_no_draft_is_right_until_one_is(drafters):
    drafters.introduce(0, 7, _intro([1, 2, 3]))
    counts, steps = _counted(drafters), list[int]()
    for token in range(100, 400):
        assert _drafts(drafters, 0, 7, token) == ()
        steps += [token] * (len(counts) - len(steps))
    gaps = [later - step for step, later in pairwise(steps)]
    assert gaps[:LOOKUPS] == [1] * (LOOKUPS - 1) + [2] and gaps[LOOKUPS:] == [4] + [MOST_PASSED + 1] * 28
    found = [_drafts(drafters, 0, 7, token) for token in range(100, 150)]
    assert all(found[2 * MOST_PASSED + 2 :]) and found[-1][:2] == (150, 151)


def test_new_sequences_and_expected_answers_are_passed_over_in_no_step(drafters):
    drafters.introduce(0, 7, _intro([1, 2, 3]))
    for token in range(100, 400):
        _drafts(drafters, 0, 7, token)
    counts = _counted(drafters)
    drafters.introduce(1, 8, _intro([1, 2, 3]))
    assert _drafts(drafters, 1, 8, 1) == (2,) and counts == [1]
    drafters.introduce(2, 8, replace(_intro([9]), prediction=(*range(500, 700),)))
    for token in range(500, 650):
        assert _drafts(drafters, 2, 8, token)[0] == token + 1
    assert len(counts) == 151


def test_what_was_drawn_in_steps_that_were_passed_over_is_told_up_to_its_end(drafters):
    output = (*range(100, 100 + LOOKUPS + 2), 40, 50)
    drafters.introduce(0, 7, _intro([1]))
    for token in output:
        _drafts(drafters, 0, 7, token)
    assert len(drafters._passed_over) == 2
    drafters.release(7)
    drafters._drafter.propose([])
    (scope,) = drafters._drafter._scopes.values()
    assert scope.texts == [[*output[:-1]]]


def predicted(prediction: Prediction, *tokens: int) -> tuple[int, ...]:
    prediction.follow(tokens)
    drafts = prediction.propose(4)
    return () if drafts is None else drafts.tokens


def test_an_answer_is_found_again_in_what_was_expected_of_it():
    """After words that it leaves out, puts in or writes otherwise; at its end and in foreign text nothing comes."""
    text = [*range(100, 200)]
    prediction = Prediction(text, ())
    assert prediction.propose(4).tokens == (100, 101, 102, 103)
    assert predicted(prediction, 100, 101) == (102, 103, 104, 105)
    assert predicted(prediction, 5) == predicted(prediction, 6) == ()  # put in
    assert predicted(prediction, 102, 103) == (104, 105, 106, 107)
    assert predicted(prediction, 150) == (151, 152, 153, 154)  # left out
    assert predicted(prediction, 7) == ()  # instead of 151
    assert predicted(prediction, 152) == (153, 154, 155, 156)
    assert predicted(prediction, 110, 111) == (112, 113, 114, 115)  # back
    assert predicted(prediction, *range(112, 199)) == (199,)
    assert predicted(prediction, 199) == predicted(prediction, 3) == ()
    assert predicted(Prediction(text, text[:30])) == (130, 131, 132, 133)  # begun elsewhere


def test_of_places_that_match_the_longest_counts_then_the_next_one():
    text = [1, 2, 9, 3, 2, 9, 4, 5, 2, 9, 6]
    assert predicted(Prediction(text, ()), 4, 5, 2, 9) == (6,)  # though 1, 2, 9 comes first
    assert predicted(Prediction(text, (1, 2, 9, 3)), 9) == (4, 5, 2, 9)
    assert predicted(Prediction(text, text), 9) == (6,)  # none is behind: the last one before
    assert predicted(Prediction([7], ())) == (7,) and predicted(Prediction([7], ()), 8) == ()


def test_what_is_looked_for_is_no_part_of_two_tokens():
    """An id whose bytes begin in the middle of another's."""
    text = [0x010200, 0x000100, 5]
    assert Prediction(text, ())._bytes.find((0x0102).to_bytes(4, "little")) == 1
    assert predicted(Prediction(text, (5,)), 0x0102) == ()
    assert predicted(Prediction([*text, 0x0102, 6], ()), 0x0102) == (6,)
    assert predicted(Prediction([0x0102, 6, *text], [0x0102, 6, *text]), 0x0102) == (6, *text[:3])


def test_an_expected_answer_is_drafted_with_and_without_another_drafter(drafters):
    """Of both the one that more tokens are expected of; none for a sequence of which nothing is expected."""
    for each in (drafters, Drafters(None, most=8, overlap=24)):
        each.introduce(0, 7, replace(_intro([1, 2, 3, 1]), prediction=(*range(50, 70),)))
        (result,) = each.propose(0, [RowResult(7, (50,))])
        assert result.drafts.source == "prediction" and result.drafts.tokens == (*range(51, 59),)
        assert result.drafts.chances[:2] == (0.75, 0.875) and result.drafts.chances[-1] < 1
        assert _drafts(each, 1, 7, 41) == _drafts(each, 2, 7, 50) == ()
        each.introduce(3, 7, _intro([9]))
        assert _drafts(each, 3, 7, 50) == ()
        each.release(7)


@pytest.mark.parametrize("ops", [ReferenceOps, pytest.param(NativeOps, marks=native)])
def test_results_of_a_worker_have_drafts_where_it_is_to_draft(ops, monkeypatch):
    """One token over and over is what a prompt of it makes likely: the tokens proposed follow those that were drawn."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    found = []
    for speculation in (None, SpeculationConfig(methods=(NGRAM,), num_speculative_tokens=3, prompt_lookup_min=1)):
        worker = build_worker(
            tiny_checkpoint(),
            ops(),
            max_model_len=64,
            groups=full_groups(32),
            block_size=8,
            kv_dtype="f32",
            speculation=speculation,
        )
        prompt = [*range(VOCAB_SIZE)][:40]
        first = PlanRow(0, 0, tuple(prompt), blocks=tuple(range(8)), intro=_intro(prompt), sample=True)
        rows = [first, *(PlanRow(0, 40 + step, (), from_step=step, sample=True) for step in range(4))]
        found.append([worker.executor.execute_now(StepPlan(step, (row,))).rows[0] for step, row in enumerate(rows)])
        assert (worker.memory.draft_index > 0) == (speculation is not None)
        worker.executor.close()
    plain, drafted = found
    assert [each._replace(drafts=None) for each in drafted] == plain
    text = prompt
    for result in drafted:
        drawn = result.tokens[-1]
        at = len(text) - 1 - text[::-1].index(drawn) if drawn in text else None
        text = [*text, drawn]
        if at is not None:
            assert result.drafts.tokens == (*text, *text)[at + 1 : at + 5], result
    assert any(result.drafts for result in drafted)


@pytest.mark.parametrize("what", ["begin", "propose", "end"])
def test_a_drafter_that_fails_drafts_no_more_and_fails_nothing_else(drafters, caplog, what):
    assert _begin_and_draft(drafters, 7)

    def fail(*_):
        raise MemoryError

    setattr(drafters._drafter, what, fail)
    assert bool(_drafts(drafters, 1, 7, 2)) == (what != "propose")
    assert bool(_begin_and_draft(drafters, 8)) == (what == "end")
    drafters.release(7)
    assert not _begin_and_draft(drafters, 9) and len(caplog.records) == 1


def _begin_and_draft(drafters: Drafters, seq: int) -> tuple[int, ...]:
    drafters.introduce(0, seq, _intro([1, 2, 3, 1, 2, 3]))
    return _drafts(drafters, 0, seq, 1)
