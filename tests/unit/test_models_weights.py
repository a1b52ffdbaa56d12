"""Names, shapes, stacking and row order of loaded weights, and the RoPE table."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tiny import tensor, tiny_checkpoint
from tiny_hybrid import hybrid_checkpoint
from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.integers import IntegerMatrix, read_quantised
from tokenmill.formats.quantised import QuantisedTensor
from tokenmill.formats.tensor import Tensor
from tokenmill.models.config import RopeConfig, config_from_checkpoint
from tokenmill.models.loader import load_model
from tokenmill.models.rope import rope_frequencies, rope_table
from tokenmill.models.weights import load_weights
from tokenmill.ops.api import RawTensor
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_weights import dequantise


def _load(checkpoint):
    return load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps())


def _values(checkpoint, name):
    found = checkpoint.tensors[name]
    return np.frombuffer(found.data, np.float32).reshape(found.shape)


def _matrix(weight):
    return np.concatenate([run for run, _ in weight.runs])


def test_stacks_neighbours():
    """q, k, v and gate, up are stacked in that order; a tied head is the embedding itself."""
    checkpoint = tiny_checkpoint(tied=True)
    weights = _load(checkpoint)
    at = "model.layers.1."
    qkv = [_values(checkpoint, f"{at}self_attn.{x}_proj.weight") for x in "qkv"]
    assert np.array_equal(_matrix(weights.layers[1].qkv.weight), np.concatenate(qkv))
    gate_up = [_values(checkpoint, f"{at}mlp.{x}_proj.weight") for x in ("gate", "up")]
    assert np.array_equal(_matrix(weights.layers[1].gate_up.weight), np.concatenate(gate_up))
    assert np.array_equal(_matrix(weights.layers[1].down.weight), _values(checkpoint, f"{at}mlp.down_proj.weight"))
    assert weights.head is weights.embed
    assert weights.num_bytes == sum(len(t.data) for t in checkpoint.tensors.values())


def test_layers_that_guess_further_are_not_read():
    """Qwen3.5's MTP layers may stand beside the others; a tensor that nobody knows may not."""
    checkpoint = hybrid_checkpoint("Qwen3.5")
    num_bytes = _load(checkpoint).num_bytes
    checkpoint.tensors["mtp.fc.weight"] = tensor("mtp.fc.weight", np.ones((64, 128)))
    assert _load(checkpoint).num_bytes == num_bytes
    checkpoint.tensors["model.fc.weight"] = tensor("model.fc.weight", np.ones((64, 128)))
    with pytest.raises(BadCheckpoint, match=r"unexpected model\.fc\.weight"):
        _load(checkpoint)


def test_untied_head_and_redundant_head():
    """An untied head is its own matrix, also of a file that says it is tied; one written twice is kept once."""
    checkpoint = tiny_checkpoint()
    assert np.array_equal(_matrix(_load(checkpoint).head), _values(checkpoint, "lm_head.weight"))
    checkpoint.metadata["tie_word_embeddings"] = True
    assert np.array_equal(_matrix(_load(checkpoint).head), _values(checkpoint, "lm_head.weight"))
    embed = checkpoint.tensors["model.embed_tokens.weight"]
    checkpoint.tensors["lm_head.weight"] = dataclasses.replace(embed, name="lm_head.weight")
    weights = _load(checkpoint)
    assert weights.head is weights.embed


def test_gguf_heads_become_half_split():
    """Pair (2i, 2i + 1) of each q and k head moves to (i, i + C/2); v rows stay."""
    checkpoint = tiny_checkpoint(kind="gguf")
    loaded = _matrix(_load(checkpoint).layers[0].qkv.weight)
    q, k, v = (_values(checkpoint, f"blk.0.attn_{x}.weight") for x in "qkv")
    for stored, first in ((q, 0), (k, 64)):
        for head in range(len(stored) // 16):
            for i in range(8):
                assert np.array_equal(loaded[first + head * 16 + i], stored[head * 16 + 2 * i])
                assert np.array_equal(loaded[first + head * 16 + 8 + i], stored[head * 16 + 2 * i + 1])
    assert np.array_equal(loaded[96:], v)


def test_moves_quantised_rows_whole():
    """Un-interleaving q8_0 rows gives the same values as un-interleaving what they decode to."""
    checkpoint = tiny_checkpoint(kind="gguf")
    name = "blk.0.attn_q.weight"
    rng = np.random.default_rng(3)
    blocks = np.zeros((64, 2), np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    blocks["d"] = rng.normal(size=(64, 2))
    blocks["q"] = rng.integers(-127, 128, (64, 2, 32))
    checkpoint.tensors[name] = Tensor(name, "q8_0", (64, 64), memoryview(blocks.reshape(-1).view(np.uint8)))
    decoded = (blocks["q"] * blocks["d"].astype(np.float32)[..., None]).reshape(64, 64)
    expected = decoded.reshape(4, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
    loaded = _load(checkpoint).layers[0].qkv.weight
    assert np.array_equal(_matrix(loaded)[:64], expected)
    assert [rounding for _, rounding in loaded.runs] == ["int8", "f32"]


def test_other_kinds_keep_their_codes():
    """A kind that the kernels have no block for (here q5_0) keeps its values in one that they have."""
    checkpoint = tiny_checkpoint()
    name = "model.layers.0.mlp.down_proj.weight"
    blocks = np.zeros((64, 3), np.dtype([("d", "<f2"), ("high", "<u4"), ("low", "u1", 16)]))
    blocks["d"], blocks["low"] = 0.5, 0x21  # codes 1 (first 16) and 2 (last 16), all below 16
    checkpoint.tensors[name] = Tensor(name, "q5_0", (64, 96), memoryview(blocks.reshape(-1).view(np.uint8)))
    down = _load(checkpoint).layers[0].down.weight
    assert set(np.unique(_matrix(down))) == {0.5 * (1 - 16), 0.5 * (2 - 16)}
    assert down.runs[0][1] == "int8", "quantised weights take quantised activations"


def test_stacked_matrices_share_their_order_or_lose_it():
    """Act-order matrices of one order stay packed under it; where orders differ all are multiplied out."""
    checkpoint = tiny_checkpoint()
    rng = np.random.default_rng(4)
    indices = [rng.permutation(np.arange(64) // 32).astype(np.int32) for _ in range(2)]
    at = "model.layers.0."
    wanted = {}

    def stored(name: str, values: np.ndarray, kind: str) -> Tensor:
        return Tensor(name, kind, values.shape, memoryview(values.tobytes()))

    for name, num_rows, index in (
        ("self_attn.q_proj", 64, 0), ("self_attn.k_proj", 32, 1), ("self_attn.v_proj", 32, 0),
        ("mlp.gate_proj", 96, 1), ("mlp.up_proj", 96, 1),
    ):  # fmt: skip
        parts = {
            "qweight": stored("qweight", rng.integers(-(2**31), 2**31, (8, num_rows)).astype(np.int32), "i32"),
            "qzeros": stored("qzeros", rng.integers(-(2**31), 2**31, (2, num_rows // 8)).astype(np.int32), "i32"),
            "scales": stored("scales", rng.uniform(0.01, 0.02, (2, num_rows)).astype(np.float16), "f16"),
            "g_idx": stored("g_idx", indices[index], "i32"),
        }
        made = QuantisedTensor(
            f"{at}{name}.weight", "i32", (num_rows, 64), parts["qweight"].data, "gptq", parts, 4, zero_offset=1
        )
        checkpoint.tensors[made.name] = made
        matrix = read_quantised(made)
        assert isinstance(matrix, IntegerMatrix) and matrix.order_K is not None
        wanted[name] = matrix.values()
    layer = _load(checkpoint).layers[0]
    qkv, gate_up = layer.qkv.weight, layer.gate_up.weight
    assert qkv.order is None and qkv.runs[0][1] == "f32"
    expected = np.concatenate([wanted[f"self_attn.{part}_proj"] for part in "qkv"])
    np.testing.assert_allclose(_matrix(qkv), expected, atol=2e-3)
    assert gate_up.order is not None and gate_up.runs[0][1] == "int8"
    expected = np.concatenate([wanted["mlp.gate_proj"], wanted["mlp.up_proj"]])
    np.testing.assert_allclose(_matrix(gate_up), expected[:, gate_up.order], atol=2e-3)


def test_biases_of_zeros_are_ignored():
    """Quantisers write them where a family has none; others are unexpected."""
    checkpoint = tiny_checkpoint()
    bias = "model.layers.0.self_attn.q_proj.bias"
    checkpoint.tensors[bias] = tensor(bias, np.zeros(64))
    _load(checkpoint)


def test_names_every_problem():
    """Missing, unexpected and misshaped tensors are all named in one error; long lists are cut."""
    checkpoint = tiny_checkpoint()
    del checkpoint.tensors["model.norm.weight"]
    bias = "model.layers.0.self_attn.q_proj.bias"
    checkpoint.tensors[bias] = tensor(bias, np.ones(64))
    gate = "model.layers.1.mlp.gate_proj.weight"
    checkpoint.tensors[gate] = tensor(gate, np.zeros((96, 32)))
    with pytest.raises(BadCheckpoint) as caught:
        _load(checkpoint)
    for part in ("missing model.norm.weight", f"unexpected {bias}", f"misshaped {gate} (96, 32) instead of (96, 64)"):
        assert part in caught.value.message
    checkpoint.tensors.clear()
    with pytest.raises(BadCheckpoint, match="and 15 more"):
        _load(checkpoint)


def test_derived_buffers_are_ignored():
    """Saved rotary frequencies follow from the config and are no problem."""
    checkpoint = tiny_checkpoint()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    checkpoint.tensors[name] = tensor(name, np.zeros(8))
    _load(checkpoint)


def test_rope_frequencies():
    """Plain, linear, llama3 (by wavelength, one pair at a time) and a checkpoint's own factors."""
    plain = rope_frequencies(RopeConfig(100.0), 8)
    np.testing.assert_allclose(plain, [100.0 ** (-i / 4) for i in range(4)])
    np.testing.assert_allclose(rope_frequencies(RopeConfig(100.0, "linear", 4.0), 8), plain / 4)
    np.testing.assert_allclose(rope_frequencies(RopeConfig(100.0, divisors=(1, 2, 4, 8)), 8), plain / [1, 2, 4, 8])

    scaled = rope_frequencies(RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 64), 32)
    for i, got in enumerate(scaled):
        frequency = 10000.0 ** (-i / 16)
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            expected = frequency
        elif wavelength > 64:
            expected = frequency / 8
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert math.isclose(got, expected), i
    assert len(set(np.round(scaled * 10000.0 ** (np.arange(16) / 16), 6))) > 3, "all three ranges must occur"


def test_rope_table_layout():
    """Row p: cosines of the C/2 pairs, then sines."""
    table = rope_table(np.array([1.0, 0.5]), 5)
    expected = [math.cos(3), math.cos(1.5), math.sin(3), math.sin(1.5)]
    np.testing.assert_allclose(table[3], expected, rtol=1e-6)
    assert table.shape == (5, 4) and table.dtype == np.float32


def test_rope_digest_tells_frequencies_apart():
    """Two models with equal weights and different RoPE have different digests; the table's length does not matter."""
    checkpoint = tiny_checkpoint()
    first = load_model(checkpoint, ReferenceOps(), max_model_len=64)
    longer = load_model(checkpoint, ReferenceOps(), max_model_len=128)
    checkpoint.metadata["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    other = load_model(checkpoint, ReferenceOps(), max_model_len=64)
    assert first.rope_digest == longer.rope_digest != other.rope_digest


@pytest.mark.parametrize(("quantization", "ends"), [("q4_1", "q8_0"), ("q8_0", "q8_0"), ("bf16", "bf16")])
def test_quantises_dense_matrices_at_load(quantization, ends):
    """Every matrix is quantised once, embeddings and head with 8 bits at least; norms stay; progress is shown."""
    checkpoint = tiny_checkpoint()
    seen = []
    ops = ReferenceOps()
    weights = load_weights(
        checkpoint,
        config_from_checkpoint(checkpoint),
        ops,
        quantization=quantization,
        progress=lambda done, total: seen.append((done, total)),
    )

    def expected(name, kind):
        values = _values(checkpoint, name)
        raw = RawTensor("f32", *values.shape, np.frombuffer(checkpoint.tensors[name].data, np.uint8))
        return dequantise(ops.quantise(raw, kind))

    assert np.array_equal(_matrix(weights.embed), expected("model.embed_tokens.weight", ends))
    down = expected("model.layers.1.mlp.down_proj.weight", quantization)
    assert np.array_equal(_matrix(weights.layers[1].down.weight), down)
    assert np.array_equal(weights.final_norm.weight, _values(checkpoint, "model.norm.weight"))
    assert seen == sorted(seen) and len({total for _, total in seen}) == 1 and seen[-1][0] > 0.9 * seen[-1][1]
