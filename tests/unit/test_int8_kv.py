"""int8 KV holds heads rotated: what that is, and that a few channels of large values no longer spoil the others.

T tokens  H query heads  G KV heads  C channels of a head  P positions
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ops_cases import Sequences

from tiny import tiny_checkpoint
from tokenmill.core.block import KVGroup
from tokenmill.models.kv_groups import with_key_exponents
from tokenmill.models.loader import Model, load_model
from tokenmill.models.weights import LayerWeights
from tokenmill.ops.api import HeadGeometry
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import available_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_kv import int8_codes, rotated

LENGTH = 300
HEAD_SIZES = (6, 64, 80, 96, 128, 256, 512)
"""Rotated in blocks of 2, 64, 16, 32, 128, 256 and 512 channels."""


@pytest.fixture(params=["numpy", *available_isas()] if available() is None else ["numpy"])
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = ReferenceOps() if request.param == "numpy" else NativeOps(2, request.param)
    yield backend
    if isinstance(backend, NativeOps):
        backend.close()


def test_rotation_is_a_hadamard_matrix() -> None:
    """Blocks of 2^n channels times the matrix that doubling makes; twice, it gives what was there."""
    for width in (2, 6, 8, 18, 64, 80, 96, 320):
        block = max(2**n for n in range(10) if width % 2**n == 0)
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < block:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        x_TC = np.random.default_rng(width).integers(-99, 99, (5, width)).astype(np.float32)
        expected = (x_TC.reshape(5, -1, block) @ matrix).reshape(5, width)
        assert np.array_equal(rotated(x_TC), expected)
        assert np.array_equal(rotated(rotated(x_TC)) / block, x_TC)


def _rows(head_dim: int, outlier: float) -> tuple[HeadGeometry, np.ndarray]:
    """qkv_TW of normal values, and one channel of keys and one of values that is as large in every token."""
    heads = HeadGeometry(4, 2, head_dim)
    qkv_TW = np.random.default_rng(head_dim).standard_normal((LENGTH, heads.width)).astype(np.float32)
    qkv_TW.reshape(LENGTH, -1, head_dim)[:, 4:, head_dim // 3] = outlier
    return heads, qkv_TW


def _attended(
    ops: Any, dtype: str, heads: HeadGeometry, qkv_TW: np.ndarray, exponents: tuple[tuple[int, ...], ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """[T, H*C] of causal attention over KV of that type, and the pool's bytes."""
    group = KVGroup("full", 1, heads.num_kv_heads, heads.head_dim, 16, dtype, key_exponents=exponents)
    sequences = Sequences.scatter(np.random.default_rng(1), [LENGTH], 16)
    pool = np.zeros((sequences.num_blocks, group.bytes_per_block), np.uint8)
    kv, batch = ops.bind_kv(pool, group), sequences.batch([(0, [0] * LENGTH, 0)])
    ops.write_kv(kv, 0, qkv_TW, batch, heads)
    return ops.paged_attention(kv, 0, qkv_TW, batch, heads, heads.head_dim**-0.5), pool


def _exponents(heads: HeadGeometry, exponent: int) -> tuple[tuple[int, ...], ...]:
    """Those of the outlier's channel, and others that are not 0."""
    each = np.arange(heads.num_kv_heads * heads.head_dim) % 3 - 1
    each.reshape(heads.num_kv_heads, -1)[:, heads.head_dim // 3] = exponent
    return (tuple(each.tolist()),)


def _error(got_TX: np.ndarray, exact_TX: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got_TX - exact_TX) ** 2)))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_an_outlier_channel_costs_less(ops: Any, head_dim: int) -> None:
    """With a channel 40 times the others, attention over int8 KV is off by less than half of what codes of heads as
    they are make it; without one it is off by no more than they are, give or take a tenth."""
    for outlier, most in ((40.0, 0.5), (1.0, 1.1)):
        heads, qkv_TW = _rows(head_dim, outlier)
        exact_TX, _ = _attended(ReferenceOps(), "f32", heads, qkv_TW)
        got_TX, _ = _attended(ops, "int8", heads, qkv_TW)
        plain_THC = qkv_TW.copy().reshape(LENGTH, -1, head_dim)
        codes_TGC, scales_TG = int8_codes(plain_THC[:, 4:])
        plain_THC[:, 4:] = codes_TGC * scales_TG[..., None]
        plain_TX, _ = _attended(ReferenceOps(), "f32", heads, plain_THC.reshape(LENGTH, -1))
        assert _error(got_TX, exact_TX) < most * _error(plain_TX, exact_TX), outlier


def test_exponents_even_out_keys(ops: Any) -> None:
    """Where one channel of keys is 4,000 times the others and that of queries as much smaller, exponents of it alone
    make attention over int8 KV as exact as without such channels, and change none over KV that is exact."""
    heads, qkv_TW = _rows(64, 1.0)
    plain_TX, _ = _attended(ReferenceOps(), "f32", heads, qkv_TW)
    even = _error(_attended(ops, "int8", heads, qkv_TW)[0], plain_TX)
    qkv_THC = qkv_TW.reshape(LENGTH, -1, 64)
    qkv_THC[:, :4, 21] /= 4096
    qkv_THC[:, 4:6, 21] *= 4096
    exact_TX, _ = _attended(ReferenceOps(), "f32", heads, qkv_TW)
    exponents = np.zeros((2, 64), int)
    exponents[:, 21] = 12
    uneven = _error(_attended(ops, "int8", heads, qkv_TW)[0], exact_TX)
    evened = _error(_attended(ops, "int8", heads, qkv_TW, (tuple(exponents.reshape(-1).tolist()),))[0], exact_TX)
    assert evened < 1.01 * even < 0.02 * uneven


def test_exponents_follow_from_biases_and_norms() -> None:
    """The quarter of the binary logarithm of the ratio of squares, alike in the channels that RoPE turns together;
    norms of heads count where there are some, and only int8 KV has exponents."""
    model = load_model(tiny_checkpoint(), ReferenceOps(), max_model_len=64, kv_dtype="int8")
    config, group = model.config, model.kv_group
    assert group.key_exponents == ()  # neither
    width, q_end = config.head_dim, config.num_heads * config.head_dim
    bias = np.zeros(config.heads.width, np.float32)
    bias[q_end + width + 1] = 255  # of the second KV head; 2^15 is the mean of its square and that of 0, each beside 1
    (own,) = with_key_exponents(
        [group], config, _with_layer(model, lambda layer: replace(layer, qkv=replace(layer.qkv, bias=bias)))
    )
    expected = np.zeros((config.num_kv_heads, width), int)
    expected[1, [1, 1 + config.rotary_dim // 2]] = 4
    assert own.key_exponents == (tuple(expected.reshape(-1).tolist()),) * config.num_layers
    norms = np.ones((2, width), np.float32)
    norms[0, 0], norms[1, 2] = 16, 8
    (own,) = with_key_exponents(
        [group], config, _with_layer(model, lambda layer: replace(layer, q_norm=norms[0], k_norm=norms[1]))
    )
    of_head = np.array(own.key_exponents).reshape(config.num_layers, config.num_kv_heads, width)
    half = config.rotary_dim // 2
    assert (of_head == of_head[0, 0]).all()
    assert {c: e for c, e in enumerate(of_head[0, 0].tolist()) if e} == {0: -2, half: -2, 2: 1, 2 + half: 1}
    half_precision = replace(group, dtype="f16")
    assert with_key_exponents([half_precision], config, model.weights.layers) == (half_precision,)


def _with_layer(model: Model, change: Callable[[LayerWeights], LayerWeights]) -> list[LayerWeights]:
    return [change(layer) for layer in model.weights.layers]


@pytest.mark.exact
@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_variants_rotate_alike(head_dim: int) -> None:
    """The bytes of KV are those of numpy, and attention over them is equal, on every instruction set."""
    heads, qkv_TW = _rows(head_dim, 9.0)
    for exponents in ((), _exponents(heads, 4)):
        _, stored = _attended(ReferenceOps(), "int8", heads, qkv_TW, exponents)
        results = []
        for isa in available_isas():
            backend = NativeOps(1, isa)
            out_TX, pool = _attended(backend, "int8", heads, qkv_TW, exponents)
            backend.close()
            assert np.array_equal(pool, stored), isa
            results.append(out_TX)
        assert all(np.array_equal(each, results[0]) for each in results)
