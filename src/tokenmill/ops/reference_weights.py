"""What the numbers of a weight mean: raw matrices to float32 and back to blocks, and how a linear rounds its inputs.

T tokens  K inputs  N outputs  b blocks  h halves of a block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .api import CODE_OFFSETS, CODE_VALUES, EXACT_FACTORS, GROUP, QUANTISATIONS, RawTensor, same_order
from .reference_kv import from_stored, to_stored

DENSE_KINDS = ("f32", "f16", "bf16")
_BLOCKS = {
    "q4_0": np.dtype([("d", "<f2", (1,)), ("q", "u1", 16)]),
    "q4_1": np.dtype([("d", "<f2", (1,)), ("m", "<f2", (1,)), ("q", "u1", 16)]),
    "q8_0": np.dtype([("d", "<f2", (1,)), ("q", "i1", 32)]),
    "q8_m": np.dtype([("d", "<f2", (1,)), ("m", "<f2", (1,)), ("q", "i1", 32)]),
    "q8_h": np.dtype([("d", "<f2", 2), ("q", "i1", 32)]),
    "q8_hm": np.dtype([("d", "<f2", 2), ("m", "<f2", 2), ("q", "i1", 32)]),
    "q5_0": np.dtype([("d", "<f2", (1,)), ("q", "u1", 16), ("upper", "u1", 4)]),
    "mxfp4": np.dtype([("exponent", "u1", (1,)), ("q", "u1", 16)]),
    "iq4_nl": np.dtype([("d", "<f2", (1,)), ("q", "u1", 16)]),
}
_SUPERBLOCKS = {
    "q2_k": np.dtype([("d", "<f2", (1,)), ("m", "<f2", (1,)), ("factors", "u1", 16), ("g", [("q", "u1", (2, 4))], 8)]),
    "q3_k": np.dtype([("d", "<f2", (1,)), ("factors", "<u4", 3), ("g", [("q", "u1", (2, 4)), ("upper", "u1", 4)], 8)]),
    "q4_k": np.dtype([("d", "<f2", (1,)), ("m", "<f2", (1,)), ("factors", "<u4", 3), ("g", [("q", "u1", 16)], 8)]),
    "q5_k": np.dtype(
        [("d", "<f2", (1,)), ("m", "<f2", (1,)), ("factors", "<u4", 3), ("g", [("q", "u1", 16), ("upper", "u1", 4)], 8)]
    ),
    "q6_k": np.dtype([("d", "<f2", (1,)), ("factors", "u1", 16), ("g", [("q", "u1", 16), ("upper", "u1", (2, 4))], 8)]),
}
_SMALLEST_GROUP_MAX = np.float32(1e-30)
_SMALLEST_BF16_FACTOR = np.float32(2.0**-56)


@dataclass(frozen=True, slots=True)
class ReferenceWeight:
    """Consecutive runs of rows, dequantised: (float32 [rows, K], what activations are rounded to for them)."""

    runs: tuple[tuple[np.ndarray, str], ...]
    num_rows: int
    num_cols: int
    num_bytes: int
    order: np.ndarray | None = None


def pack(parts: Sequence[RawTensor]) -> ReferenceWeight:
    num_cols = parts[0].num_cols
    assert all(part.num_cols == num_cols for part in parts), [part.num_cols for part in parts]
    assert same_order(parts), "columns in different orders"
    values_NK = np.empty((sum(part.num_rows for part in parts), num_cols), np.float32)
    runs: list[tuple[int, int, str]] = []  # first row, end row, activations
    end = 0
    for part in parts:
        first, end = end, end + part.num_rows
        rounding = {"f32": "f32", "f16": "f32", "bf16": "bf16"}.get(part.kind, "int8")
        values_NK[first:end] = dequantise(part)
        if runs and runs[-1][2] == rounding:
            first = runs.pop()[0]
        runs.append((first, end, rounding))
    views = tuple((values_NK[first:end], rounding) for first, end, rounding in runs)
    return ReferenceWeight(views, len(values_NK), num_cols, values_NK.nbytes, parts[0].order)


def quantise(part: RawTensor, kind: str) -> RawTensor:
    assert kind in QUANTISATIONS and part.kind in DENSE_KINDS, (part.kind, kind)
    x_NK = dequantise(part)
    if kind in ("f16", "bf16"):
        data = to_stored(x_NK, kind).view(np.uint8)
        return RawTensor(kind, part.num_rows, part.num_cols, data.reshape(-1))
    x_bk = x_NK.reshape(-1, GROUP)
    least_b1, most_b1 = x_bk.min(axis=1, keepdims=True), x_bk.max(axis=1, keepdims=True)
    furthest_b1 = np.where(most_b1 >= -least_b1, most_b1, least_b1)
    blocks = np.empty(len(x_bk), _BLOCKS[kind])
    if kind == "q8_0":
        blocks["d"] = np.abs(furthest_b1) / np.float32(127)
        blocks["q"] = _codes(x_bk, blocks["d"], -127, 127)
    elif kind == "q4_0":
        blocks["d"] = furthest_b1 / np.float32(-8) + np.float32(0)  # a zero has no sign
        blocks["q"] = _pack_nibbles(_codes(x_bk, blocks["d"], -8, 7) + 8)
    else:
        blocks["d"], blocks["m"] = (most_b1 - least_b1) / np.float32(15), least_b1 + np.float32(0)
        blocks["q"] = _pack_nibbles(_codes(x_bk - blocks["m"].astype(np.float32), blocks["d"], 0, 15))
    return RawTensor(kind, part.num_rows, part.num_cols, blocks.view(np.uint8))


def dequantise(part: RawTensor) -> np.ndarray:
    """float32 [num_rows, num_cols] of a raw matrix. In the 4-bit kinds byte j of a block's codes holds value j in its
    low half and value j + 16 in its high half."""
    shape = (part.num_rows, part.num_cols)
    data = part.data.reshape(-1)
    if part.kind == "f32":
        return data.view("<f4").reshape(shape)
    if part.kind == "f16":
        return data.view("<f2").astype(np.float32).reshape(shape)
    if part.kind == "bf16":
        return from_stored(data.view("<u2"), "bf16").reshape(shape)
    if part.kind in _SUPERBLOCKS:
        return _of_superblocks(part.kind, data.view(_SUPERBLOCKS[part.kind])).reshape(shape)
    assert part.kind in _BLOCKS, f"kind {part.kind} is not one that ops take"
    assert part.num_cols % GROUP == 0, f"{part.kind} rows hold whole groups of {GROUP}, got {part.num_cols} columns"
    blocks = data.view(_BLOCKS[part.kind])
    codes = _codes_of(part.kind, blocks)
    if part.kind == "mxfp4":
        scales_bh = (blocks["exponent"].astype(np.uint32) << 23).view(np.float32)
    else:
        scales_bh = blocks["d"].astype(np.float32)
    values_bhk = codes.reshape(len(blocks), scales_bh.shape[1], -1) * scales_bh[:, :, None]
    if "m" in (blocks.dtype.names or ()):
        values_bhk += blocks["m"].astype(np.float32)[:, :, None]
    return values_bhk.reshape(shape)


def _codes_of(kind: str, blocks: np.ndarray) -> np.ndarray:
    """float32 [blocks, 32]; see RawTensor."""
    if blocks["q"].shape[1] == GROUP:
        whole: np.ndarray = blocks["q"].astype(np.float32)
        return whole
    lower_bits = 2 if kind in ("q2_k", "q3_k") else 4
    codes = _pairs_of_bits(blocks["q"]) if lower_bits == 2 else _nibbles(blocks["q"])
    if kind in CODE_VALUES:
        return CODE_VALUES[kind][codes.astype(np.uint8)].astype(np.float32)
    if kind == "q6_k":
        codes += 16 * _pairs_of_bits(blocks["upper"])
    elif kind in ("q3_k", "q5_0", "q5_k"):
        upper = blocks["upper"][:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes += 2**lower_bits * upper.reshape(len(blocks), GROUP).astype(np.float32)
    return codes - CODE_OFFSETS[kind]


def _of_superblocks(kind: str, blocks: np.ndarray) -> np.ndarray:
    """float32 [blocks, groups, values of one]; see RawTensor."""
    codes = _codes_of(kind, blocks["g"].reshape(-1)).reshape(len(blocks), -1)

    def products(name: str, factors_bg: np.ndarray) -> np.ndarray:
        made: np.ndarray = blocks[name].astype(np.float32) * factors_bg.astype(np.float32)
        rounded = made if kind in EXACT_FACTORS else made.astype(np.float16).astype(np.float32)
        return rounded[:, :, None]

    factors_b16 = blocks["factors"]
    if factors_b16.shape[1] == 3:
        factors_b16 = _six_bits(factors_b16)
    factors_b16 = factors_b16.astype(np.int32)
    if kind == "q2_k":
        scales_bg, minimums_bg = factors_b16 & 15, factors_b16 >> 4
    elif kind in ("q3_k", "q6_k"):
        scales_bg = factors_b16 - (128 if kind == "q6_k" else 32)
    else:
        scales_bg, minimums_bg = factors_b16[:, ::2], factors_b16[:, 1::2]
    values_bgk = codes.reshape(*scales_bg.shape, -1) * products("d", scales_bg)
    return values_bgk + products("m", minimums_bg) if "m" in (blocks.dtype.names or ()) else values_bgk


def _six_bits(words_b3: np.ndarray) -> np.ndarray:
    """The sixteen factors in three words of a super-block."""
    fourth_b1 = np.bitwise_or.reduce(words_b3 >> 24 << np.array([0, 8, 16], np.uint32), axis=1, keepdims=True)
    words_b4 = np.concatenate([words_b3, fourth_b1], axis=1)
    return (words_b4[:, :, None] >> np.array([0, 6, 12, 18], np.uint32) & 63).reshape(len(words_b3), 16)


def round_activations(x_TK: np.ndarray, rounding: str = "int8") -> np.ndarray:
    """x as a linear reads it: f32 as it is; bf16 rounded to nearest even, below 2^-56 zero; or after a trip through
    int8: per 32 consecutive values of a row, q = round-half-even(x * (127 / max|x|)) and x' = q * (max|x| / 127). A
    group whose max|x| is below 1e-30 becomes zero."""
    if rounding == "f32":
        return x_TK
    if rounding == "bf16":
        rounded_TK = from_stored(to_stored(x_TK, "bf16"), "bf16")
        return np.where(np.abs(x_TK) < _SMALLEST_BF16_FACTOR, np.float32(0), rounded_TK)
    groups_TgK = x_TK.reshape(len(x_TK), x_TK.shape[1] // GROUP, GROUP)
    max_Tg1 = np.abs(groups_TgK).max(axis=-1, keepdims=True)
    inverse_Tg1: np.ndarray = np.where(
        max_Tg1 < _SMALLEST_GROUP_MAX, 0, np.float32(127) / np.maximum(max_Tg1, _SMALLEST_GROUP_MAX)
    )
    rounded_TgK: np.ndarray = np.rint(groups_TgK * inverse_Tg1) * (max_Tg1 / np.float32(127))
    return rounded_TgK.reshape(x_TK.shape)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 16] -> float32 [blocks, 32], low halves first."""
    out = np.empty((len(packed), 32), np.float32)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4
    return out


def _pairs_of_bits(bytes_bh4: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 2, 4] -> float32 [blocks, 32]: byte j of a half holds values j, 4 + j, 8 + j, 12 + j of it, from
    the lowest two bits up."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (bytes_bh4[:, :, None] >> shifts & 3).reshape(len(bytes_bh4), GROUP).astype(np.float32)


def _codes(x_bk: np.ndarray, scales_b1: np.ndarray, least: int, most: int) -> np.ndarray:
    """int32 codes of x / scale; 0 where the scale is 0."""
    scales_b1 = scales_b1.astype(np.float32)
    inverse_b1 = np.divide(np.float32(1), scales_b1, out=np.zeros_like(scales_b1), where=scales_b1 != 0)
    return np.clip(np.rint(x_bk * inverse_b1), least, most).astype(np.int32)


def _pack_nibbles(codes_bk: np.ndarray) -> np.ndarray:
    """[blocks, 32] -> uint8 [blocks, 16], low halves first."""
    return (codes_bk[:, :16] | codes_bk[:, 16:] << 4).astype(np.uint8)
