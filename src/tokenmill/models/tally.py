"""What a model's experts compute, counted where it is computed: an array that each step adds to.

E experts  M layers that are mixtures of experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..core.experts import ExpertLoad
from .weights import LayerWeights, ModelWeights


@dataclass(frozen=True, slots=True)
class ExpertTally:
    """layers: numbers of those that are mixtures. counts: int64 [M, E], the rows that each expert computed; whoever
    computes adds to it, any thread may read."""

    layers: tuple[int, ...]
    counts_ME: np.ndarray

    def load(self) -> ExpertLoad:
        """So far. Costs a microsecond for each dozen of experts."""
        return ExpertLoad(self.layers, tuple(map(tuple, self.counts_ME.tolist())))


def with_tally(weights: ModelWeights) -> tuple[ModelWeights, ExpertTally | None]:
    """The same weights, whose experts count, and the counts; None of a model that has no experts."""
    moe = {index: layer.moe for index, layer in enumerate(weights.layers) if layer.moe is not None}
    if not moe:
        return weights, None
    num_experts = {each.experts.down.num_matrices for each in moe.values()}
    assert len(num_experts) == 1, f"layers of {num_experts} experts"
    tally = ExpertTally(tuple(moe), np.zeros((len(moe), *num_experts), np.int64))
    rows = dict(zip(tally.layers, tally.counts_ME, strict=True))
    layers = tuple(
        _counting(layer, rows[index]) if index in rows else layer for index, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=layers), tally


def _counting(layer: LayerWeights, counts_E: np.ndarray) -> LayerWeights:
    assert layer.moe is not None
    experts = replace(layer.moe.experts, tally=counts_E)
    return replace(layer, moe=replace(layer.moe, experts=experts))
