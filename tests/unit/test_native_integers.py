"""Quantised weights as integers, for kernels with tiles: near the exact product, and equal bits however rows meet."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ops_cases import raw_tensor, tile_backends

from tokenmill.ops.api import RawTensor
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import INTEGER_KINDS, KINDS
from tokenmill.ops.reference import ReferenceOps

pytestmark = [pytest.mark.exact, pytest.mark.skipif(available() is not None, reason=str(available()))]

SHAPES = [(16, 32), (48, 64), (40, 96), (33, 1536), (20, 1184)]
"""Rows that fill no tile; one group, an odd number of groups, several blocks of inputs, the last of them short."""


@pytest.fixture(scope="module")
def backends() -> Iterator[list[NativeOps]]:
    yield from tile_backends()


def matrix(rng: np.random.Generator, kind: str, num_rows: int, num_cols: int) -> RawTensor:
    """Blocks whose scales integers can hold: those of 8 bits are within a factor of five of each other."""
    raw = raw_tensor(rng, kind, num_rows, num_cols)
    if kind == "q8_0":
        scales = rng.uniform(0.0004, 0.002, (len(raw.data) // 34, 1)).astype(np.float16)
        raw.data.reshape(-1, 34)[:, :2] = scales.view(np.uint8)
    return raw


def exact(weight: RawTensor) -> np.ndarray:
    """The values that the stored blocks stand for."""
    reference = ReferenceOps()
    return reference.embed(reference.pack([weight]), np.arange(weight.num_rows, dtype=np.int32)).astype(np.float64)


@pytest.mark.parametrize("kind", INTEGER_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_alone_or_together_on_any_variant(backends: list[NativeOps], kind: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1])
    raw = matrix(rng, kind, *shape)
    x_TK = (rng.standard_normal((37, shape[1])) * np.exp(rng.standard_normal((37, 1)))).astype(np.float32)
    together = []
    for ops in backends:
        weight = ops.pack([raw])
        assert weight.part(0).kind == KINDS[INTEGER_KINDS[kind]]
        together.append(ops.linear(x_TK, weight))
        cuts = np.split(x_TK, [1, 3, 7, 12])
        assert np.array_equal(np.concatenate([ops.linear(rows, weight) for rows in cuts]), together[-1])
    for other in together[1:]:
        assert np.array_equal(other, together[0])
    wanted = x_TK.astype(np.float64) @ exact(raw).T
    error = np.sqrt(np.mean((together[0] - wanted) ** 2) / np.mean(wanted**2))
    assert error < 0.015, error


@pytest.mark.parametrize("num_cols", [320, 576, 1536])
def test_fitted_units_round_less(backends: list[NativeOps], num_cols: int) -> None:
    """Normally distributed weights as q4_0 are nearer to their values than if the largest took the whole range."""
    rng = np.random.default_rng(num_cols)
    values = rng.standard_normal((96, num_cols // 32, 32)) * np.exp(0.2 * rng.standard_normal((96, num_cols // 32, 1)))
    largest = np.take_along_axis(values, np.abs(values).argmax(-1, keepdims=True), -1)
    steps = (largest / -8).astype(np.float16)
    codes = np.clip(np.round(values / steps), -8, 7).astype(np.int8)
    bytes_ = (codes[..., :16] + 8 | codes[..., 16:] + 8 << 4).astype(np.uint8)
    raw = RawTensor("q4_0", 96, num_cols, np.concatenate([steps.view(np.uint8), bytes_], -1).reshape(-1))
    wanted = exact(raw).reshape(96, -1, 32)
    together = num_cols // 32 if num_cols <= 576 else 10
    plain = np.empty_like(wanted)
    for first in range(0, num_cols // 32, together):
        block = slice(first, first + together)
        unit = np.abs(steps[:, block].astype(np.float64)).max(1, keepdims=True) * 8 / 127
        multipliers = np.round(8 * steps[:, block] / unit)
        plain[:, block] = unit * np.floor(codes[:, block] * multipliers / 8 + 0.5)
    for ops in backends:
        weight = ops.pack([raw])
        rows = ops.linear(np.eye(num_cols, dtype=np.float32), weight).T.reshape(wanted.shape)
        assert np.mean((rows - wanted) ** 2) < 0.95 * np.mean((plain - wanted) ** 2)


def test_rows_as_wide_as_none_in_use(backends: list[NativeOps]) -> None:
    """What a pair of rows needs besides its inputs grows with their width."""
    raw = matrix(np.random.default_rng(5), "q8_0", 16, 1 << 17)
    x_TK = np.random.default_rng(6).standard_normal((5, 1 << 17)).astype(np.float32)
    for ops in backends:
        weight = ops.pack([raw])
        pairs = [ops.linear(rows, weight) for rows in np.split(x_TK, [2, 4])]
        assert np.array_equal(np.concatenate(pairs), ops.linear(x_TK, weight))


@pytest.mark.parametrize("kind", INTEGER_KINDS)
def test_rows_of_a_table_are_what_linears_multiply(backends: list[NativeOps], kind: str) -> None:
    """Activations of one value each have exact digits, so a product with them picks a column."""
    raw = matrix(np.random.default_rng(3), kind, 24, 352)
    for ops in backends:
        weight = ops.pack([raw])
        values = ops.embed(weight, np.arange(24, dtype=np.int32))
        np.testing.assert_allclose(ops.linear(np.eye(352, dtype=np.float32) * 127, weight).T, values * 127, rtol=1e-6)


def test_scales_too_far_apart_stay_as_they_are(backends: list[NativeOps]) -> None:
    """One group a thousand times the others would leave those no bits: kept in blocks, with the same values."""
    raw = raw_tensor(np.random.default_rng(4), "q4_0", 16, 128)
    scales = raw.data.reshape(16, 4, 18)[:, :, :2].copy().view(np.float16)[:, :, 0]
    scales[:, 0] *= 1000
    raw.data.reshape(16, 4, 18)[:, :, :2] = scales[:, :, None].view(np.uint8)
    wanted = exact(raw)
    for ops in backends:
        weight = ops.pack([raw])
        assert weight.part(0).kind == KINDS["q4_0"]
        assert np.array_equal(ops.embed(weight, np.arange(16, dtype=np.int32)), wanted.astype(np.float32))


def test_a_fit_that_is_known_packs_the_same(backends: list[NativeOps]) -> None:
    """Weights are fitted once, where it is asked whether they can be integers; packing takes that."""
    rng = np.random.default_rng(7)
    for ops in backends:
        for kind, integer in INTEGER_KINDS.items():
            parts = [matrix(rng, kind, 33, 1184), matrix(rng, kind, 7, 1184)]
            found = ops._packer._integer_kinds([(kind, parts)])
            assert found is not None and found[0][0] == integer and found[0][1] is not None
            known, anew = (
                ops._packer._pack_kind(integer, 1184, parts, fits, ops._weights.take) for fits in (found[0][1], None)
            )
            assert np.array_equal(known, anew), (ops.isa, kind)
