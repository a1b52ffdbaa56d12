"""Philox4x32-10: randomness as a function of (key, counter), with no generator state.

The counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Knows nothing of sampling beyond the one mapping from a draw's name to a random word for each token id.
"""

from __future__ import annotations

import numpy as np

PURPOSE_TOKEN = 0
"""Purpose word of the draw that picks an output token."""

PURPOSE_XTC = 1
"""Of the draw that decides whether the most likely tokens are left out."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32 on each row: counter uint32 [L, 4], key uint32 [L, 2], or [1, 2] for all -> uint32
    [L, 4]."""
    c0, c1, c2, c3 = (counter[:, word].astype(np.uint64) for word in range(4))
    k0, k1 = (key[:, word].astype(np.uint64) for word in range(2))
    for _ in range(10):
        left, right = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def words_of_ids(seed: int, choice: int, position: int, purpose: int, num_ids: int) -> np.ndarray:
    """The random word of each id: uint32 [num_ids]. key = (low, high) 32 bits of the seed; counter = (position, choice,
    purpose, id // 4), whose four words go to four ids."""
    num_blocks = -(-num_ids // 4)
    counter = np.empty((num_blocks, 4), np.uint32)
    counter[:, :3] = position, choice, purpose
    counter[:, 3] = np.arange(num_blocks)
    key = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    return philox4x32(counter, key).reshape(-1)[:num_ids]
