"""ggml's block formats as what they all are: small integer codes, scales, and sometimes minimums.

    value = scale * code + minimum

Each `_read_*` takes the blocks of a tensor as uint8 [num_blocks, bytes per block]. Layouts follow ggml's structs
(ggml/src/ggml-common.h): scales are float16, and the low nibbles of a run of bytes hold the first half of its values,
the high nibbles the second half.

    b blocks  v values of a block  g groups of a block that share a scale
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .grids import book, signs_of_seven

U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]
F32 = NDArray[np.float32]

_IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)  # ggml's non-linear 4-bit code book
_E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)  # times one half


@dataclass(frozen=True, slots=True)
class Factors:
    """What scales and minimums of a block's groups are made of: small factors of one scale and one minimum, float32."""

    scale_b1: F32
    of_scale_bg: I8
    minimum_b1: F32 | None = None
    of_minimum_bg: I8 | None = None

    def scales(self) -> F32:
        return self.scale_b1 * self.of_scale_bg.astype(np.float32)

    def minimums(self) -> F32 | None:
        if self.minimum_b1 is None or self.of_minimum_bg is None:
            return None
        return self.minimum_b1 * self.of_minimum_bg.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Codes:
    """int8 codes_bv with float32 scales_bg, and minimums_bg or None; factors: of some formats."""

    codes_bv: I8
    scales_bg: F32
    minimums_bg: F32 | None = None
    factors: Factors | None = None

    @property
    def group_size(self) -> int:
        return self.codes_bv.shape[1] // self.scales_bg.shape[1]

    def values(self) -> F32:
        """float32 [b, v]"""
        num_blocks, num_groups = self.scales_bg.shape
        values = self.codes_bv.reshape(num_blocks, num_groups, -1).astype(np.float32)
        values *= self.scales_bg[:, :, None]
        if self.minimums_bg is not None:
            values += self.minimums_bg[:, :, None]
        return values.reshape(num_blocks, -1)


def _scale(blocks: U8, start: int) -> F32:
    """The float16 at byte `start` of each block -> float32 [b, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _view(blocks: U8, start: int, end: int, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:end]).view(dtype)


def _nibbles(bytes_u8: U8) -> U8:
    """[..., n] -> uint8 [..., 2n]: all low nibbles, then all high nibbles."""
    return np.concatenate([bytes_u8 & 0x0F, bytes_u8 >> 4], axis=-1)


def _minus(codes: NDArray[Any], offset: int) -> I8:
    return codes.view(np.int8) - np.int8(offset)


def _fifth_bits(blocks: U8, start: int) -> U8:
    """32 bits at byte `start` -> uint8 [b, 32], each 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _read_q4_0(blocks: U8) -> Codes:
    return Codes(_minus(_nibbles(blocks[:, 2:]), 8), _scale(blocks, 0))


def _read_q4_1(blocks: U8) -> Codes:
    return Codes(_nibbles(blocks[:, 4:]).view(np.int8), _scale(blocks, 0), _scale(blocks, 2))


def _read_q5_0(blocks: U8) -> Codes:
    return Codes(_minus(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), 16), _scale(blocks, 0))


def _read_q5_1(blocks: U8) -> Codes:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Codes(codes.view(np.int8), _scale(blocks, 0), _scale(blocks, 2))


def _read_q8_0(blocks: U8) -> Codes:
    return Codes(blocks[:, 2:].view(np.int8), _scale(blocks, 0))


def _read_q8_1(blocks: U8) -> Codes:
    return Codes(blocks[:, 4:].view(np.int8), _scale(blocks, 0))


def _read_q8_k(blocks: U8) -> Codes:
    return Codes(blocks[:, 4:260].view(np.int8), np.ascontiguousarray(blocks[:, :4]).view("<f4"))


def _pairs_of_bits(bytes_u8: U8) -> U8:
    """64 bytes -> uint8 [b, 256] of 2-bit codes: each run of 32 bytes gives four runs of 32 codes, from the lowest two
    bits up."""
    runs = bytes_u8.reshape(len(bytes_u8), 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    return ((runs >> shifts) & np.uint8(3)).reshape(len(bytes_u8), 256)


def _read_q2_k(blocks: U8) -> Codes:
    """scales u4 + minimums u4 [16] | codes u2 [256] | scale of scales f16 | scale of minimums f16"""
    factors_of_both = blocks[:, :16]
    factors = Factors(
        _scale(blocks, 80),
        (factors_of_both & 0x0F).view(np.int8),
        -_scale(blocks, 82),
        (factors_of_both >> 4).view(np.int8),
    )
    return Codes(_pairs_of_bits(blocks[:, 16:80]).view(np.int8), factors.scales(), factors.minimums(), factors)


def _read_q3_k(blocks: U8) -> Codes:
    """third bits [256] | codes u2 [256] | scales u6 [16], packed | scale of scales f16"""
    num_blocks = len(blocks)
    third_bits = np.unpackbits(blocks[:, :32].reshape(num_blocks, 1, 32), axis=1, bitorder="little")
    codes = _pairs_of_bits(blocks[:, 32:96]) | (third_bits.reshape(num_blocks, 256) << 2)
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 4, 1)
    high = ((packed[:, 8:].reshape(num_blocks, 1, 4) >> shifts) & 3).reshape(num_blocks, 16)
    factors = Factors(_scale(blocks, 108), _minus(low | (high << 4), 32))
    return Codes(_minus(codes, 4), factors.scales(), None, factors)


def _scales_and_minimums(packed: U8) -> tuple[I8, I8]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minimums, as int8 [b, 8] each.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minimums 0-3, in their low six bits; bytes 8-11 hold the low nibbles of
    scales and minimums 4-7, whose upper two bits are those left over in bytes 0-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return scales.view(np.int8), minimums.view(np.int8)


def _nibble_runs(bytes_u8: U8) -> U8:
    """128 bytes -> uint8 [b, 8, 32]: each run of 32 bytes gives 32 low nibbles, then 32 high nibbles."""
    return _nibbles(bytes_u8.reshape(len(bytes_u8), 4, 32)).reshape(len(bytes_u8), 8, 32)


def _read_q4_k(blocks: U8) -> Codes:
    """scale of scales f16 | scale of minimums f16 | scales and minimums u6 [8 + 8], packed | codes u4 [256]"""
    return _affine_runs(blocks, _nibble_runs(blocks[:, 16:144]))


def _read_q5_k(blocks: U8) -> Codes:
    """as q4_k, with fifth bits [256] before the codes: bit r of byte i belongs to value i of run r"""
    fifth = np.unpackbits(blocks[:, 16:48].reshape(len(blocks), 1, 32), axis=1, bitorder="little") << 4
    return _affine_runs(blocks, _nibble_runs(blocks[:, 48:176]) | fifth)


def _affine_runs(blocks: U8, codes: NDArray[Any]) -> Codes:
    of_scale, of_minimum = _scales_and_minimums(blocks[:, 4:16])
    factors = Factors(_scale(blocks, 0), of_scale, -_scale(blocks, 2), of_minimum)
    return Codes(codes.reshape(len(blocks), 256).view(np.int8), factors.scales(), factors.minimums(), factors)


def _read_q6_k(blocks: U8) -> Codes:
    """low nibbles [256] | upper two bits [256] | scales i8 [16] | scale of scales f16"""
    num_blocks = len(blocks)
    low = _nibbles(blocks[:, :128].reshape(num_blocks, 2, 64)).reshape(num_blocks, 256)
    codes = low | (_pairs_of_bits(blocks[:, 128:192]) << 4)
    factors = Factors(_scale(blocks, 208), np.ascontiguousarray(blocks[:, 192:208]).view(np.int8))
    return Codes(_minus(codes, 32), factors.scales(), None, factors)


def _read_iq4_nl(blocks: U8) -> Codes:
    return Codes(_IQ4_VALUES[_nibbles(blocks[:, 2:])], _scale(blocks, 0))


def _read_iq4_xs(blocks: U8) -> Codes:
    """scale f16 | upper bits of scales u2 [8] | lower bits of scales u4 [8] | codes u4 [256]"""
    num_blocks = len(blocks)
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(num_blocks, 8)
    scales = _scale(blocks, 0) * ((lower | (upper << 4)).astype(np.float32) - 32)
    return Codes(_IQ4_VALUES[_nibbles(blocks[:, 8:].reshape(num_blocks, 8, 16))].reshape(num_blocks, 256), scales)


def _read_mxfp4(blocks: U8) -> Codes:
    """exponent e8m0 | codes e2m1 [32]; the code book is doubled, so the scale is halved: 2 ** (exponent - 128)"""
    scales: F32 = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return Codes(_E2M1_VALUES[_nibbles(blocks[:, 1:])], scales)


def _read_nvfp4(blocks: U8) -> Codes:
    """scales e4m3, unsigned [4] | codes e2m1 [64]; the code book is doubled, so the scales are halved"""
    exponents, fractions = (blocks[:, :4] >> 3 & 15).astype(np.int32), (blocks[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(1 + fractions / 8, exponents - 7)
    scales = np.where(exponents == 0, fractions * np.float32(2**-9), normal) * np.float32(0.5)
    scales[(blocks[:, :4] == 0) | (blocks[:, :4] == 0x7F)] = 0
    codes = _nibbles(blocks[:, 4:].reshape(len(blocks), 4, 8)).reshape(len(blocks), 64)
    return Codes(_E2M1_VALUES[codes], scales.astype(np.float32))


def _read_tq1_0(blocks: U8) -> Codes:
    """five ternary digits a byte [240 values] | four a byte [16 values] | scale f16; a digit is the weight plus one.
    A byte holds its digits as a fraction of 256, the first one highest: times 3, the carry is the next digit."""

    def digits(first: int, end: int, run: int, count: int) -> U8:
        powers = np.array([1, 3, 9, 27, 81][:count], np.uint8).reshape(1, 1, count, 1)
        return (blocks[:, first:end].reshape(len(blocks), -1, 1, run) * powers).reshape(len(blocks), -1)

    fractions = np.concatenate([digits(0, 32, 32, 5), digits(32, 48, 16, 5), digits(48, 52, 4, 4)], axis=1)
    return Codes(_minus((fractions.astype(np.uint16) * 3 >> 8).astype(np.uint8), 1), _scale(blocks, 52))


def _read_tq2_0(blocks: U8) -> Codes:
    """codes u2 [256] | scale f16; a code is the weight plus one"""
    return Codes(_minus(_pairs_of_bits(blocks[:, :64]), 1), _scale(blocks, 64))


# ---- the i-quants: indices into a code book, and signs ---------------------------------------------------------------


def _signed(rows_bn: NDArray[np.int8], sign_bytes: U8) -> I8:
    """Negate values whose bit is set; a byte holds the signs of eight values, lowest bit first."""
    bits = np.unpackbits(np.ascontiguousarray(sign_bytes), axis=-1, bitorder="little").reshape(rows_bn.shape)
    return np.where(bits, -rows_bn, rows_bn)


def _nibble_pairs(bytes_u8: U8) -> F32:
    """[b, n] -> float32 [b, 2n]: of each byte its low nibble, then its high one."""
    return np.stack([bytes_u8 & 15, bytes_u8 >> 4], axis=2).reshape(len(bytes_u8), -1).astype(np.float32)


def _bits_of(values: NDArray[Any], shifts: list[int], mask: int) -> NDArray[np.uint32]:
    """[b, n] -> uint32 [b, n * shifts]: fields of each value, in the order of `shifts`."""
    wide = values.astype(np.uint32)[:, :, None] >> np.array(shifts, np.uint32)
    return (wide & np.uint32(mask)).reshape(len(values), -1)


def _read_iq2_xxs(blocks: U8) -> Codes:
    """scale f16 | eight times: indices u8 [4], sign sets u7 [4] and a scale u4"""
    words = _view(blocks, 2, 66, "<u4").reshape(len(blocks), 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8).reshape(len(blocks), 32)
    scales = _scale(blocks, 0) * (np.float32(0.5) + (words[:, :, 1] >> 28).astype(np.float32)) * np.float32(0.25)
    signs = signs_of_seven()[_bits_of(words[:, :, 1], [0, 7, 14, 21], 127)]
    return Codes(_signed(book("iq2_xxs")[indices].reshape(len(blocks), 256), signs), scales)


def _read_iq2_xs(blocks: U8) -> Codes:
    """scale f16 | index u9 and sign set u7 [32] | scales u4 [16]"""
    fields = _view(blocks, 2, 66, "<u2").astype(np.uint16)
    scales = _scale(blocks, 0) * (np.float32(0.5) + _nibble_pairs(blocks[:, 66:74])) * np.float32(0.25)
    rows = book("iq2_xs")[fields & 511].reshape(len(blocks), 256)
    return Codes(_signed(rows, signs_of_seven()[fields >> 9]), scales)


def _read_iq2_s(blocks: U8) -> Codes:
    """scale f16 | low bits of indices u8 [32] | signs [256] | high bits of indices u2 [32] | scales u4 [16]"""
    indices = blocks[:, 2:34].astype(np.uint32) | _bits_of(blocks[:, 66:74], [0, 2, 4, 6], 3) << 8
    scales = _scale(blocks, 0) * (np.float32(0.5) + _nibble_pairs(blocks[:, 74:82])) * np.float32(0.25)
    return Codes(_signed(book("iq2_s")[indices].reshape(len(blocks), 256), blocks[:, 34:66]), scales)


def _read_iq3_xxs(blocks: U8) -> Codes:
    """scale f16 | indices u8 [64] | sign sets u7 [4] and a scale u4 [8]"""
    words = _view(blocks, 66, 98, "<u4").astype(np.uint32)
    scales = _scale(blocks, 0) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = signs_of_seven()[_bits_of(words, [0, 7, 14, 21], 127)]
    return Codes(_signed(book("iq3_xxs")[blocks[:, 2:66]].reshape(len(blocks), 256), signs), scales)


def _read_iq3_s(blocks: U8) -> Codes:
    """scale f16 | low bits of indices u8 [64] | high bits u1 [64] | signs [256] | scales u4 [8]"""
    indices = blocks[:, 2:66].astype(np.uint32) | _bits_of(blocks[:, 66:74], list(range(8)), 1) << 8
    scales = _scale(blocks, 0) * (1 + 2 * _nibble_pairs(blocks[:, 106:110]))
    return Codes(_signed(book("iq3_s")[indices].reshape(len(blocks), 256), blocks[:, 74:106]), scales)


def _shifted(rows_bn: NDArray[np.int8], minus: NDArray[np.bool_]) -> I8:
    """Values of the ternary book plus or minus an eighth, times eight."""
    return (rows_bn * np.int8(8) + np.where(minus, np.int8(-1), np.int8(1))).reshape(len(rows_bn), -1)


def _read_iq1_s(blocks: U8) -> Codes:
    """scale f16 | low bits of indices u8 [32] | high bits u3 [4], a scale u3 and the sign of the shift [8]"""
    fields = _view(blocks, 34, 50, "<u2").astype(np.uint16)
    scales = _scale(blocks, 0) * (2 * (fields >> 12 & 7) + 1).astype(np.float32)
    indices = blocks[:, 2:34].astype(np.uint32) | _bits_of(fields, [0, 3, 6, 9], 7) << 8
    rows = book("iq1_s")[indices].reshape(len(blocks), 8, 32)
    return Codes(_shifted(rows, (fields & 0x8000 != 0)[:, :, None]), scales / np.float32(8))


def _read_iq1_m(blocks: U8) -> Codes:
    """low bits of indices u8 [32] | high bits u3 and the sign of the shift [32] | scales u3 [16] in four words, whose
    upper nibbles together are the scale f16"""
    words = _view(blocks, 48, 56, "<u2").astype(np.uint16)
    nibbles = (words >> 12) << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    scales = scale * (2 * _bits_of(words, [0, 3, 6, 9], 7) + 1).astype(np.float32)
    fields = _bits_of(blocks[:, 32:48], [0, 4], 15)
    rows = book("iq1_s")[blocks[:, :32].astype(np.uint32) | (fields & 7) << 8]
    return Codes(_shifted(rows.reshape(len(blocks), 32, 8), (fields & 8 != 0)[:, :, None]), scales / np.float32(8))


READERS: dict[str, Callable[[U8], Codes]] = {
    "q4_0": _read_q4_0,
    "q4_1": _read_q4_1,
    "q5_0": _read_q5_0,
    "q5_1": _read_q5_1,
    "q8_0": _read_q8_0,
    "q8_1": _read_q8_1,
    "q2_k": _read_q2_k,
    "q3_k": _read_q3_k,
    "q4_k": _read_q4_k,
    "q5_k": _read_q5_k,
    "q6_k": _read_q6_k,
    "q8_k": _read_q8_k,
    "iq1_s": _read_iq1_s,
    "iq1_m": _read_iq1_m,
    "iq2_xxs": _read_iq2_xxs,
    "iq2_xs": _read_iq2_xs,
    "iq2_s": _read_iq2_s,
    "iq3_xxs": _read_iq3_xxs,
    "iq3_s": _read_iq3_s,
    "iq4_nl": _read_iq4_nl,
    "iq4_xs": _read_iq4_xs,
    "mxfp4": _read_mxfp4,
    "nvfp4": _read_nvfp4,
    "tq1_0": _read_tq1_0,
    "tq2_0": _read_tq2_0,
}
