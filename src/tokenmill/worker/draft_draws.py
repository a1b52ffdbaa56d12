"""How a drafter draws: as the sequence that it drafts for does, so that the two agree as often as can be.

Draws race by the same exponential times as the target's, those of (seed, choice, position, id), by which two
distributions draw alike as often as can be without knowing each other (Daliri et al., arXiv 2408.07978). What changes
logits before a draw, as penalties do, drafters know nothing of.

    L draws
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.sampling import FILTERS
from ..core.step import Introduction
from ..ops.draws import COLUMN_DTYPES, SampleBatch

_COLUMNS = tuple(name for name in COLUMN_DTYPES if name != "position" and name not in FILTERS)


@dataclass(frozen=True, slots=True)
class HowItDraws:
    """Of a sequence: its columns of SampleBatch, and those of its filters that are on."""

    num_prompt: int
    columns: dict[str, float | int]
    filters: dict[str, float | int]

    @classmethod
    def of(cls, intro: Introduction) -> HowItDraws:
        params = intro.sampling
        columns = {name: getattr(params, name) for name in _COLUMNS if name not in ("seed", "choice")}
        return cls(
            len(intro.prompt_tokens),
            columns | {"seed": intro.seed % 2**64, "choice": intro.choice},
            {name: getattr(params, name) for name, (_, off) in FILTERS.items() if getattr(params, name) != off},
        )


def how_they_draw(sequences: Sequence[HowItDraws], positions: Sequence[int]) -> SampleBatch:
    """Of each sequence a token at its position."""
    columns = {
        f"{name}_L": np.array([seq.columns[name] for seq in sequences], COLUMN_DTYPES[name]) for name in _COLUMNS
    }
    filters: dict[str, np.ndarray] = {}
    if any(seq.filters for seq in sequences):
        for name, (_, off) in FILTERS.items():
            filters[name] = np.array([seq.filters.get(name, off) for seq in sequences], COLUMN_DTYPES[name])
    outputs = [position - seq.num_prompt for seq, position in zip(sequences, positions, strict=True)]
    return SampleBatch(**columns, position_L=np.array(outputs, np.int32), filters=filters)
