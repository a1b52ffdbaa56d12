"""Philox4x32-10: randomness as a function of (key, counter), with no generator state.

The counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Knows nothing of sampling beyond the one mapping from a draw's name to a uniform number.
"""

from __future__ import annotations

import numpy as np

PURPOSE_TOKEN = 0
"""Purpose word of the draw that picks an output token."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32 on each row: counter uint32 [L, 4], key uint32 [L, 2] -> uint32 [L, 4]."""
    c0, c1, c2, c3 = (counter[:, word].astype(np.uint64) for word in range(4))
    k0, k1 = (key[:, word].astype(np.uint64) for word in range(2))
    for _ in range(10):
        left, right = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seed_L: np.ndarray, choice_L: np.ndarray, position_L: np.ndarray, purpose: int) -> np.ndarray:
    """The number in [0, 1) that belongs to each draw: float64 [L], a multiple of 2^-24 (so exact in float32 too).

    key = (low, high) 32 bits of the seed; counter = (position, choice, purpose, 0); the top 24 bits of word 0 are used.
    """
    seed_L = np.asarray(seed_L, np.uint64)
    key = np.stack([seed_L & _LOW, seed_L >> _SHIFT], axis=1).astype(np.uint32)
    counter = np.zeros((len(seed_L), 4), np.uint32)
    counter[:, 0] = position_L
    counter[:, 1] = choice_L
    counter[:, 2] = purpose
    return (philox4x32(counter, key)[:, 0] >> np.uint32(8)) * 2.0**-24
