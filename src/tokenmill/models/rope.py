"""The table of RoPE cosines and sines, computed once per model in float64.

RoFormer (Su et al., 2021); 'linear' is position interpolation (Chen et al., 2023); 'llama3' is the wavelength-dependent
scaling published with Llama 3.1.
"""

from __future__ import annotations

import math

import numpy as np

from .config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int, factors: np.ndarray | None = None) -> np.ndarray:
    """Radians per position of each of the C/2 pairs, float64. `factors` (a checkpoint's own table) divide them."""
    frequencies = rope.base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        # 0 for wavelengths longer than original / low, 1 for those shorter than original / high
        kept = np.clip((rope.original_context / wavelengths - low) / (high - low), 0, 1)
        frequencies = (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies if factors is None else frequencies / factors


def rope_table(frequencies: np.ndarray, num_positions: int) -> np.ndarray:
    """float32 [P, C]: row p holds the cosines of the C/2 pairs, then the sines."""
    angles = np.arange(num_positions)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
