"""Exactness with corpora: whatever the texts are that are drafted from, a request's tokens, logprobs and end are those
of its run alone, which has no drafts. Mixes and what is verified are those of test_drafts_exact.py."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import eq
from typing import Any

import numpy as np
import pytest
from test_drafts_exact import all_are_verified, drafted_mix, make_worker, needs_native  # noqa: F401, two are fixtures
from test_exactness import Mix, alone, run

from tiny import VOCAB_SIZE
from tokenmill.core.speculation import CORPUS, CorpusConfig, SpeculationConfig
from tokenmill.core.step import StepPlan, StepResult
from tokenmill.core.terms import Terms
from tokenmill.ops.contexts import followed_places, sort_contexts
from tokenmill.ops.drafts import Corpus
from tokenmill.ops.native import NativeOps
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker.build import Worker

RIGHT, LYING = "right", "lying"
CORPORA = (CorpusConfig("", (RIGHT, "both")), CorpusConfig("", (LYING, "both")))
SEEDS = (31, 39, 46)


class Watching:
    """An executor whose steps another computes; by the corpora of a sequence, how many of their drafts were verified,
    and how many were right."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._corpora: dict[int, tuple[int, ...]] = {}
        self._proposed: set[int] = set()
        self.num_verified, self.num_right = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_now(self, plan: StepPlan) -> StepResult:
        result: StepResult = self._executor.execute_now(plan)
        results = {row.seq: row for row in result.rows}
        for row in plan.rows:
            if row.intro is not None:
                self._corpora[row.seq] = row.intro.corpora
            if row.drafts and row.seq in self._proposed:
                self.num_verified[self._corpora[row.seq]] += len(row.drafts)
                self.num_right[self._corpora[row.seq]] += sum(map(eq, row.drafts, results[row.seq].tokens))
        by_corpus = {row.seq for row in result.rows if row.drafts is not None and row.drafts.source == CORPUS}
        self._proposed = self._proposed - {row.seq for row in result.rows} | by_corpus
        return result


def corpus_of(texts: Iterable[Iterable[int]]) -> Corpus:
    tokens = [-1]
    for text in texts:
        tokens += [*text, -1]
    array = np.array(tokens, np.int32)
    return Corpus(array, sort_contexts(array, followed_places(array)))


def lies_about(text: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What is long enough to be found, with what does not follow it."""
    wrong = [(token + 1) % VOCAB_SIZE for token in text]
    return [(*text[max(0, at - 24) : at], *wrong[at : at + 3]) for at in range(1, len(text))]


def check_corpora(make: Callable[..., Worker], exact: bool, seeds: Iterable[int] = SEEDS, **how: Any) -> None:
    """Of callers who may use the right corpus, the one that lies, both or none."""
    plain = make(**how)
    verified, right = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for seed in seeds:
        mix = drafted_mix(random.Random(seed))
        tenants = (RIGHT, LYING, "both", "neither")
        arrivals = [(at, replace(each, terms=Terms(tenants[at % 4]))) for at, each in mix.arrivals]
        expected = {each.id: alone(plain, each, mix.config.max_model_len) for _, each in arrivals}
        texts = [(*each.prompt_tokens, *expected[each.id].tokens) for _, each in arrivals]
        corpora = corpus_of(texts), corpus_of(lie for text in texts for lie in lies_about(text))
        speculation = SpeculationConfig(corpora=CORPORA)
        worker = make(**how, speculation=speculation, corpora=corpora)
        watching = Watching(worker.executor)
        config = replace(mix.config, speculation=speculation)
        streams, _ = run(replace(worker, executor=watching), Mix(config, arrivals, {}))
        for name, want in expected.items():
            got = streams[name]
            assert (got.tokens, got.finish) == (want.tokens, want.finish), (seed, name)
            assert not exact or got == want, (seed, name)
        verified += watching.num_verified
        right += watching.num_right
    assert verified[0,] > 40 and right[0,] > 0.9 * verified[0,]
    assert verified[1,] > 100 and right[1,] < 0.1 * verified[1,]
    assert verified[0, 1] > 10 and not verified[()]


def test_on_numpy(make_worker: Callable[..., Worker]) -> None:  # noqa: F811
    check_corpora(make_worker, exact=False, seeds=SEEDS[1:2], make_ops=ReferenceOps, kv_dtype="f32")


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_bit_for_bit(make_worker: Callable[..., Worker], kv_dtype: str) -> None:  # noqa: F811
    check_corpora(make_worker, exact=True, make_ops=NativeOps, kv_dtype=kv_dtype)
