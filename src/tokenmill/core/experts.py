"""How many tokens each expert of a model computed, layer by layer, and what is said of such numbers.

A row of a step counts once for each expert that it is routed to, whatever becomes of it: prompts, drawn tokens, and the
rows of steps that are discarded. So the tokens of a layer are rows times experts of a row, less what adaptive top-k
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .cost import read_share


class WeightReads(NamedTuple):
    """What became of weights on disk so far. Experts that a step asked a layer for count once each: hits were in memory
    or on their way there, misses were not. guesses_read: those read ahead of their layer; guess_hits: of these, the
    asked for. bytes_read: of experts and other weights. waited_s: of all threads together, for something that came."""

    hits: int = 0
    misses: int = 0
    guesses_read: int = 0
    guess_hits: int = 0
    bytes_read: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What an engine has counted since it began. layers: the numbers of those that have experts, ascending. tokens: of
    each of these, what each expert computed. num_steps: that had been made by then, all of which count here; a later
    one may, too. reads: of weights that are kept on disk, those of a model without experts, too; None: none are."""

    layers: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    num_steps: int = 0
    reads: WeightReads | None = None

    def __post_init__(self) -> None:
        assert len(self.layers) == len(self.tokens), (self.layers, len(self.tokens))
        assert all(first < second for first, second in pairwise(self.layers)), self.layers
        assert len({len(each) for each in self.tokens}) <= 1, "layers differ in their numbers of experts"


def balancedness(tokens: Sequence[int]) -> float:
    """Of a layer: mean over maximum of what its experts computed. 1: all the same; 1 / experts: one did all. 1 where
    nothing was computed."""
    most = max(tokens, default=0)
    return sum(tokens) / (len(tokens) * most) if most else 1.0


def num_unused(tokens: Iterable[int]) -> int:
    """Experts of a layer that computed nothing."""
    return sum(not each for each in tokens)


def touched(num_experts: int, top_k: float, num_rows: float) -> float:
    """How many experts of a layer a step of so many rows is expected to use, if each row chooses top_k of them evenly
    and by itself: E * (1 - (1 - k / E) ** rows)."""
    return num_experts * read_share(min(1.0, top_k / num_experts), num_rows)
