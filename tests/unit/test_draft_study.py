"""The studies of drafting (scripts/draft_study.py), on answers whose figures can be counted."""

from __future__ import annotations

from functools import partial
from math import log

import pytest

import draft_pool
import draft_trees
from draft_answers import Answer
from draft_study import Drafter, costs_of, replay
from tokenmill.core.speculation import SpeculationConfig
from tokenmill.ops.select import available

VOCAB = 64
native = pytest.mark.skipif(available() is not None, reason="without the native library")


@native
def test_a_replay_counts_what_drafts_gain():
    """Of tokens that never occurred nothing is drafted; of an answer that was given before nearly all is right."""
    costs, config = costs_of("smollm2"), SpeculationConfig()
    new = [Answer(list(range(4)), list(range(4, 20))), Answer(list(range(20, 24)), list(range(24, 40)))]
    assert replay(new, Drafter(config, VOCAB, 1), config, costs) == pytest.approx(1.0)
    told = [Answer(list(range(4)), list(range(4, 60)))] * 4
    speed = replay(told, Drafter(config, VOCAB, 1), config, costs)
    assert 1.5 < speed < 5
    assert replay(told, Drafter(config, VOCAB, 8), config, costs) < speed, "short matches were not left out"


def test_a_tree_has_the_second_choice_where_a_chain_has_not():
    """A drafter whose second choice is right: of the same two nodes the tree's give 2 tokens a step, the chain's 1."""
    answer = [7] * 12
    tops = [[(5, log(0.55)), (7, log(0.44)), (6, log(0.01))]] * len(answer)
    roots = list(draft_trees.model_roots([Answer([1, 2], answer, tops)]))
    prices = draft_trees.Prices([0.0, *[1.0] * 40], [0.0, *[0.1] * 40])
    speeds = {}
    for kind, width in (("chain", 1), ("tree", 2)):
        grown = [[draft_trees.grow(root, width, 1.0) for root in each] for each in roots]
        speeds[kind] = draft_trees.walk(grown, prices, partial(draft_trees.fixed, most=2, deepest=3 - width))
    assert speeds["chain"] == pytest.approx(
        (1.0, 11 / (10 * 1.2 + 1.1))
    )  # behind the last token there is none to draft
    assert speeds["tree"] == pytest.approx((11 / 6, 11 / 6 / 1.1))


def test_the_pool_drafts_what_was_drawn_behind_wrong_drafts():
    """Of a model that goes from each token to the one after it: what it drew in rows that were only there to draw is
    right when the answer comes there again."""

    class Next:
        def compute(self, tokens, start, num_draws=0):
            return [(token + 1) % 8 for token in tokens[-num_draws:]]

    answer = Answer([0], [token % 8 for token in range(1, 40)])
    costs = costs_of("smollm2")
    nobody = draft_pool.run(Next(), answer, draft_pool.Drafting(None, 0, 3, has_pool=False, fills=False), costs)
    assert nobody == (38, 38, 38.0)
    _, num_steps, _ = draft_pool.run(Next(), answer, draft_pool.Drafting(None, 0, 3, has_pool=True, fills=True), costs)
    assert num_steps < 20
