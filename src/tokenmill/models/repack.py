"""From any stored matrix to one the kernels take: the same codes in our blocks, wherever codes can be kept.

Integer codes are moved, never made anew; scales and minimums are rounded once, to float16. Where a scale would lose
more than float16's own precision (it is far below the matrix's largest), the matrix is kept as float32 instead.

    stored                                    kernels        what changes
    f32 f16 bf16 q4_0 q4_1 q8_0               as stored      nothing
    q5_0 iq4_nl mxfp4                         q8_0           nothing (scales are float16 or powers of two)
    q5_1                                      q8_m           nothing
    q4_k                                      q4_1           products of scales are rounded
    q5_k                                      q8_m           products of scales are rounded
    q3_k q6_k iq1_m iq2_xs iq2_s nvfp4        q8_h           products of scales are rounded
    q2_k                                      q8_hm          products of scales are rounded
    iq1_s iq2_xxs iq3_xxs iq3_s iq4_xs q8_k   q8_0           products of scales are rounded
    tq1_0 tq2_0                               q4_0           nothing
    4-bit integers, groups of 32 n            q4_0 or q4_1   scales of other types, and minimums, are rounded
    8-bit integers, groups of 32 n            q8_0 or q8_m   scales of other types, and minimums, are rounded
    act-order, 8-bit floats                   f16            values are rounded
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..formats.blocks import READERS
from ..formats.ggml import dequantise, read_codes
from ..formats.integers import IntegerMatrix, read_quantised
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import BLOCK_LAYOUT, Tensor
from ..ops.api import BLOCK_BYTES, GROUP, RawTensor

DENSE_KINDS = frozenset({"f32", "f16", "bf16"})
DIRECT_KINDS = DENSE_KINDS | {"q4_0", "q4_1", "q8_0"}
BLOCK_KINDS = {
    "q2_k": "q8_hm", "q3_k": "q8_h", "q4_k": "q4_1", "q5_k": "q8_m", "q6_k": "q8_h", "q5_0": "q8_0", "q5_1": "q8_m",
    "q8_1": "q8_0", "q8_k": "q8_0", "iq1_s": "q8_0", "iq1_m": "q8_h", "iq2_xxs": "q8_0", "iq2_xs": "q8_h",
    "iq2_s": "q8_h", "iq3_xxs": "q8_0", "iq3_s": "q8_0", "iq4_nl": "q8_0", "iq4_xs": "q8_0", "mxfp4": "q8_0",
    "nvfp4": "q8_h", "tq1_0": "q4_0", "tq2_0": "q4_0",
}  # fmt: skip
"""Stored block format -> the kind of block its codes go into."""

_SMALLEST_SHARE = np.float32(2.0**-11)


def raw_matrix(tensor: Tensor | QuantisedTensor) -> RawTensor:
    """The matrix as the kernels take it."""
    num_rows, num_cols = tensor.shape
    if isinstance(tensor, QuantisedTensor):
        matrix = read_quantised(tensor)
        if isinstance(matrix, IntegerMatrix):
            return _from_integers(matrix)
        return _dense("f16" if np.abs(matrix).max() < 65504 else "f32", matrix)
    if tensor.kind in DIRECT_KINDS:
        return RawTensor(tensor.kind, num_rows, num_cols, np.frombuffer(tensor.data, np.uint8))
    if tensor.kind in READERS and num_cols % GROUP == 0:
        raw = _from_blocks(tensor)
        if raw is not None:
            return raw
    return _dense("f32", dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(num_rows, num_cols))


def packed_kind(tensor: Tensor | QuantisedTensor) -> str:
    """The kind that `raw_matrix` is expected to give, without reading anything."""
    if not isinstance(tensor, QuantisedTensor):
        return tensor.kind if tensor.kind in DIRECT_KINDS else BLOCK_KINDS.get(tensor.kind, "f32")
    if tensor.layout == "float":
        return "f16"
    return "q4_0 or q4_1" if tensor.bits == 4 else "q8_0 or q8_m"


def _dense(kind: str, values_NK: NDArray[np.float32]) -> RawTensor:
    stored = np.ascontiguousarray(values_NK, np.float16 if kind == "f16" else np.float32)
    num_rows, num_cols = values_NK.shape
    return RawTensor(kind, num_rows, num_cols, stored.view(np.uint8).reshape(-1))


def _from_blocks(tensor: Tensor) -> RawTensor | None:
    kind = BLOCK_KINDS[tensor.kind]
    block_bytes, per_block = BLOCK_BYTES[kind], BLOCK_LAYOUT[tensor.kind][0] // GROUP
    out = np.empty((tensor.num_values // GROUP, block_bytes), np.uint8)
    for first, codes in read_codes(tensor.kind, tensor.data, tensor.num_values):
        places = slice(first * per_block, (first + len(codes.codes_bv)) * per_block)
        if not _encode(kind, codes.codes_bv, codes.scales_bg, codes.minimums_bg, out[places]):
            return None
    num_rows, num_cols = tensor.shape
    return RawTensor(kind, num_rows, num_cols, out.reshape(-1))


def _from_integers(matrix: IntegerMatrix) -> RawTensor:
    num_rows, num_cols = matrix.codes_NK.shape
    group_size = num_cols // matrix.scales_NG.shape[1]
    if group_size % GROUP == 0:
        affine = matrix.minimums_NG is not None
        kind = ("q4_1" if affine else "q4_0") if matrix.bits == 4 else "q8_m" if affine else "q8_0"
        out = np.empty((num_rows * (num_cols // GROUP), BLOCK_BYTES[kind]), np.uint8)
        if _encode(kind, matrix.codes_NK, matrix.scales_NG, matrix.minimums_NG, out):
            return RawTensor(kind, num_rows, num_cols, out.reshape(-1))
    return _dense("f16" if group_size % GROUP else "f32", matrix.values())


def _encode(
    kind: str,
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    minimums: NDArray[np.float32] | None,
    out: NDArray[np.uint8],
) -> bool:
    """Write blocks of 32; False where a scale or minimum cannot be a float16."""
    num_halves = 2 if kind in ("q8_h", "q8_hm") else 1
    repeats = codes.shape[1] // scales.shape[1] * num_halves // GROUP
    at = 0
    for values in (scales, minimums):
        if values is None:
            continue
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        lost = np.abs(rounded.astype(np.float32) - values).max(initial=0)
        if not lost <= np.abs(values).max(initial=0) * _SMALLEST_SHARE:
            return False
        halves = rounded.repeat(repeats, axis=1).reshape(len(out), num_halves)
        out[:, at : at + 2 * num_halves] = halves.view(np.uint8)
        at += 2 * num_halves
    codes = codes.reshape(len(out), GROUP)
    if kind in ("q4_0", "q4_1"):
        nibbles = (codes + np.int8(8) if kind == "q4_0" else codes).view(np.uint8)
        out[:, at:] = nibbles[:, : GROUP // 2] | nibbles[:, GROUP // 2 :] << 4
    else:
        out[:, at:] = codes.view(np.uint8)
    return True
