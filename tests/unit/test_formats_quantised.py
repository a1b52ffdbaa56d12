"""GPTQ, AWQ, compressed-tensors and FP8 matrices, packed here as their tools publish it, read back to the same values;
and every stored kind through the kernels' blocks.

The packers are written from the layouts' definitions, one code at a time, and know nothing of the readers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.blocks import READERS
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.integers import IntegerMatrix, PackedCodes, read_quantised
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.tensor import BLOCK_LAYOUT, Tensor
from tokenmill.models.repack import BLOCK_KINDS, from_integers, in_input_order, raw_matrix
from tokenmill.ops.api import EXACT_FACTORS
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import STORED
from tokenmill.ops.reference_weights import dequantise as dequantise_raw

N, K = 24, 128
KINDS = {"i4": "i32", "i8": "i64", "i1": "i8", "f2": "f16", "f4": "f32", "u1": "f8_e4m3", "u2": "bf16"}


def tensor(name: str, values: np.ndarray, kind: str | None = None) -> Tensor:
    values = np.ascontiguousarray(values)
    kind = kind or KINDS[values.dtype.str[1:]]
    return Tensor(name, kind, values.shape, memoryview(values.tobytes()))


def folder(**parts: np.ndarray | Tensor) -> dict[str, Tensor]:
    made = {}
    for suffix, values in parts.items():
        name = f"m.{suffix}"
        made[name] = values if isinstance(values, Tensor) else tensor(name, values)
    return made


def pack_words(codes: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> np.ndarray:
    """One code at a time into 32-bit words along `axis`; place i of a word holds code order[i]."""
    codes, per_word = np.moveaxis(codes, axis, -1), 32 // bits
    codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], -codes.shape[-1] % per_word), codes.dtype)], axis=-1)
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_word), np.uint32)
    for column in range(words.shape[-1]):
        for place in range(per_word):
            code = codes[..., column * per_word + (order or range(per_word))[place]]
            words[..., column] |= code.astype(np.uint32) << (place * bits)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def case(bits: int, group: int, symmetric: bool, seed: int = 0):
    """Random unsigned codes [N, K], zeros [N, G], scales [N, G] f16, and what they mean."""
    rng = np.random.default_rng([seed, bits, group, symmetric])
    codes = rng.integers(0, 1 << bits, (N, K))
    groups = K // group
    zeros = rng.integers(1, 1 << bits, (N, groups)) if not symmetric else np.full((N, groups), 1 << (bits - 1))
    scales = rng.uniform(0.001, 0.02, (N, groups)).astype(np.float16)
    values = (codes - zeros.repeat(group, axis=1)) * scales.astype(np.float32).repeat(group, axis=1)
    return codes, zeros, scales, values.astype(np.float32)


def read(parts: dict[str, Tensor], **settings):
    (joined,) = join_quantised(parts, {"quantization_config": settings}).values()
    assert joined.name == "m.weight" and joined.shape == (N, K)
    matrix = read_quantised(joined)
    values = matrix.values() if isinstance(matrix, IntegerMatrix) else matrix
    raw = raw_matrix(joined)
    through_blocks = dequantise_raw(raw)
    return values, raw.kind, through_blocks if raw.order is None else through_blocks[:, np.argsort(raw.order)]


def check(got, expected: np.ndarray, kind: str) -> None:
    """Read to float32 rounding; through the kernels' blocks to the rounding of scales and minimums to float16."""
    values, raw_kind, through_blocks = got
    assert raw_kind == kind
    largest = np.abs(expected).max()
    np.testing.assert_allclose(values, expected, atol=1e-6 * largest)
    np.testing.assert_allclose(through_blocks, expected, atol=2.0**-10 * largest)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, K])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits: int, group: int, symmetric: bool, version: str) -> None:
    codes, zeros, scales, expected = case(bits, group, symmetric)
    stored_zeros = zeros - (version == "gptq")
    parts = folder(
        qweight=pack_words(codes.T, bits, 0),
        qzeros=pack_words(stored_zeros.T, bits, 1),
        scales=scales.T,
        g_idx=(np.arange(K) // group).astype(np.int32),
    )
    kind = {(4, True): "q4_0", (4, False): "q4_1", (8, True): "q8_0", (8, False): "q8_m"}[bits, symmetric]
    check(read(parts, quant_method="gptq", bits=bits, checkpoint_format=version), expected, kind)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "kinds"), [(16, ("q8_h", "q8_hm")), (8, ("f16", "f16"))])
def test_gptq_groups_that_are_not_whole_blocks(group: int, kinds: tuple[str, str], symmetric: bool) -> None:
    """Half blocks have scales of their own; what is smaller is multiplied out."""
    codes, zeros, scales, expected = case(4, group, symmetric)
    parts = folder(qweight=pack_words(codes.T, 4, 0), qzeros=pack_words(zeros.T - 1, 4, 1), scales=scales.T)
    check(read(parts, quant_method="gptq", bits=4), expected, kinds[not symmetric])


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_act_order(bits: int) -> None:
    """Inputs of a group lie anywhere: columns are put in the order of groups, and the matrix says so."""
    codes, zeros, scales, _ = case(bits, 32, False)
    index = np.random.default_rng(1).permutation(np.arange(K) // 32).astype(np.int32)
    expected = (codes - zeros[:, index]) * scales.astype(np.float32)[:, index]
    parts = folder(
        qweight=pack_words(codes.T, bits, 0), qzeros=pack_words(zeros.T - 1, bits, 1), scales=scales.T, g_idx=index
    )
    check(read(parts, quant_method="gptq", bits=bits), expected.astype(np.float32), {4: "q4_1", 8: "q8_m"}[bits])
    (joined,) = join_quantised(parts, {"quantization_config": {"quant_method": "gptq", "bits": bits}}).values()
    raw = raw_matrix(joined)
    dense = in_input_order(raw)
    assert raw.order is not None and (dense.kind, dense.order) == ("f16", None)
    np.testing.assert_allclose(dequantise_raw(dense), expected, atol=2.0**-9 * np.abs(expected).max())


def test_gptq_groups_of_different_sizes() -> None:
    """Nothing is assumed of how many inputs a group has: the matrix is kept as float16."""
    codes, zeros, scales, _ = case(4, 32, False)
    index = np.random.default_rng(1).integers(0, K // 32, K).astype(np.int32)
    expected = (codes - zeros[:, index]) * scales.astype(np.float32)[:, index]
    parts = folder(
        qweight=pack_words(codes.T, 4, 0), qzeros=pack_words(zeros.T - 1, 4, 1), scales=scales.T, g_idx=index
    )
    check(read(parts, quant_method="gptq", bits=4), expected.astype(np.float32), "f16")


@pytest.mark.parametrize("group", [32, K])
def test_awq(group: int) -> None:
    codes, zeros, scales, expected = case(4, group, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = folder(qweight=pack_words(codes.T, 4, 1, order), qzeros=pack_words(zeros.T, 4, 1, order), scales=scales.T)
    check(read(parts, quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm"), expected, "q4_1")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, K])
def test_compressed_tensors_packed(bits: int, symmetric: bool, group: int) -> None:
    codes, zeros, scales, expected = case(bits, group, symmetric)
    parts = folder(
        weight_packed=pack_words(codes, bits, 1),
        weight_scale=scales,
        weight_shape=np.array([N, K], np.int64),
        **({} if symmetric else {"weight_zero_point": pack_words(zeros, bits, 0)}),
    )
    kind = {(4, True): "q4_0", (4, False): "q4_1", (8, True): "q8_0", (8, False): "q8_m"}[bits, symmetric]
    check(read(parts, quant_method="compressed-tensors", format="pack-quantized"), expected, kind)


def test_compressed_tensors_int8() -> None:
    """W8A8: one scale a row, here bfloat16."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (N, K)).astype(np.int8)
    scales = rng.uniform(0.001, 0.02, (N, 1)).astype(np.float32).view(np.uint32) >> 16
    expected = codes * (scales.astype(np.uint32) << 16).view(np.float32)
    parts = folder(weight=codes, weight_scale=tensor("s", scales.astype(np.uint16)))
    check(read(parts, quant_method="compressed-tensors", format="int-quantized"), expected, "q8_0")


@pytest.mark.parametrize("scales", [(1,), (N, 1), (N, 4)])
def test_compressed_tensors_float8(scales: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 126, (N, K)).astype(np.uint8) | rng.integers(0, 2, (N, K)).astype(np.uint8) << 7
    scale = rng.uniform(0.001, 0.02, scales).astype(np.float32)
    floats = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    expected = floats * (scale if scale.size == 1 else scale.repeat(K // scale.shape[1], axis=1))
    check(read(folder(weight=codes, weight_scale=scale), quant_method="compressed-tensors"), expected, "f16")


def test_fp8_blocks() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 126, (N, K)).astype(np.uint8)
    scale = rng.uniform(0.001, 0.02, (2, 3)).astype(np.float32)
    expected = dequantise("f8_e4m3", codes, codes.size).reshape(N, K)
    expected = expected * scale.repeat(16, axis=0)[:N].repeat(48, axis=1)[:, :K]
    got = read(folder(weight=codes, weight_scale_inv=scale), quant_method="fp8", weight_block_size=[16, 48])
    check(got, expected, "f16")


@pytest.mark.parametrize("kind", ["f8_e4m3", "f8_e5m2"])
def test_float8_values(kind: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}[kind]
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(dtype).float().numpy()
    assert np.array_equal(dequantise(kind, codes, 256), expected, equal_nan=True)


def test_other_modules_stay() -> None:
    """What is not quantised passes through, and the tensors around it keep their names."""
    parts = {"lm_head.weight": tensor("lm_head.weight", np.zeros((2, 2), np.float32))}
    settings = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert join_quantised(parts, settings) == parts
    assert join_quantised(parts, {}) == parts


@pytest.mark.parametrize(
    ("change", "settings", "named"),
    [
        ({"qzeros": None}, {}, "'qzeros' of its gptq form is missing"),
        ({"scales": np.zeros((3, 5), np.float16)}, {}, "m.scales is f16"),
        ({"qweight": np.zeros((16, N), np.float32)}, {}, "instead of i32"),
        ({"g_idx": np.zeros(5, np.int32)}, {}, "m.g_idx is i32"),
        ({"g_idx": np.full(K, 9, np.int32)}, {}, "an index outside the 4 groups"),
        ({}, {"bits": 9}, "9 bits are not supported"),
        ({}, {"bits": 3}, "does not hold whole codes of 3 bits"),
        ({}, {"quant_method": "hqq"}, "'hqq' is not supported"),
    ],
)
def test_damage_is_named(change: dict, settings: dict, named: str) -> None:
    codes, zeros, scales, _ = case(4, 32, True)
    parts = {"qweight": pack_words(codes.T, 4, 0), "qzeros": pack_words(zeros.T - 1, 4, 1), "scales": scales.T} | change
    parts = folder(**{suffix: values for suffix, values in parts.items() if values is not None})
    with pytest.raises(BadCheckpoint, match=named):
        read(parts, **{"quant_method": "gptq", "bits": 4} | settings)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_ggml_blocks_keep_their_codes(kind: str) -> None:
    """Repacked values differ by the rounding of scales to float16, those of q2_k and q3_k not at all, and by nothing
    else; the kind is as declared."""
    block_values, block_bytes = BLOCK_LAYOUT[kind]
    num_blocks = 1024 // block_values * 3
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    _plausible_scales(kind, data, rng)
    stored = Tensor("t", kind, (3, 1024), memoryview(data.reshape(-1).tobytes()))
    expected = READERS[kind](data).values().reshape(3, 1024)
    raw = raw_matrix(stored)
    assert raw.kind == BLOCK_KINDS[kind]
    codes = READERS[kind](data)
    largest_scale = np.abs(codes.scales_bg).max() * 127
    minimum = 0 if codes.minimums_bg is None else np.abs(codes.minimums_bg).max()
    exact = kind in EXACT_FACTORS
    np.testing.assert_allclose(
        dequantise_raw(raw), expected, rtol=0, atol=0 if exact else 2.0**-11 * (largest_scale + minimum)
    )


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("kind", STORED)
def test_native_recoding_gives_the_same_bytes(kind: str) -> None:
    """Blocks of any bits with plausible scales, more of them than one thread takes at a time; and blocks whose scales
    float16 cannot hold, or kernels as powers of two, are refused alike."""
    block_values, block_bytes = BLOCK_LAYOUT[kind]
    num_blocks = 1300
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    _plausible_scales(kind, data, rng)
    stored = Tensor("t", kind, (num_blocks, block_values), memoryview(data.reshape(-1).tobytes()))
    ops = NativeOps(2)
    raw = raw_matrix(stored, ops)
    expected = raw_matrix(stored)
    assert raw.kind == expected.kind == BLOCK_KINDS[kind]
    np.testing.assert_array_equal(raw.data, expected.data)
    if kind in ("q8_k", "mxfp4"):
        data[:, :4] = np.full(1, 3e-7, np.float32).view(np.uint8) if kind == "q8_k" else 240
        flat = data.reshape(-1)
        assert ops.recode(kind, flat, raw.kind, num_blocks, block_values, None) is None
        assert raw_matrix(Tensor("t", kind, (num_blocks, block_values), memoryview(flat.tobytes())), ops).kind == "f32"
    ops.close()


def integer_case(
    layout: str, bits: int, group: int, affine: bool, ordered: bool, shape: tuple[int, int]
) -> IntegerMatrix:
    """Codes of random words, of which the last line and word may hold more than the matrix."""
    rng = np.random.default_rng([bits, group, affine, ordered, *shape])
    (num_rows, num_cols), per_word = shape, 32 // bits
    lines = {"by row": (num_rows, -(-num_cols // per_word) + 1), "by column": (-(-num_cols // per_word), num_rows)}
    size = (num_cols, num_rows // 8) if layout == "awq" else lines[layout]
    words = rng.integers(0, 1 << 32, size, dtype=np.uint32)
    minus = 0 if affine and bits <= 4 else 1 << (bits - 1)
    scales = rng.uniform(0.001, 0.02, (num_rows, num_cols // group)).astype(np.float32)
    minimums = rng.uniform(-0.1, 0.1, scales.shape).astype(np.float32) if affine else None
    order = rng.permutation(num_cols).astype(np.int32) if ordered else None
    codes = PackedCodes(words, layout, bits, shape, True, minus, order)
    return IntegerMatrix(4 if bits <= 4 else 8, codes, scales, minimums)


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize(
    ("layout", "bits"),
    [("by row", 2), ("by row", 4), ("by row", 8), ("by column", 2), ("by column", 4), ("by column", 8), ("awq", 4)],
)
def test_native_recoding_of_integers_gives_the_same_bytes(
    layout: str, bits: int, group: int, affine: bool, ordered: bool
) -> None:
    """Packed codes by each layout, of more rows and columns than a thread takes at a time, and of few."""
    ops = NativeOps(2)
    for shape in ((200, 384), (8, 128)) if layout == "awq" else ((203, 384), (3, 128)):
        matrix = integer_case(layout, bits, group, affine, ordered, shape)
        found, expected = from_integers(matrix, ops), from_integers(matrix, None)
        assert found.kind == expected.kind and (found.order is None) == (not ordered)
        np.testing.assert_array_equal(found.data, expected.data)
        assert isinstance(matrix.codes, PackedCodes)
        scales = matrix.scales_NG.astype(np.float16)
        minimums = None if matrix.minimums_NG is None else matrix.minimums_NG.astype(np.float16)
        native = ops.recode_integers(found.kind, matrix.codes, scales, minimums)
        assert native is not None and np.array_equal(native.data, found.data)
    ops.close()


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_native_recoding_of_integers_checks_what_it_is_told() -> None:
    """Words that are too few, and an order that leads out of the matrix, are refused before anything is read."""
    ops = NativeOps(1)
    matrix = integer_case("by column", 4, 32, False, True, (24, 128))
    codes, scales = matrix.codes, matrix.scales_NG.astype(np.float16)
    assert isinstance(codes, PackedCodes) and codes.order_K is not None
    with pytest.raises(AssertionError, match="too few words"):
        ops.recode_integers("q4_0", replace(codes, words=codes.words[:-1]), scales, None)
    with pytest.raises(AssertionError, match="outside of the matrix"):
        ops.recode_integers("q4_0", replace(codes, order_K=codes.order_K + np.int32(1)), scales, None)
    with pytest.raises(AssertionError, match="minima do not go"):
        ops.recode_integers("q4_1", codes, scales, None)
    ops.close()


def _plausible_scales(kind: str, data: np.ndarray, rng: np.random.Generator) -> None:
    """Put float16 scales of about 0.01 where the format keeps them; random bits would be infinite."""
    places = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q5_1": (0, 2)}
    places |= {"tq1_0": (52,), "tq2_0": (64,)}
    if kind == "q8_k":
        data[:, :4] = rng.uniform(0.005, 0.02, (len(data), 1)).astype(np.float32).view(np.uint8)
    elif kind == "mxfp4":
        data[:, 0] = rng.integers(115, 130, len(data))
    elif kind == "iq1_m":
        data[:, 49:56:2] &= 0x0F
        data[:, 55] |= 0x20
    elif kind == "nvfp4":
        data[:, :4] &= 0x3F
    else:
        for place in places.get(kind, (0,)):
            data[:, place : place + 2] = rng.uniform(0.005, 0.02, (len(data), 1)).astype(np.float16).view(np.uint8)


def test_powers_of_two_are_scales_of_any_size() -> None:
    """From 0 on, as from float32's smallest normal number down, and up to where sums of products would overflow: such
    a matrix is kept in float32."""
    for exponents, kind in (([2, 70, 120, 231], "mxfp4"), ([0, 1, 0, 1], "mxfp4"), ([2, 70, 120, 232], "f32")):
        data = np.full((4, 17), 0x21, np.uint8)
        data[:, 0] = exponents
        raw = raw_matrix(Tensor("t", "mxfp4", (2, 64), memoryview(data.reshape(-1).tobytes())))
        assert raw.kind == kind
        expected = dequantise("mxfp4", data, 128)
        np.testing.assert_allclose(dequantise_raw(raw).reshape(-1), expected, rtol=0, atol=2.0**-125)
        assert exponents[0] < 2 or np.array_equal(dequantise_raw(raw).reshape(-1), expected)
