"""Tensors of every readable kind turned into float32 with numpy: the definition that faster paths are tested against.

Plain types are converted; block formats are read as codes, scales and minimums (blocks.py) and multiplied out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BadCheckpoint
from .blocks import F32, READERS, U8, Codes
from .tensor import BLOCK_LAYOUT

_CHUNK_BYTES = 4 << 20
"""Blocks are decoded this many bytes at a time, so that temporaries stay in cache and memory stays flat."""

_PLAIN = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}
_PLAIN |= {"u8": "u1", "u16": "<u2", "u32": "<u4", "u64": "<u8", "bool": "u1"}


def dequantise(kind: str, data: memoryview | bytes | U8, num_values: int) -> F32:
    """Decode `num_values` values (whole blocks) of `data` -> float32 [num_values], freshly allocated.

    Raises BadCheckpoint for a kind that has no decoder here, and asserts that the sizes agree.
    """
    decode = _DECODERS.get(kind)
    if decode is None:
        known = ", ".join(sorted(_DECODERS))
        raise BadCheckpoint(f"Tensors of type {kind} cannot be read. Types that can: {known}.")
    values = np.empty((num_values // BLOCK_LAYOUT[kind][0], BLOCK_LAYOUT[kind][0]), dtype=np.float32)
    for start, blocks in _chunks(kind, data, num_values):
        values[start : start + len(blocks)] = decode(blocks)
    return values.reshape(num_values)


def read_codes(kind: str, data: memoryview | bytes | U8, num_values: int) -> Iterator[tuple[int, Codes]]:
    """The codes of a block format, a stretch of blocks at a time: (index of its first block, codes)."""
    for start, blocks in _chunks(kind, data, num_values):
        yield start, READERS[kind](blocks)


def _chunks(kind: str, data: memoryview | bytes | U8, num_values: int) -> Iterator[tuple[int, U8]]:
    blocks_u8 = np.frombuffer(data, dtype=np.uint8)
    block_values, block_bytes = BLOCK_LAYOUT[kind]
    num_blocks = num_values // block_values
    assert num_blocks * block_values == num_values, f"{num_values} values are not whole blocks of {kind}"
    assert num_blocks * block_bytes == blocks_u8.size, f"{blocks_u8.size} bytes for {num_blocks} blocks of {kind}"
    blocks_u8 = blocks_u8.reshape(num_blocks, block_bytes)
    step = max(1, _CHUNK_BYTES // block_bytes)
    for start in range(0, num_blocks, step):
        yield start, blocks_u8[start : start + step]


def _plain(dtype: str) -> Callable[[U8], F32]:
    return lambda blocks: np.ascontiguousarray(blocks).view(dtype).astype(np.float32)


def _decode_bf16(blocks: U8) -> F32:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _f8_table(exponent_bits: int) -> NDArray[np.float32]:
    """float32 [256] of the OCP 8-bit floats: e4m3 (no infinities, all ones is not a number) or e5m2 (as IEEE)."""
    fraction_bits = 7 - exponent_bits
    codes = np.arange(256)
    exponents, fractions = codes >> fraction_bits & ((1 << exponent_bits) - 1), codes & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = np.ldexp(1 + fractions / (1 << fraction_bits), exponents - bias)
    values = np.where(exponents == 0, np.ldexp(fractions / (1 << fraction_bits), 1 - bias), normal)
    if exponent_bits == 4:
        values[codes & 127 == 127] = np.nan
    else:
        top = exponents == 31
        values[top] = np.where(fractions[top] == 0, np.inf, np.nan)
    return np.where(codes & 128, -values, values).astype(np.float32)


def _decode_f8(exponent_bits: int) -> Callable[[U8], F32]:
    table = _f8_table(exponent_bits)
    return lambda blocks: table[blocks]


def _decode_codes(kind: str) -> Callable[[U8], F32]:
    return lambda blocks: READERS[kind](blocks).values()


_DECODERS: dict[str, Callable[[U8], F32]] = {
    **{kind: _plain(dtype) for kind, dtype in _PLAIN.items()},
    "bf16": _decode_bf16,
    "f8_e4m3": _decode_f8(4),
    "f8_e5m2": _decode_f8(5),
    **{kind: _decode_codes(kind) for kind in READERS},
}
