"""From any stored matrix to one the kernels take: the same codes in our blocks, wherever codes can be kept.

Integer codes are moved, never made anew; scales and minimums are rounded once, to float16. Where a scale would lose
more than float16's own precision (it is far below the matrix's largest), the matrix is kept as float32 instead.

    stored                                    kernels        what changes
    f32 f16 bf16 q4_0 q4_1 q8_0               as stored      nothing
    q5_0                                      q5_0           nothing
    iq4_nl                                    iq4_nl         nothing
    mxfp4, 4-bit floats with such scales      mxfp4          nothing (scales are powers of two)
    q5_1                                      q8_m           nothing
    q2_k q3_k                                 as stored      nothing
    q4_k q5_k q6_k                            as stored      products of scales are rounded, where they are used
    iq1_m iq2_xs iq2_s nvfp4                  q8_h           products of scales are rounded
    iq4_xs                                    iq4_nl         products of scales are rounded
    iq1_s iq2_xxs iq3_xxs iq3_s q8_k          q8_0           products of scales are rounded
    tq1_0 tq2_0                               q4_0           nothing
    integers to 4 bits, groups of 32 n        q4_0 or q4_1   scales of other types, and minimums, are rounded
    integers to 8 bits, groups of 32 n        q8_0 or q8_m   scales of other types, and minimums, are rounded
    the same, groups of 16 n                  q8_h or q8_hm  scales of other types, and minimums, are rounded
    4-bit floats with others                  q8_h           products of scales are rounded
    8-bit floats, codes of a map              f16            values are rounded
    other groups                              f16            values are rounded
    sparse, or inputs first                   as stored      zeros are written out, or inputs put last

With act-order columns are put in the order of their groups, and the matrix says which input each belongs to; matrices
that are stacked but have different orders become f16. A layer's experts are packed as a stack of matrices, and so is
what takes each head into and out of a latent space.

    E experts  H heads  N outputs  K inputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BadCheckpoint
from ..formats.blocks import READERS, Codes
from ..formats.ggml import dequantise, read_codes
from ..formats.grids import book_of
from ..formats.integers import IntegerMatrix, PackedCodes, expanded, read_quantised
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import BLOCK_LAYOUT, Tensor
from ..ops.api import (
    BLOCK_BYTES,
    CODE_OFFSETS,
    CODE_VALUES,
    EXACT_FACTORS,
    GROUP,
    LARGEST_POWER,
    SUPERBLOCK_BYTES,
    LatentGeometry,
    Ops,
    RawTensor,
    block_of,
)
from ..ops.reference_weights import dequantise as dequantise_raw
from .config import ModelConfig

DENSE_KINDS = frozenset({"f32", "f16", "bf16"})
DIRECT_KINDS = DENSE_KINDS | {"q4_0", "q4_1", "q8_0"}
BLOCK_KINDS = {
    "q2_k": "q2_k", "q3_k": "q3_k", "q4_k": "q4_k", "q5_k": "q5_k", "q6_k": "q6_k", "q5_0": "q5_0", "q5_1": "q8_m",
    "q8_1": "q8_0", "q8_k": "q8_0", "iq1_s": "q8_0", "iq1_m": "q8_h", "iq2_xxs": "q8_0", "iq2_xs": "q8_h",
    "iq2_s": "q8_h", "iq3_xxs": "q8_0", "iq3_s": "q8_0", "iq4_nl": "iq4_nl", "iq4_xs": "iq4_nl", "mxfp4": "mxfp4",
    "nvfp4": "q8_h", "tq1_0": "q4_0", "tq2_0": "q4_0",
}  # fmt: skip
"""Stored block format -> the kind of block its codes go into."""

HALF = GROUP // 2
_SMALLEST_SHARE = np.float32(2.0**-11)


def raw_matrix(tensor: Tensor | QuantisedTensor, ops: Ops | None = None) -> RawTensor:
    """The matrix as the kernels take it. ops: who may recode blocks faster than is done here, to the same bytes."""
    num_rows, num_cols = tensor.shape
    if isinstance(tensor, QuantisedTensor) and tensor.layout in ("sparse", "turned"):
        return RawTensor(packed_kind(tensor), num_rows, num_cols, expanded(tensor).view(np.uint8).reshape(-1))
    if isinstance(tensor, QuantisedTensor) and tensor.layout == "mxfp4" and num_cols % GROUP == 0:
        raw = _from_floats4(tensor)
        if raw is not None:
            return raw
    if isinstance(tensor, QuantisedTensor):
        matrix = read_quantised(tensor)
        if isinstance(matrix, IntegerMatrix):
            return from_integers(matrix, ops)
        return _dense_from(matrix)
    if tensor.kind in DIRECT_KINDS:
        return RawTensor(tensor.kind, num_rows, num_cols, np.frombuffer(tensor.data, np.uint8))
    if tensor.kind in READERS and num_cols % block_of(BLOCK_KINDS[tensor.kind])[0] == 0:
        data = np.frombuffer(tensor.data, np.uint8)
        raw = None
        if ops is not None:
            raw = ops.recode(tensor.kind, data, BLOCK_KINDS[tensor.kind], num_rows, num_cols, book_of(tensor.kind))
        raw = raw or _from_blocks(tensor)
        if raw is not None:
            return raw
    return dense("f32", dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(num_rows, num_cols))


def in_input_order(part: RawTensor) -> RawTensor:
    """The matrix with its columns in the order of the inputs: as float16 where they have another."""
    if part.order is None:
        return part
    return _dense_from(dequantise_raw(part)[:, np.argsort(part.order)])


def packed_kind(tensor: Tensor | QuantisedTensor) -> str:
    """The kind that `raw_matrix` is expected to give, without reading anything."""
    if not isinstance(tensor, QuantisedTensor):
        return tensor.kind if tensor.kind in DIRECT_KINDS else BLOCK_KINDS.get(tensor.kind, "f32")
    known = {"float": "f16", "mapped": "f16", "nvfp4": "q8_h", "mxfp4": "mxfp4"}
    if tensor.layout in known:
        return known[tensor.layout]
    if tensor.layout in ("sparse", "turned"):
        return tensor.parts.get("compressed", tensor).kind
    return "q4_0 or q4_1" if tensor.bits <= 4 else "q8_0 or q8_m"


def _dense_from(values_NK: NDArray[np.float32]) -> RawTensor:
    return dense("f16" if np.abs(values_NK).max() < 65504 else "f32", values_NK)


def dense(kind: str, values_NK: NDArray[np.float32]) -> RawTensor:
    """The values as f16 or f32."""
    stored = np.ascontiguousarray(values_NK, np.float16 if kind == "f16" else np.float32)
    num_rows, num_cols = values_NK.shape
    return RawTensor(kind, num_rows, num_cols, stored.view(np.uint8).reshape(-1))


def _from_floats4(tensor: QuantisedTensor) -> RawTensor | None:
    """Of MXFP4 whose codes come in pairs of neighbours and apart from the exponents (plus 127) of their scales."""
    num_rows, num_cols = tensor.shape
    exponents = np.frombuffer(tensor.parts["weight_scale"].data, np.uint8)
    if int(exponents.max(initial=0)) - 128 > np.log2(LARGEST_POWER):
        return None
    pairs_bj = np.frombuffer(tensor.data, np.uint8).reshape(-1, HALF)
    low_bj, high_bj = pairs_bj[:, : HALF // 2], pairs_bj[:, HALF // 2 :]
    out = np.empty((len(pairs_bj), BLOCK_BYTES["mxfp4"]), np.uint8)
    out[:, 0] = exponents - (exponents > 0)  # values of the table are doubled
    out[:, 1::2] = low_bj & 15 | high_bj << 4
    out[:, 2::2] = low_bj >> 4 | high_bj & 0xF0
    return RawTensor("mxfp4", num_rows, num_cols, out.reshape(-1))


def _from_blocks(tensor: Tensor) -> RawTensor | None:
    kind = BLOCK_KINDS[tensor.kind]
    block_values, block_bytes = block_of(kind)
    per_block = BLOCK_LAYOUT[tensor.kind][0] // block_values
    out = np.empty((tensor.num_values // block_values, block_bytes), np.uint8)
    loss = _Loss()
    for first, codes in read_codes(tensor.kind, tensor.data, tensor.num_values):
        places = slice(first * per_block, (first + len(codes.codes_bv)) * per_block)
        if kind == "mxfp4":
            loss.check_powers(codes.scales_bg)
            out[places, 0] = codes.scales_bg[:, 0].view(np.uint32) >> 23
            out[places, 1:] = _packed(kind, codes.codes_bv)
            continue
        if kind in EXACT_FACTORS:
            _encode_superblocks(kind, codes, out[places])
            continue
        scales, minimums = loss.rounded(codes.scales_bg, codes.minimums_bg)
        if kind in SUPERBLOCK_BYTES:
            _encode_superblocks(kind, codes, out[places])
        else:
            _encode(kind, codes.codes_bv, scales, minimums, out[places])
    num_rows, num_cols = tensor.shape
    return RawTensor(kind, num_rows, num_cols, out.reshape(-1)) if loss.fits() else None


def from_integers(matrix: IntegerMatrix, ops: Ops | None) -> RawTensor:
    """As blocks of integers where groups are whole halves of such; ops: as of `raw_matrix`."""
    num_rows, num_cols = matrix.codes.shape
    group_size = num_cols // matrix.scales_NG.shape[1]
    if group_size % HALF == 0 and num_cols % GROUP == 0:
        affine = matrix.minimums_NG is not None
        if group_size % GROUP:
            kind = "q8_hm" if affine else "q8_h"
        else:
            kind = ("q4_1" if affine else "q4_0") if matrix.bits == 4 else "q8_m" if affine else "q8_0"
        loss = _Loss()
        scales, minimums = loss.rounded(matrix.scales_NG, matrix.minimums_NG)
        if not loss.fits():
            return dense("f32", matrix.values())
        if ops is not None and isinstance(matrix.codes, PackedCodes):
            raw = ops.recode_integers(kind, matrix.codes, scales, minimums)
            if raw is not None:
                return raw
        out = np.empty((num_rows * (num_cols // GROUP), BLOCK_BYTES[kind]), np.uint8)
        _encode(kind, matrix.codes_NK, scales, minimums, out)
        return RawTensor(kind, num_rows, num_cols, out.reshape(-1), matrix.order_K)
    return _dense_from(matrix.values())


class _Loss:
    """What rounding to float16 lost, at most, of scales and of minimums."""

    def __init__(self) -> None:
        self._lost, self._largest = np.zeros(2, np.float32), np.zeros(2, np.float32)

    def rounded(
        self, scales: NDArray[np.float32], minimums: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float16], NDArray[np.float16] | None]:
        """Both as float16, and adds up what that loses."""
        return self._rounded(0, scales), None if minimums is None else self._rounded(1, minimums)

    def _rounded(self, index: int, values: NDArray[np.float32]) -> NDArray[np.float16]:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values.astype(np.float16)
            lost = np.abs(rounded.astype(np.float32) - values).max(initial=0)
            self._lost[index] = np.maximum(self._lost[index], lost)
            self._largest[index] = np.maximum(self._largest[index], np.abs(values).max(initial=0))
        return rounded

    def check_powers(self, scales: NDArray[np.float32]) -> None:
        """Of powers of two, which lose nothing unless they are too large."""
        if not scales.max(initial=0) <= LARGEST_POWER:
            self._lost[0] = np.inf

    def fits(self) -> bool:
        """Never more than float16's own precision of the largest value."""
        return bool((self._lost <= self._largest * _SMALLEST_SHARE).all())


def _encode(
    kind: str,
    codes: NDArray[np.int8],
    scales: NDArray[np.float16],
    minimums: NDArray[np.float16] | None,
    out: NDArray[np.uint8],
) -> None:
    """Write blocks of 32."""
    num_halves = 2 if kind in ("q8_h", "q8_hm") else 1
    repeats = codes.shape[1] // scales.shape[1] * num_halves // GROUP
    at = 0
    for values in (scales, minimums):
        if values is None:
            continue
        halves = values.repeat(repeats, axis=1).reshape(len(out), num_halves)
        out[:, at : at + 2 * num_halves] = halves.view(np.uint8)
        at += 2 * num_halves
    out[:, at:] = _packed(kind, codes.reshape(len(out), GROUP))


def _packed(kind: str, codes_bk: NDArray[np.int8]) -> NDArray[np.uint8]:
    """32 codes of a block as its last bytes."""
    if kind in CODE_VALUES:
        raw = np.zeros(256, np.uint8)
        raw[CODE_VALUES[kind][::-1].view(np.uint8)] = np.arange(16)[::-1]  # of equal ones the first
        raw = raw[codes_bk.view(np.uint8)]
    elif kind in CODE_OFFSETS:
        raw = (codes_bk + np.int8(CODE_OFFSETS[kind])).view(np.uint8)
    else:
        return codes_bk.view(np.uint8)
    if kind in ("q2_k", "q3_k"):
        low, upper = raw & np.uint8(3), raw >> np.uint8(2)
        parts = [_pairs_packed(low)]
    else:
        low, upper = raw & np.uint8(15), raw >> np.uint8(4)
        parts = [low[:, :HALF] | low[:, HALF:] << np.uint8(4)]
    if kind == "q6_k":
        parts.append(_pairs_packed(upper))
    elif kind in ("q3_k", "q5_0", "q5_k"):
        upper = upper.reshape(len(raw), 8, 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(np.bitwise_or.reduce(upper, axis=1))
    return np.concatenate(parts, axis=1)


def _pairs_packed(bits_bk: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two bits of each of 32 codes as 8 bytes."""
    pairs = bits_bk.reshape(len(bits_bk), 2, 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(pairs, axis=2).reshape(len(bits_bk), 8)


def _encode_superblocks(kind: str, codes: Codes, out: NDArray[np.uint8]) -> None:
    """Write blocks of 256."""
    factors = codes.factors
    assert factors is not None, kind
    scales_bg, minimums_bg = factors.of_scale_bg.view(np.uint8), factors.of_minimum_bg
    parts = [factors.scale_b1.astype("<f2").view(np.uint8)]
    if factors.minimum_b1 is not None:
        parts.append(factors.minimum_b1.astype("<f2").view(np.uint8))
    if kind == "q6_k":
        parts.append(scales_bg ^ np.uint8(128))
    elif minimums_bg is None:
        parts.append(_six_bits_packed(scales_bg + np.uint8(32)))
    elif kind == "q2_k":
        parts.append(scales_bg | minimums_bg.view(np.uint8) << np.uint8(4))
    else:
        parts.append(_six_bits_packed(np.stack([scales_bg, minimums_bg.view(np.uint8)], axis=2).reshape(len(out), 16)))
    parts.append(_packed(kind, codes.codes_bv.reshape(-1, GROUP)).reshape(len(out), -1))
    np.concatenate(parts, axis=1, out=out)


def _six_bits_packed(factors_b16: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Sixteen factors of 6 bits as three words."""
    shifted = factors_b16.reshape(len(factors_b16), 4, 4).astype(np.uint32) << np.array([0, 6, 12, 18], np.uint32)
    words_b4 = np.bitwise_or.reduce(shifted, axis=2)
    words_b3 = words_b4[:, :3] | words_b4[:, 3:] >> np.array([0, 8, 16], np.uint32) << 24
    return words_b3.astype("<u4").view(np.uint8)


_LARGEST_F16 = 65504.0


def expert_matrices(
    tensors: Mapping[str, Tensor | QuantisedTensor], name: str, num_experts: int
) -> list[Tensor | QuantisedTensor]:
    """Each expert's matrix: `name` (less '.weight') has `{e}` where they are stored one by one; else it is that of one
    tensor [E, N, K]."""
    if "{e}" in name:
        return [tensors[f"{name.format(e=expert)}.weight"] for expert in range(num_experts)]
    whole = tensors[f"{name}.weight"]
    if isinstance(whole, QuantisedTensor):
        raise BadCheckpoint(f"{whole.name}: experts of one tensor in {whole.layout} form are not supported.")
    return list(matrices_of(whole))


def matrices_of(tensor: Tensor) -> list[Tensor]:
    """The matrices [N, K] that a tensor [E, N, K] holds one after the other."""
    count, size = tensor.shape[0], tensor.data.nbytes // tensor.shape[0]
    return [
        Tensor(tensor.name, tensor.kind, tensor.shape[1:], tensor.data[index * size : (index + 1) * size])
        for index in range(count)
    ]


def as_matrix(tensor: Tensor | QuantisedTensor) -> Tensor | QuantisedTensor:
    """A vector as a matrix of one row."""
    if isinstance(tensor, Tensor) and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def of_one_kind(matrices: Sequence[Sequence[RawTensor]]) -> Sequence[Sequence[RawTensor]]:
    """The same matrices, parts of parts, with columns in the order of the inputs and of one kind: the only one that
    they have, else float16, or float32 where that does not hold all values."""
    ordered = [[in_input_order(part) for part in parts] for parts in matrices]
    if len({part.kind for parts in ordered for part in parts}) == 1:
        return ordered
    values = [[dequantise_raw(part) for part in parts] for parts in ordered]
    most = max(float(np.abs(part).max(initial=0)) for parts in values for part in parts)
    kind = "f16" if most <= _LARGEST_F16 else "f32"
    return [[dense(kind, part) for part in parts] for parts in values]


def latent_matrices(
    config: ModelConfig,
    tensor_of: Callable[[str], Tensor | QuantisedTensor],
    as_run: Callable[[Tensor | QuantisedTensor], RawTensor],
) -> tuple[list[RawTensor], list[RawTensor]]:
    """Each head's matrix into the latent space [latent, nope], and out of it [value, latent].

    A file that was made for the absorbed form has both; in another one kv_b gives keys and values of a latent, so that
    of keys is turned round: in float16 if it is quantised, as no block of the stored one is a block of that. Blocks are
    multiplied out where a head's channels do not begin with one."""
    latent = config.latent
    assert latent is not None
    k_up, v_up = _latent_matrices(config, latent, tensor_of, as_run)
    if latent.query_dim % GROUP or latent.nope_dim % GROUP:
        k_up = _multiplied_out(k_up)
    return k_up, v_up if latent.latent_dim % GROUP == 0 else _multiplied_out(v_up)


def _multiplied_out(matrices: list[RawTensor]) -> list[RawTensor]:
    if matrices[0].kind in DENSE_KINDS:
        return matrices
    return [_like(matrix, dequantise_raw(matrix)) for matrix in matrices]


def _latent_matrices(
    config: ModelConfig,
    latent: LatentGeometry,
    tensor_of: Callable[[str], Tensor | QuantisedTensor],
    as_run: Callable[[Tensor | QuantisedTensor], RawTensor],
) -> tuple[list[RawTensor], list[RawTensor]]:
    if config.is_absorbed:
        stacks = [tensor_of(role) for role in ("k_b", "v_b")]
        assert all(isinstance(tensor, Tensor) for tensor in stacks), stacks
        k_up, v_up = ([as_run(part) for part in matrices_of(tensor)] for tensor in stacks if isinstance(tensor, Tensor))
        return k_up, v_up
    stored = tensor_of("kv_b")
    raw = in_input_order(raw_matrix(stored))
    size = latent.nope_dim + latent.value_dim
    heads = [_rows(raw, head * size, size) for head in range(config.num_heads)]
    k_up = []
    for head in heads:
        values = np.ascontiguousarray(dequantise_raw(_rows(head, 0, latent.nope_dim)).T)
        k_up.append(_as_tensor_runs(_like(raw, values), as_run))
    v_up = [_as_tensor_runs(_rows(head, latent.nope_dim, latent.value_dim), as_run) for head in heads]
    return k_up, v_up


def _as_tensor_runs(raw: RawTensor, as_run: Callable[[Tensor | QuantisedTensor], RawTensor]) -> RawTensor:
    """A dense matrix as load makes dense ones, another as it is."""
    if raw.kind not in DENSE_KINDS:
        return raw
    return as_run(Tensor("kv_b", raw.kind, (raw.num_rows, raw.num_cols), memoryview(raw.data.data)))


def _rows(raw: RawTensor, first: int, count: int) -> RawTensor:
    size = raw.row_bytes
    return RawTensor(raw.kind, count, raw.num_cols, raw.data.reshape(-1)[first * size : (first + count) * size])


def _like(raw: RawTensor, values_NK: np.ndarray) -> RawTensor:
    """The values as the kind of `raw` where that is dense."""
    if raw.kind == "bf16":  # each value is one of these already
        bits = (values_NK.view(np.uint32) >> 16).astype(np.uint16)
        return RawTensor("bf16", len(values_NK), values_NK.shape[1], bits.view(np.uint8).reshape(-1))
    fits = raw.kind != "f32" and float(np.abs(values_NK).max(initial=0)) <= _LARGEST_F16
    return dense("f16" if fits else "f32", values_NK)
