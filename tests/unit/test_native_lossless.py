"""Matrices of bf16 packed without loss: fewer bytes, and the bits of plain ones, whatever values they hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from ops_cases import activations, raw_tensor

from tokenmill.ops.api import RawTensor
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.direct import batch_of, run_forward
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas

pytestmark = [pytest.mark.exact, pytest.mark.skipif(available() is not None, reason=str(available()))]

SHAPES = [(16, 8), (24, 20), (33, 608), (80, 1217), (600, 576), (1536, 1090)]
"""One group of inputs, fewer outputs than tiles have, an odd end of inputs, units of many tiles, blocks of inputs."""
ROWS = (1, 3, 4, 5, 29)


@pytest.fixture(scope="module", params=available_isas(ISAS) if available() is None else ["none"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[NativeOps, NativeOps]]:
    """Of one instruction set: plain, and without loss."""
    made = NativeOps(2, request.param), NativeOps(2, request.param, lossless=True)
    yield made
    for ops in made:
        ops.close()


def trained(rng: np.random.Generator, num_rows: int, num_cols: int, *, finite: bool = True) -> RawTensor:
    """Normal values of few exponents, and among them values of all: zeros, subnormal numbers and, unless finite,
    infinities and NaN."""
    raw = raw_tensor(rng, "bf16", num_rows, num_cols)
    values = raw.data.view(np.uint16).reshape(num_rows, num_cols)
    normal = (0.02 * rng.standard_normal(values.shape)).astype(np.float32)
    values[:] = normal.view(np.uint32) >> 16
    rare = rng.random(values.shape) < 0.002
    exponents = rng.integers(0, 140 if finite else 256, values.shape)
    values[rare] = (values & 0x807F | exponents << 7)[rare]
    return raw


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.int32), np.ascontiguousarray(b).view(np.int32))


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_have_the_bits_of_plain_weights(
    pair: tuple[NativeOps, NativeOps], shape: tuple[int, int], finite: bool
) -> None:
    rng = np.random.default_rng(shape[1])
    raw = trained(rng, *shape, finite=finite)
    plain, packed = (ops.pack([raw]) for ops in pair)
    assert packed.parts[0].kind != plain.parts[0].kind
    if shape[1] >= 576:
        assert packed.num_bytes <= 0.77 * plain.num_bytes
    for num_rows in ROWS:
        x_TK = activations(rng, num_rows, shape[1])
        with np.errstate(invalid="ignore"):
            assert same_bits(pair[1].linear(x_TK, packed), pair[0].linear(x_TK, plain)), num_rows


def test_rows_of_a_table(pair: tuple[NativeOps, NativeOps]) -> None:
    raw = trained(np.random.default_rng(1), 75, 203, finite=False)
    ids = np.arange(75, dtype=np.int32)
    plain, packed = (ops.embed(ops.pack([raw]), ids) for ops in pair)
    assert same_bits(packed, plain)


def test_residuals_and_gates_in_one_program(pair: tuple[NativeOps, NativeOps]) -> None:
    """Sums that are added in place, over more inputs than are unpacked at once."""
    rng = np.random.default_rng(7)
    both, down = trained(rng, 2 * 2304, 96), trained(rng, 96, 2304)
    for num_rows in (1, 5, 40):
        x_TK = activations(rng, num_rows, 96)
        found = []
        for ops in pair:
            weights = ops.pack([both]), ops.pack([down])

            def part(rec: Any, batch: Any, x: Any, weights: Any = weights) -> Any:
                return rec.add(x, rec.linear(rec.silu_mul(rec.linear(x, weights[0])), weights[1]))

            found.append(run_forward(ops, partial(part, x=x_TK), batch_of(num_rows)))
        assert same_bits(*found), num_rows


def test_what_has_too_many_exponents_stays_as_it_is(pair: tuple[NativeOps, NativeOps]) -> None:
    rng = np.random.default_rng(3)
    raw = trained(rng, 48, 320)
    raw.data.view(np.uint16)[16 * 320 : 32 * 320] = rng.integers(0, 1 << 14, 16 * 320)
    plain, packed = (ops.pack([raw]) for ops in pair)
    assert packed.parts[0].kind == plain.parts[0].kind and packed.num_bytes == plain.num_bytes
    x_TK = activations(rng, 3, 320)
    assert same_bits(pair[1].linear(x_TK, packed), pair[0].linear(x_TK, plain))


def test_a_matrix_unit_takes_plain_weights() -> None:
    raw = trained(np.random.default_rng(4), 32, 64)
    for isa in available_isas(TILE_ISAS):
        ops = NativeOps(1, isa, lossless=True)
        assert ops.pack([raw]).num_bytes == 32 * 64 * 2
        ops.close()
