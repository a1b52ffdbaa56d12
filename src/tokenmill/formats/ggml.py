"""ggml's block formats turned into float32 with numpy: the definition that every faster path is tested against.

Each `_decode_*` takes the blocks of a tensor as uint8 [num_blocks, bytes per block] and gives float32
[num_blocks, values per block]. Layouts follow ggml's structs (ggml/src/ggml-common.h): scales are float16, and the
low nibbles of a run of bytes hold the first half of its values, the high nibbles the second half.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BadCheckpoint
from .tensor import BLOCK_LAYOUT

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]

_CHUNK_BYTES = 4 << 20
"""Blocks are decoded this many bytes at a time, so that temporaries stay in cache and memory stays flat."""

_PLAIN = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}
_PLAIN |= {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "bool": "u1"}

_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)  # ggml's non-linear 4-bit code book
_E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)  # times one half


def dequantise(kind: str, data: memoryview | bytes | U8, num_values: int) -> F32:
    """Decode `num_values` values (whole blocks) of `data` -> float32 [num_values], freshly allocated.

    Raises BadCheckpoint for a kind that has no decoder here, and asserts that the sizes agree.
    """
    blocks_u8 = np.frombuffer(data, dtype=np.uint8)
    decode = _DECODERS.get(kind)
    if decode is None:
        known = ", ".join(sorted(_DECODERS))
        raise BadCheckpoint(f"Tensors of type {kind} cannot be read. Types that can: {known}.")
    block_values, block_bytes = BLOCK_LAYOUT[kind]
    num_blocks = num_values // block_values
    assert num_blocks * block_values == num_values, f"{num_values} values are not whole blocks of {kind}"
    assert num_blocks * block_bytes == blocks_u8.size, f"{blocks_u8.size} bytes for {num_blocks} blocks of {kind}"
    blocks_u8 = blocks_u8.reshape(num_blocks, block_bytes)
    values = np.empty((num_blocks, block_values), dtype=np.float32)
    step = max(1, _CHUNK_BYTES // block_bytes)
    for start in range(0, num_blocks, step):
        values[start : start + step] = decode(blocks_u8[start : start + step])
    return values.reshape(num_values)


def _plain(dtype: str) -> Callable[[U8], F32]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


def _decode_bf16(blocks: U8) -> F32:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _scale(blocks: U8, start: int) -> F32:
    """The float16 at byte `start` of each block -> float32 [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(bytes_u8: U8) -> U8:
    """[..., n] -> uint8 [..., 2n]: all low nibbles, then all high nibbles."""
    return np.concatenate([bytes_u8 & 0x0F, bytes_u8 >> 4], axis=-1)


def _fifth_bits(blocks: U8, start: int) -> U8:
    """32 bits at byte `start` -> uint8 [num_blocks, 32], each 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _decode_q4_0(blocks: U8) -> F32:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _decode_q4_1(blocks: U8) -> F32:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _scale(blocks, 2)


def _decode_q5_0(blocks: U8) -> F32:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _scale(blocks, 0) * (codes.astype(np.float32) - 16)


def _decode_q5_1(blocks: U8) -> F32:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _scale(blocks, 0) * codes.astype(np.float32) + _scale(blocks, 2)


def _decode_q8_0(blocks: U8) -> F32:
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _decode_q8_1(blocks: U8) -> F32:
    return _scale(blocks, 0) * blocks[:, 4:].view(np.int8).astype(np.float32)


def _decode_q8_k(blocks: U8) -> F32:
    return np.ascontiguousarray(blocks[:, :4]).view("<f4") * blocks[:, 4:260].view(np.int8).astype(np.float32)


def _pairs_of_bits(bytes_u8: U8) -> U8:
    """64 bytes -> uint8 [num_blocks, 256] of 2-bit codes: each run of 32 bytes gives four runs of 32 codes, from the
    lowest two bits up."""
    runs = bytes_u8.reshape(len(bytes_u8), 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((runs >> shifts) & np.uint8(3)).reshape(len(bytes_u8), 256)


def _decode_q2_k(blocks: U8) -> F32:
    """scales u4 + minimums u4 [16] | codes u2 [256] | scale of scales f16 | scale of minimums f16"""
    num_blocks = len(blocks)
    scales = _scale(blocks, 80) * (blocks[:, :16] & 0x0F).astype(np.float32)
    minimums = _scale(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    codes = _pairs_of_bits(blocks[:, 16:80]).reshape(num_blocks, 16, 16).astype(np.float32)
    return (scales[:, :, None] * codes - minimums[:, :, None]).reshape(num_blocks, 256)


def _decode_q3_k(blocks: U8) -> F32:
    """third bits [256] | codes u2 [256] | scales u6 [16], packed | scale of scales f16"""
    num_blocks = len(blocks)
    third_bits = np.unpackbits(blocks[:, :32].reshape(num_blocks, 1, 32), axis=1, bitorder="little")
    codes = _pairs_of_bits(blocks[:, 32:96]) | (third_bits.reshape(num_blocks, 256) << 2)
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    high = ((packed[:, 8:].reshape(num_blocks, 1, 4) >> shifts) & 3).reshape(num_blocks, 16)
    scales = _scale(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    return (scales[:, :, None] * (codes.reshape(num_blocks, 16, 16).astype(np.float32) - 4)).reshape(num_blocks, 256)


def _scales_and_minimums(packed: U8) -> tuple[F32, F32]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minimums, as float32 [num_blocks, 8] each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3, in their low six bits; bytes 8-11 hold the low nibbles of
    scales and minimums 4-7, whose upper two bits are those left over in bytes 0-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _nibble_runs(bytes_u8: U8) -> U8:
    """128 bytes -> uint8 [num_blocks, 8, 32]: each run of 32 bytes gives 32 low nibbles, then 32 high nibbles."""
    return _nibbles(bytes_u8.reshape(len(bytes_u8), 4, 32)).reshape(len(bytes_u8), 8, 32)


def _decode_q4_k(blocks: U8) -> F32:
    """scale of scales f16 | scale of minimums f16 | scales and minimums u6 [8 + 8], packed | codes u4 [256]"""
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    codes = _nibble_runs(blocks[:, 16:144]).astype(np.float32)
    return _affine_runs(blocks, scales, minimums, codes)


def _decode_q5_k(blocks: U8) -> F32:
    """as q4_k, with fifth bits [256] before the codes: bit r of byte i belongs to value i of run r"""
    num_blocks = len(blocks)
    scales, minimums = _scales_and_minimums(blocks[:, 4:16])
    fifth = np.unpackbits(blocks[:, 16:48].reshape(num_blocks, 1, 32), axis=1, bitorder="little") << 4
    codes = (_nibble_runs(blocks[:, 48:176]) | fifth).astype(np.float32)
    return _affine_runs(blocks, scales, minimums, codes)


def _affine_runs(blocks: U8, scales: F32, minimums: F32, codes: F32) -> F32:
    scales, minimums = _scale(blocks, 0) * scales, _scale(blocks, 2) * minimums
    return (scales[:, :, None] * codes - minimums[:, :, None]).reshape(len(blocks), 256)


def _decode_q6_k(blocks: U8) -> F32:
    """low nibbles [256] | upper two bits [256] | scales i8 [16] | scale of scales f16"""
    num_blocks = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(num_blocks, 2, 64)).reshape(num_blocks, 256)
    codes = low | (_pairs_of_bits(blocks[:, 128:192]) << 4)
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * (codes.reshape(num_blocks, 16, 16).astype(np.float32) - 32)).reshape(num_blocks, 256)


def _decode_iq4_nl(blocks: U8) -> F32:
    return _scale(blocks, 0) * _IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _decode_iq4_xs(blocks: U8) -> F32:
    """scale f16 | upper bits of scales u2 [8] | lower bits of scales u4 [8] | codes u4 [256]"""
    num_blocks = len(blocks)
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(num_blocks, 8)
    scales = _scale(blocks, 0) * ((lower | (upper << 4)).astype(np.float32) - 32)
    codes = _nibbles(blocks[:, 8:].reshape(num_blocks, 8, 16))
    values: F32 = scales[:, :, None] * _IQ4_VALUES[codes]
    return values.reshape(num_blocks, 256)


def _decode_mxfp4(blocks: U8) -> F32:
    """exponent e8m0 | codes e2m1 [32]; the code book is doubled, so the scale is halved: 2 ** (exponent - 128)"""
    scales: F32 = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scales * _E2M1_VALUES[_nibbles(blocks[:, 1:])]


def _decode_tq2_0(blocks: U8) -> F32:
    """codes u2 [256] | scale f16; a code is the weight plus one"""
    return _scale(blocks, 64) * (_pairs_of_bits(blocks[:, :64]).astype(np.float32) - 1)


_DECODERS: dict[str, Callable[[U8], F32]] = {
    **{kind: _plain(dtype) for kind, dtype in _PLAIN.items()},
    "bf16": _decode_bf16,
    "q4_0": _decode_q4_0,
    "q4_1": _decode_q4_1,
    "q5_0": _decode_q5_0,
    "q5_1": _decode_q5_1,
    "q8_0": _decode_q8_0,
    "q8_1": _decode_q8_1,
    "q2_k": _decode_q2_k,
    "q3_k": _decode_q3_k,
    "q4_k": _decode_q4_k,
    "q5_k": _decode_q5_k,
    "q6_k": _decode_q6_k,
    "q8_k": _decode_q8_k,
    "iq4_nl": _decode_iq4_nl,
    "iq4_xs": _decode_iq4_xs,
    "mxfp4": _decode_mxfp4,
    "tq2_0": _decode_tq2_0,
}
