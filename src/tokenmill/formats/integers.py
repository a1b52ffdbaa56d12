"""What a matrix stored as several tensors (quantised.py, compressed_tensors.py) means: integer codes with scales, or
plain values.

N outputs  K inputs  G groups of inputs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BadCheckpoint
from .ggml import dequantise
from .quantised import QuantisedTensor, Runs
from .tensor import BLOCK_LAYOUT, Tensor

_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Unsigned codes [N, K] of `bits` bits in 32-bit words, lowest first; each stands for itself less `minus`.

    layout   "by row": words [N, ceil(K / p)] for p codes in a word; "by column": [K / p, N]; "awq": [K, N / 8]
    whole    no code lies in two words
    order_K  None: columns come as they are stored; else column k is stored as the one of input order_K[k]
    """

    words: NDArray[np.uint32]
    layout: str
    bits: int
    shape: tuple[int, int]
    whole: bool = True
    minus: int = 0
    order_K: NDArray[np.int32] | None = None

    def unsigned(self) -> NDArray[np.uint8]:
        """[N, K], as they are stored."""
        if self.layout == "awq":
            return _unpack_awq(self.words).T
        unpack = _unpack if self.whole else _unpack_dense
        if self.layout == "by column":
            return unpack(self.words, self.bits, 0).T
        return unpack(self.words, self.bits, 1)[:, : self.shape[1]]

    def values(self) -> NDArray[np.int8]:
        """[N, K], in order."""
        stored_NK = self.unsigned()
        if self.order_K is not None:
            stored_NK = stored_NK[:, self.order_K]
        return np.subtract(stored_NK, np.uint8(self.minus), order="C").view(np.int8)


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """weight = scale * code + minimum: float32 scales_NG and minimums_NG (None: all zero).

    bits   4, where codes lie in -8..7, or in 0..15 where there are minimums; else 8
    codes  int8 [N, K], or packed
    """

    bits: int
    codes: NDArray[np.int8] | PackedCodes
    scales_NG: NDArray[np.float32]
    minimums_NG: NDArray[np.float32] | None

    @property
    def codes_NK(self) -> NDArray[np.int8]:
        return self.codes.values() if isinstance(self.codes, PackedCodes) else self.codes

    @property
    def order_K(self) -> NDArray[np.int32] | None:
        """None: columns come in the order of inputs; else column k belongs to input order_K[k], so that groups are runs
        of columns."""
        return self.codes.order_K if isinstance(self.codes, PackedCodes) else None

    def values(self) -> NDArray[np.float32]:
        """float32 [N, K], columns in the order of inputs"""
        num_outputs, num_groups = self.scales_NG.shape
        values_NGk = self.codes_NK.reshape(num_outputs, num_groups, -1) * self.scales_NG[:, :, None]
        if self.minimums_NG is not None:
            values_NGk += self.minimums_NG[:, :, None]
        values_NK = values_NGk.reshape(num_outputs, -1)
        return values_NK if self.order_K is None else values_NK[:, np.argsort(self.order_K)]


def read_quantised(tensor: QuantisedTensor) -> IntegerMatrix | NDArray[np.float32]:
    """An IntegerMatrix; or float32 [N, K] where codes are floats of 8 bits or of a map, or groups are not of one size.
    Not for the layouts "sparse" and "turned", which `expanded` reads."""
    return {
        "gptq": _gptq,
        "awq": _awq,
        "packed": _packed,
        "int8": _int8,
        "float": _float,
        "nvfp4": _float4,
        "mxfp4": _float4,
        "mapped": _mapped,
    }[tensor.layout](tensor)


def expanded(tensor: QuantisedTensor) -> NDArray[np.generic]:
    """The stored elements [N, K] of 8-bit codes, or of a sparse or turned matrix: unsigned integers of their size."""
    if tensor.layout == "turned":
        whole = tensor.parts["weight"]
        stored_KN = np.frombuffer(whole.data, f"<u{BLOCK_LAYOUT[whole.kind][1]}").reshape(whole.shape)
        return np.ascontiguousarray(stored_KN[:, tensor.first : tensor.first + tensor.shape[0]].T)
    if "compressed" not in tensor.parts:
        return np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)
    values, mask = tensor.parts["compressed"], tensor.parts["bitmask"]
    num_inputs = tensor.shape[1]
    bits_NK = np.unpackbits(np.frombuffer(mask.data, np.uint8).reshape(mask.shape), axis=1, bitorder="little")
    there_NK = bits_NK[:, :num_inputs].astype(bool)
    stored = np.frombuffer(values.data, f"<u{BLOCK_LAYOUT[values.kind][1]}")
    if np.count_nonzero(there_NK) != len(stored):
        raise BadCheckpoint(f"{tensor.name}: its bitmask does not count the {len(stored)} values that there are.")
    out_NK = np.zeros(tensor.shape, stored.dtype)
    out_NK[there_NK] = stored
    return out_NK


def _gptq(tensor: QuantisedTensor) -> IntegerMatrix | NDArray[np.float32]:
    parts, bits = tensor.parts, tensor.bits
    codes = PackedCodes(_words(parts["qweight"]), "by column", bits, tensor.shape, whole=32 % bits == 0)
    zeros_GN = (
        _unpack_dense(_words(parts["qzeros"]), bits, 1)[:, : tensor.shape[0]].astype(np.int16) + tensor.zero_offset
    )
    return _integer_matrix(codes, zeros_GN.T, _floats_of(parts["scales"]).T, parts.get("g_idx"))


def _awq(tensor: QuantisedTensor) -> IntegerMatrix | NDArray[np.float32]:
    codes = PackedCodes(_words(tensor.parts["qweight"]), "awq", 4, tensor.shape)
    zeros_GN = _unpack_awq(_words(tensor.parts["qzeros"])).astype(np.int16)
    return _integer_matrix(codes, zeros_GN.T, _floats_of(tensor.parts["scales"]).T, None)


def _packed(tensor: QuantisedTensor) -> IntegerMatrix | NDArray[np.float32]:
    parts, bits = tensor.parts, tensor.bits
    num_outputs = tensor.shape[0]
    unpack = _unpack if tensor.whole_codes else _unpack_dense
    codes = PackedCodes(_words(parts["weight_packed"]), "by row", bits, tensor.shape, tensor.whole_codes)
    scales_NG = _by_row(parts["weight_scale"], num_outputs)
    zeros_NG = np.full(scales_NG.shape, 1 << (bits - 1), np.int16)
    if "weight_zero_point" in parts:
        zeros_NG = unpack(_words(parts["weight_zero_point"]), bits, 0)[:num_outputs].astype(np.int16)
    return _integer_matrix(codes, zeros_NG, scales_NG, parts.get("weight_g_idx"))


def _int8(tensor: QuantisedTensor) -> IntegerMatrix | NDArray[np.float32]:
    parts, num_outputs = tensor.parts, tensor.shape[0]
    scales_NG = _by_row(parts["SCB"] if "SCB" in parts else parts["weight_scale"], num_outputs)
    if "SCB" in parts:
        scales_NG = scales_NG / np.float32(127)
    zeros_NG = np.zeros(scales_NG.shape, np.int16)
    if "weight_zero_point" in parts:
        zeros_NG = _by_row(parts["weight_zero_point"], num_outputs).astype(np.int16)
    codes_NK = expanded(tensor).astype(np.uint8) ^ np.uint8(128)
    words = np.pad(codes_NK, ((0, 0), (0, -tensor.shape[1] % 4))).view("<u4")
    return _integer_matrix(PackedCodes(words, "by row", 8, tensor.shape), zeros_NG + np.int16(128), scales_NG, None)


def _float(tensor: QuantisedTensor) -> NDArray[np.float32]:
    num_outputs, num_inputs = tensor.shape
    values_NK = dequantise(tensor.kind, memoryview(expanded(tensor).tobytes()), tensor.num_values).reshape(tensor.shape)
    scales = tensor.parts.get("weight_scale_inv") or tensor.parts["weight_scale"]
    if tensor.block is not None:
        rows, columns = min(tensor.block[0], num_outputs), min(tensor.block[1], num_inputs)
        scales_NK = _floats_of(scales).repeat(rows, axis=0)[:num_outputs].repeat(columns, axis=1)
        values_NK *= scales_NK[:, :num_inputs]
    else:
        scales_NG = _by_row(scales, num_outputs)
        _check_groups(num_inputs, scales_NG.shape[1])
        values_NGk = values_NK.reshape(num_outputs, scales_NG.shape[1], -1)
        values_NGk *= scales_NG[:, :, None]
    return values_NK


def _float4(tensor: QuantisedTensor) -> IntegerMatrix:
    """Twice an FP4 value (E2M1) is an integer."""
    parts = tensor.parts
    packed = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    codes_NK = _TWICE_E2M1[np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(tensor.shape)]
    scales_NG = _by_row(parts["weight_scale"], tensor.shape[0]) * np.float32(0.5)
    if "weight_global_scale" in parts:
        scales_NG /= _floats_of(parts["weight_global_scale"]).reshape(())
    if "weight_scale_2" in parts:
        scales_NG *= _floats_of(parts["weight_scale_2"]).reshape(())
    return IntegerMatrix(8, codes_NK, scales_NG, None)


def _mapped(tensor: QuantisedTensor) -> NDArray[np.float32]:
    """Values of a list that comes with the matrix, by 4-bit codes; runs of them share a scale, over the ends of rows.
    Scales may be such values too, by 8-bit codes."""
    parts, runs = tensor.parts, tensor.runs
    assert runs is not None, tensor
    scales = _floats_of(parts["weight.absmax"]) if runs.scale_size is None else _mapped_scales(parts, runs)
    packed = np.frombuffer(tensor.data, np.uint8)
    codes = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=1).reshape(-1)[: tensor.num_values]
    values = _floats_of(parts["weight.quant_map"])[codes]
    values *= scales.repeat(min(runs.size, len(values)))[: len(values)]
    return values.reshape(tensor.shape)


def _mapped_scales(parts: Mapping[str, Tensor], runs: Runs) -> NDArray[np.float32]:
    assert runs.scale_size is not None, runs
    codes = np.frombuffer(parts["weight.absmax"].data, np.uint8)
    values = _floats_of(parts["weight.nested_quant_map"])[codes]
    values *= _floats_of(parts["weight.nested_absmax"]).repeat(min(runs.scale_size, len(codes)))[: len(codes)]
    return values + np.float32(runs.offset)


def _integer_matrix(
    codes: PackedCodes,
    zeros_NG: NDArray[np.int16],
    scales_NG: NDArray[np.float32],
    group_index: Tensor | None,
) -> IntegerMatrix | NDArray[np.float32]:
    """From codes and zeros. Where every zero is the middle code there are no minimums."""
    num_inputs, num_groups = codes.shape[1], scales_NG.shape[1]
    if group_index is not None:
        group_of_K = np.frombuffer(group_index.data, "<i4")
        if not 0 <= group_of_K.min() <= group_of_K.max() < num_groups:
            raise BadCheckpoint(f"{group_index.name} holds an index outside the {num_groups} groups.")
        if (np.bincount(group_of_K, minlength=num_groups) * num_groups != num_inputs).any():
            return (codes.unsigned() - zeros_NG[:, group_of_K]).astype(np.float32) * scales_NG[:, group_of_K]
        if (np.diff(group_of_K) < 0).any():
            codes = replace(codes, order_K=np.argsort(group_of_K, kind="stable").astype(np.int32))
    _check_groups(num_inputs, num_groups)
    middle = 1 << (codes.bits - 1)
    scales_NG = np.ascontiguousarray(scales_NG, np.float32)
    kept = 4 if codes.bits <= 4 else 8
    if kept == 8 or (zeros_NG == middle).all():
        minimums_NG = (middle - zeros_NG) * scales_NG
        codes = replace(codes, minus=middle)
        return IntegerMatrix(kept, codes, scales_NG, minimums_NG if minimums_NG.any() else None)
    return IntegerMatrix(kept, codes, scales_NG, -zeros_NG * scales_NG)


def _check_groups(num_inputs: int, num_groups: int) -> None:
    if num_inputs % num_groups:
        raise BadCheckpoint(f"{num_inputs} inputs do not divide into {num_groups} groups.")


def _words(tensor: Tensor) -> NDArray[np.uint32]:
    return np.frombuffer(tensor.data, "<u4").reshape(tensor.shape)


def _unpack_awq(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """[K, N / 8] -> [K, N]"""
    out = np.empty((words.shape[0], words.shape[1] * 8), np.uint8)
    for place, column in enumerate(_AWQ_ORDER):
        out[:, column::8] = words >> np.uint32(4 * place) & np.uint32(15)
    return out


def _unpack(words: NDArray[np.uint32], bits: int, axis: int) -> NDArray[np.uint8]:
    """Codes of `bits` bits each, lowest first, next to each other along `axis`, none in two words."""
    per_word = 32 // bits
    shape = list(words.shape)
    shape[axis] *= per_word
    out = np.empty(shape, np.uint8)
    for place in range(per_word):
        codes = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
        if axis == 0:
            out[place::per_word] = codes
        else:
            out[:, place::per_word] = codes
    return out


def _unpack_dense(words: NDArray[np.uint32], bits: int, axis: int) -> NDArray[np.uint8]:
    """Codes of `bits` bits each, lowest first, one behind the other along `axis`, with no bit between them."""
    if 32 % bits == 0:
        return _unpack(words, bits, axis)
    lines = np.ascontiguousarray(np.moveaxis(words, axis, -1))
    flags = np.unpackbits(lines.view(np.uint8), axis=1, bitorder="little")
    num_codes = flags.shape[1] // bits
    flags = flags[:, : num_codes * bits].reshape(len(lines), num_codes, bits)
    codes = np.packbits(flags, axis=2, bitorder="little")[:, :, 0]
    return np.moveaxis(codes, -1, axis)


def _floats_of(tensor: Tensor) -> NDArray[np.float32]:
    """Bytes among scales are exponents of 2, plus 127."""
    if tensor.kind == "u8":
        exponents = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape).astype(np.int32)
        return np.ldexp(np.float32(1), exponents - 127)
    return dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(tensor.shape)


def _by_row(tensor: Tensor, num_outputs: int) -> NDArray[np.float32]:
    """One value for all, one a row, or [N, G] -> float32 [N, G]."""
    values = _floats_of(tensor)
    if values.size == 1:
        return np.full((num_outputs, 1), values.reshape(()), np.float32)
    return values.reshape(num_outputs, -1)
