"""Attention on tiles at the borders of bf16: the matrix unit, the vector unit that stands in for it where there are few
queries, and the plain loops that define both give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_cases import Sequences

from tokenmill.core.block import KVGroup
from tokenmill.ops.api import HeadGeometry
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import TILE_ISAS, available_isas

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

CONTEXTS = (300, 40, 1)


def _sign_and_fraction(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.integers(0, 1 << 16, shape) & 0x807F).astype(np.uint16)


def _with_exponents(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Random bf16 bits with exponents from 2^low to 2^(high - 1); -127: subnormal numbers and zeros."""
    return _sign_and_fraction(rng, shape) | (rng.integers(low + 127, high + 127, shape) << 7).astype(np.uint16)


def _cancelling(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Large numbers, half of them the negative of another."""
    values = _with_exponents(rng, shape, 0, 8).reshape(-1)
    values[1::2] = np.where(rng.random(len(values) // 2) < 0.7, values[::2] ^ 0x8000, values[1::2])
    return values.reshape(shape)


def _with_infinities(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.01, np.uint16(0x7F80), _with_exponents(rng, shape, -4, 4))


BITS = {
    "subnormal": lambda rng, shape: _with_exponents(rng, shape, -127, -120),
    "products become subnormal": lambda rng, shape: _with_exponents(rng, shape, -127, -60),
    "every exponent": lambda rng, shape: _with_exponents(rng, shape, -127, 60),
    "cancelling": _cancelling,
    "infinite": _with_infinities,
}


@pytest.mark.parametrize("highest_key", [1, 6], ids=["alike", "apart"])  # scores: some are out of reach of others
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("heads", [HeadGeometry(3, 1, 64), HeadGeometry(20, 1, 40), HeadGeometry(5, 5, 32)], ids=str)
def test_extreme_values_give_the_same_bits(bits: str, heads: HeadGeometry, highest_key: int) -> None:
    """Single rows and a prompt's, over values at the edges of what bf16 holds."""
    results: list[list[np.ndarray]] = []
    for isa in available_isas(TILE_ISAS):
        rng = np.random.default_rng(11)
        ops: Any = NativeOps(2, isa)
        group = KVGroup("full", 1, heads.num_kv_heads, heads.head_dim, 16, "bf16")
        sequences = Sequences.scatter(rng, list(CONTEXTS), 16)
        keys, values = np.split(
            np.empty((sequences.num_blocks, group.bytes_per_block), np.uint8).view(np.uint16), 2, axis=1
        )
        keys = _with_exponents(rng, keys.shape, -6, highest_key)
        values = BITS[bits](rng, values.shape)
        kv = ops.bind_kv(np.ascontiguousarray(np.concatenate([keys, values], axis=1)).view(np.uint8), group)
        got = []
        for counts in ((1, 1, 1), (40, 3, 1)):
            rows = [
                (s, [0] * length, length - count)
                for s, (length, count) in enumerate(zip(CONTEXTS, counts, strict=True))
            ]
            batch = sequences.batch(rows)
            qkv = rng.standard_normal((len(batch.tokens_T), heads.width)).astype(np.float32)
            got.append(ops.paged_attention(kv, 0, qkv, batch, heads, 1.0))
        results.append(got)
        ops.close()
    for other in results[1:]:
        for one, expected in zip(other, results[0], strict=True):
            assert np.isfinite(expected).any() and expected.any()
            numbers = ~np.isnan(expected)
            assert np.array_equal(numbers, ~np.isnan(one))
            assert np.array_equal(one.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
