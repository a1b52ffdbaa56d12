"""The table of RoPE cosines and sines, computed once per model in float64.

RoFormer (Su et al., 2021); 'linear' is position interpolation (Chen et al., 2023); 'dynamic' and 'yarn' are described
in YaRN (Peng et al., 2023), 'longrope' in LongRoPE (Ding et al., 2024); 'llama3' is the wavelength-dependent scaling
published with Llama 3.1. Factors that depend on length are fixed by the number of positions the table is made for, so
that a position's cosines never change while a model is served; their digest is part of the numerics id. Queries that
grow with their position are those of Llama 4 (attention temperature tuning) and Ministral 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Angles of rotary embeddings: pair i of R/2 turns by position * base^(-2i/R), scaled.

    none      as it is
    linear    every frequency is divided by `factor`
    ntk       the base is multiplied by factor^(R / (R - 2)) (NTK-aware, whatever the context)
    dynamic   the base grows with the longest context served, beyond `original_context` (NTK-aware)
    yarn      frequencies that turn less than `slow_turns` times in `original_context` are divided by `factor`, those
              that turn more than `fast_turns` times are kept, and between them is a ramp over the pairs
    longrope  frequencies are divided by `short_divisors`, or by `long_divisors` where more than `original_context`
              positions are served
    llama3    as yarn, by wavelength against `original_context` / (low, high)_freq_factor
    proportional  of all pairs of a head only the first `share` turn, as fast as if all did; frequencies are divided by
              `factor` (Gemma 4)

    cos_scale   multiplies cosines and sines
    query_beta  the query at position p is multiplied by 1 + query_beta * log(1 + floor((p + f) / original_context))
    query_first f: the position that the first one counts as
    divisors    a checkpoint's own table, by which frequencies are divided whatever the scaling
    """

    base: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    share: float = 1.0
    whole_pairs: bool = True  # yarn: the ramp begins and ends at whole pairs
    cos_scale: float = 1.0
    query_beta: float = 0.0
    query_first: int = 0
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Of a layer, in a backend's memory. turns: see rope_table; None: nothing turns. query_scales: see
    query_scale_table; None: there are none."""

    turns_PR: Any
    query_scales_PC: Any = None


def rope_frequencies(rope: RopeConfig, num_turned: int, num_positions: int = 0) -> np.ndarray:
    """Radians per position of each of the R/2 pairs, float64, in a model that serves `num_positions` positions."""
    base = rope.base
    stretch = rope.factor if rope.scaling == "ntk" else 1.0
    if rope.scaling == "dynamic":
        length = max(num_positions, rope.original_context)
        stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
    if stretch != 1 and num_turned > 2:
        base *= stretch ** (num_turned / (num_turned - 2))
    frequencies = base ** (-np.arange(0, num_turned, 2, dtype=np.float64) / num_turned)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "proportional":
        turns = np.arange(num_turned // 2) < int(rope.share * num_turned // 2)
        frequencies = np.where(turns, frequencies / rope.factor, 0.0)
    elif rope.scaling == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        # 0 for wavelengths longer than original / low, 1 for those shorter than original / high
        kept = np.clip((rope.original_context / wavelengths - low) / (high - low), 0, 1)
        frequencies = (1 - kept) * frequencies / rope.factor + kept * frequencies
    elif rope.scaling == "yarn":
        kept = _yarn_share(rope, num_turned)
        frequencies = (1 - kept) * frequencies / rope.factor + kept * frequencies
    elif rope.scaling == "longrope":
        long = num_positions > rope.original_context
        frequencies = frequencies / np.array(rope.long_divisors if long else rope.short_divisors)
    return frequencies / np.array(rope.divisors) if rope.divisors else frequencies


def _yarn_share(rope: RopeConfig, num_turned: int) -> np.ndarray:
    """How much of each pair's own frequency is kept: 1 for the fast pairs, falling over a ramp to 0."""

    def pair_that_turns(times: float) -> float:
        radians = rope.original_context / (times * 2 * math.pi)
        return num_turned * math.log(radians) / (2 * math.log(rope.base))

    first, last = pair_that_turns(rope.fast_turns), pair_that_turns(rope.slow_turns)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, num_turned - 1)
    width = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(num_turned // 2) - first) / width, 0, 1)


_TABLE_ROWS = 256
"""Of a table that are made at a time: their angles stay in the core's cache."""


def rope_table(frequencies: np.ndarray, num_positions: int, scale: float = 1.0) -> np.ndarray:
    """float32 [P, R]: row p holds the cosines of the R/2 pairs, then the sines, times `scale`."""
    num_pairs = len(frequencies)
    table_PR = np.empty((num_positions, 2 * num_pairs), np.float32)
    for first in range(0, num_positions, _TABLE_ROWS):
        angles = np.arange(first, min(first + _TABLE_ROWS, num_positions))[:, None] * frequencies
        rows = table_PR[first : first + _TABLE_ROWS]
        rows[:, :num_pairs] = scale * np.cos(angles)
        rows[:, num_pairs:] = scale * np.sin(angles)
    return table_PR


def query_scale_table(rope: RopeConfig, head_dim: int, num_positions: int) -> np.ndarray | None:
    """float32 [P, C], in the form of rope_table, so that a rotation by it scales: the factor of a position's query as
    cosines, and sines of 0. None where each of `num_positions` positions has a factor of 1."""
    if not _scales_queries(rope, num_positions):
        return None
    table = np.zeros((num_positions, head_dim), np.float32)
    table[:, : head_dim // 2] = 1 + rope.query_beta * np.log1p(
        (np.arange(num_positions)[:, None] + rope.query_first) // rope.original_context
    )
    return table


def table_bytes(ropes: Iterable[tuple[RopeConfig, int, int]], num_positions: int) -> int:
    """What the tables take of layers with these, each once: rope_table and query_scale_table. ropes: with the channels
    of a head that turn, and all of them."""
    widths = (
        turned * bool(rope.share) + (head_dim if _scales_queries(rope, num_positions) else 0)
        for rope, turned, head_dim in ropes
    )
    return 4 * num_positions * sum(widths)


def _scales_queries(rope: RopeConfig, num_positions: int) -> bool:
    return bool(rope.query_beta) and num_positions + rope.query_first > rope.original_context
