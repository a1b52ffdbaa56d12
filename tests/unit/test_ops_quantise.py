"""Quantising at load: numpy's definition is near the values, and the native kernels give its bytes."""

from __future__ import annotations

import numpy as np
import pytest
from ops_cases import raw_tensor

from tokenmill.ops.api import QUANTISATIONS, RawTensor
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_weights import dequantise

NUM_ROWS, NUM_COLS = 37, 96


def matrix(kind: str) -> RawTensor:
    """Random values among which are rows of zeros, of one value, of both signs' extremes, and tiny ones."""
    raw = raw_tensor(np.random.default_rng(0), "f32", NUM_ROWS, NUM_COLS)
    values = raw.data.view(np.float32).reshape(NUM_ROWS, NUM_COLS).copy()
    values[0], values[1], values[2] = 0, 0.25, -0.25
    values[3, ::2], values[3, 1::2] = 1.5, -1.5
    values[4] *= 1e-7
    values[5] = np.abs(values[5])
    if kind == "bf16":
        stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        stored = values.astype({"f16": np.float16, "f32": np.float32}[kind])
    return RawTensor(kind, NUM_ROWS, NUM_COLS, stored.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("to", QUANTISATIONS)
def test_error_is_half_a_step(to: str) -> None:
    """Within half a step of the code (one, at the end of q4_0's lopsided range), plus float16's rounding of scales."""
    raw = matrix("f32")
    values, got = dequantise(raw), dequantise(ReferenceOps().quantise(raw, to))
    groups, got_groups = values.reshape(-1, 32), got.reshape(-1, 32)
    largest = np.abs(groups).max(axis=1)
    spread = groups.max(axis=1) - groups.min(axis=1)
    step = {"q8_0": largest / 127 / 2, "q4_0": largest / 8, "q4_1": spread / 15 / 2}.get(to, largest * 2.0**-8)
    bound = step * 1.001 + largest * 2.0**-9 + 2.0**-24 * 16
    assert (np.abs(got_groups - groups).max(axis=1) <= bound).all()
    assert not got[0].any()


@pytest.mark.parametrize("to", QUANTISATIONS)
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_native_gives_the_same_bytes(kind: str, to: str) -> None:
    ops = NativeOps(2)
    raw = matrix(kind)
    expected, got = ReferenceOps().quantise(raw, to), ops.quantise(raw, to)
    assert (got.kind, got.num_rows, got.num_cols) == (to, NUM_ROWS, NUM_COLS)
    assert np.array_equal(got.data, expected.data.reshape(-1))
    ops.close()


@pytest.mark.parametrize("to", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_native_rows_of_dense_kinds_may_have_any_length(kind: str, to: str) -> None:
    """The rest of a row, behind its whole groups of 32, is converted like them, and rows stay apart."""
    whole = matrix(kind)
    num_cols = NUM_COLS - 13
    row_bytes = whole.row_bytes // NUM_COLS * num_cols
    rows = np.ascontiguousarray(whole.data.reshape(NUM_ROWS, -1)[:, -row_bytes:])
    raw = RawTensor(kind, NUM_ROWS, num_cols, rows.reshape(-1))
    ops = NativeOps(2)
    assert np.array_equal(ops.quantise(raw, to).data, ReferenceOps().quantise(raw, to).data.reshape(-1))
    ops.close()
