"""Trees of drafts against chains of them: what verifying several tokens for one place would gain (SpecInfer, arXiv
2305.09781; Sequoia, 2402.12374; EAGLE-2, 2406.16858). Part of `draft_study.py`.

A tree grows where it is likeliest to be right, so of any number of nodes these are the best ones. Both kinds are told
how likely each token is by the same drafter and pay alike for a row that is verified, as if attention knew trees for
nothing. A draft model computes a level of a tree in one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Any, NamedTuple

import numpy as np

from draft_answers import Answer

MOST, DEEPEST = 15, 15
"""Nodes that are verified in a step."""
_GROWN = 48
_MOST_SURE = 0.99
_OCCURRENCES, _LONGEST = 64, 24


class Node(NamedTuple):
    """chance: that it and all above it are right. depth: 0 is the token before. parent: place among the nodes."""

    chance: float
    depth: int
    parent: int
    is_right: bool


class Child(NamedTuple):
    share: float
    token: int
    state: Any


Children = Callable[[Any, Node], list[Child]]
"""Of a node in a state, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Root:
    """A place of an answer, where a step begins. truth: what comes."""

    state: Any
    children: Children
    deepest: int
    truth: Sequence[int]


def grow(root: Root, width: int, trust: float) -> list[Node]:
    """The likeliest nodes first. width: children of a node at most. trust: how many times as often as it says the
    drafter is right."""
    nodes: list[Node] = []
    heap: list[tuple[float, int, Any, Node]] = [(-1.0, 0, root.state, Node(1.0, 0, -1, True))]
    number = 0
    while heap and len(nodes) < _GROWN:
        _, _, state, node = heapq.heappop(heap)
        nodes.append(node)
        if node.depth == root.deepest:
            continue
        for share, token, following in root.children(state, node)[:width]:
            number += 1
            chance = node.chance * min(_MOST_SURE, trust * share)
            is_right = node.is_right and root.truth[node.depth : node.depth + 1] == [token]
            heapq.heappush(heap, (-chance, number, following, Node(chance, node.depth + 1, len(nodes) - 1, is_right)))
    return nodes


# ---- drafters ----


def suffix_roots(answers: Sequence[Answer]) -> Iterator[list[Root]]:
    """Of each answer. What followed the longest match, in earlier answers and the text itself, as often as it did."""
    others = np.empty(0, np.int64)
    for each in answers:
        text = np.concatenate([others, [-1], each.prompt, each.answer])
        first = len(text) - len(each.answer)
        roots = []
        for at in range(1, len(each.answer)):
            length, places = longest_match(text[: first + at])
            roots.append(Root(places, _followers(text[: first + at]), min(length, DEEPEST), each.answer[at:]))
        yield roots
        others = np.concatenate([others, [-1], each.answer])


def longest_match(text: np.ndarray) -> tuple[int, np.ndarray]:
    """How many tokens of the end occur earlier, at most, and behind which places, the latest last."""
    end = len(text) - 1
    places, length = np.flatnonzero(text[:end] == text[end]), 0
    while len(places) and length < _LONGEST:
        found, length = places, length + 1
        places = places[places >= length]
        places = places[text[places - length] == text[end - length]]
    return length, found[-_OCCURRENCES:] + 1 if length else places


def _followers(text: np.ndarray) -> Children:
    def children(places: np.ndarray, _: Node) -> list[Child]:
        places = places[places < len(text)]
        tokens = text[places]
        kinds, counts = np.unique(tokens, return_counts=True)
        latest = [int(np.flatnonzero(tokens == kind)[-1]) for kind in kinds]
        order = sorted(range(len(kinds)), key=lambda i: (-counts[i], -latest[i]))
        states = [(i, places[tokens == kinds[i]] + 1) for i in order if kinds[i] >= 0]
        return [Child(counts[i] / len(tokens), int(kinds[i]), state) for i, state in states]

    return children


def model_roots(answers: Sequence[Answer]) -> Iterator[list[Root]]:
    """Of each answer. What a draft model would say behind wrong tokens was not recorded: it is taken to be as sure
    there as behind right ones."""
    for each in answers:
        tops = [[Child(exp(logprob), token, None) for token, logprob in those] for those in each.tops]
        yield [Root(None, _likely(tops[at:]), DEEPEST, each.answer[at:]) for at in range(1, len(each.answer))]


def _likely(tops: Sequence[list[Child]]) -> Children:
    return lambda _, node: tops[node.depth] if node.depth < len(tops) else []


# ---- steps ----


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a step of the target, by its rows, and of one of the drafter; in steps of the target with one row."""

    verify: Sequence[float]
    draft: Sequence[float]

    def of(self, nodes: Sequence[Node]) -> float:
        parents: dict[int, set[int]] = {}
        for node in nodes[1:]:
            parents.setdefault(node.depth, set()).add(node.parent)
        return self.verify[len(nodes)] + sum(self.draft[len(those)] for those in parents.values())


def fixed(nodes: Sequence[Node], most: int, deepest: int) -> list[Node]:
    """The likeliest of them, and the root."""
    return [node for node in nodes if node.depth <= deepest][: most + 1]


def chosen(nodes: list[Node], prices: Prices) -> list[Node]:
    """As many, and as deep, as are expected to give the most tokens a second."""
    best, best_rate = nodes[:1], 1.0
    for deepest in range(1, 1 + max(node.depth for node in nodes)):
        shallow = fixed(nodes, MOST, deepest)
        num_right = 0.0
        for num, node in enumerate(shallow):
            num_right += node.chance
            rate = num_right / prices.of(shallow[: num + 1])
            if rate > best_rate:
                best, best_rate = shallow[: num + 1], rate
    return best


Grown = Sequence[Sequence[list[Node]]]
"""Of each answer and each of its places but the first."""


def walk(answers: Grown, prices: Prices, choose: Callable[[list[Node]], list[Node]]) -> tuple[float, float]:
    """Tokens a step, and tokens a second as a multiple of those without drafts."""
    num_steps, num_tokens, cost = 0, 0, 0.0
    for places in answers:
        at = 0
        while at < len(places):
            verified = choose(places[at])
            num_right = sum(node.is_right for node in verified)
            num_tokens += min(num_right, len(places) - at)
            cost += prices.of(verified)
            at, num_steps = at + num_right, num_steps + 1
    return num_tokens / num_steps, num_tokens / cost


def trust_in(answers: Sequence[Sequence[Root]]) -> float:
    """How many times as often as it says the drafter's first draft is right."""
    firsts = [nodes[1] for roots in answers for root in roots if len(nodes := grow(root, 1, 1.0)) > 1]
    return sum(node.is_right for node in firsts) / sum(node.chance for node in firsts)


def compare(answers: Sequence[Sequence[Root]], prices: Prices) -> dict[str, tuple[str, float, float]]:
    """By kind, and as many as pay best or as many as are expected to pay: how many, tokens a step, speed."""
    trust, found = trust_in(answers), dict[str, tuple[str, float, float]]()
    for kind, width in (("chain", 1), ("tree", 4)):
        grown = [[grow(root, width, trust) for root in roots] for roots in answers]
        shapes = [(most, deepest) for most in range(1, 9) for deepest in range(1, most + 1)]
        shapes = [shape for shape in shapes if width > 1 or shape[0] == shape[1]]
        walks = {shape: walk(grown, prices, partial(fixed, most=shape[0], deepest=shape[1])) for shape in shapes}
        best = max(walks, key=lambda shape: walks[shape][1])
        found[f"{kind}, fixed"] = (f"{best[0]}" if width == 1 else f"{best[0]}, {best[1]} deep", *walks[best])
        found[f"{kind}, chosen"] = ("", *walk(grown, prices, partial(chosen, prices=prices)))
    return found
