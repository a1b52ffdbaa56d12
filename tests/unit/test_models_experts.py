"""Experts in every form that matrices have: what is packed is what the file means; and settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_formats_quantised import pack_words, tensor
from test_lora_model import Running, close

from adapters import merged, random_pairs, write_adapter
from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.experts import as_published
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.tensor import Tensor
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.roles import expected_shapes
from tokenmill.models.weights import load_weights
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_moe import ReferenceStack

D, F, E = 128, 256, 3
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
BLOCK = "model.layers.0.block_sparse_moe."
GGUF: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.embedding_length": 256,
    "qwen3moe.feed_forward_length": 512,
    "qwen3moe.expert_feed_forward_length": 256,
    "qwen3moe.block_count": 1,
    "qwen3moe.context_length": 64,
    "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.expert_count": E,
    "qwen3moe.expert_used_count": 2,
}


def dense(metadata: dict[str, Any], kind: str = "hf", seeds: dict[str, Tensor] | None = None) -> Checkpoint:
    """Random tensors of all that the metadata ask for."""
    rng = np.random.default_rng(0)
    first = Checkpoint(kind, Path("experts"), metadata, dict(seeds or {}))
    shapes = expected_shapes(kind, config_from_checkpoint(first))
    tensors = {name: tensor(name, (0.1 * rng.normal(size=shape)).astype(np.float32)) for name, shape in shapes.items()}
    return Checkpoint(kind, Path("experts"), metadata, tensors | (seeds or {}))


def gptq(name: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Tensor], np.ndarray]:
    """With act-order, another for each expert: what is packed has no order."""
    num_rows, num_cols = shape
    codes, zeros = rng.integers(0, 16, shape), rng.integers(1, 16, (num_rows, num_cols // 32))
    scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16)
    index = rng.permutation(np.arange(num_cols) // 32).astype(np.int32)
    parts = {
        "qweight": pack_words(codes.T, 4, 0),
        "qzeros": pack_words(zeros.T - 1, 4, 1),
        "scales": scales.T,
        "g_idx": index,
    }
    return _named(name, parts), (codes - zeros[:, index]) * scales.astype(np.float32)[:, index]


def awq(name: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Tensor], np.ndarray]:
    codes, zeros = rng.integers(0, 16, shape), rng.integers(0, 16, (shape[0], shape[1] // 32))
    scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        "qweight": pack_words(codes.T, 4, 1, order),
        "qzeros": pack_words(zeros.T, 4, 1, order),
        "scales": scales.T,
    }
    return _named(name, parts), (codes - zeros.repeat(32, axis=1)) * scales.astype(np.float32).repeat(32, axis=1)


def packed(name: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Tensor], np.ndarray]:
    codes = rng.integers(0, 16, shape)
    scales = rng.uniform(0.001, 0.02, (shape[0], shape[1] // 32)).astype(np.float16)
    parts = {"weight_packed": pack_words(codes, 4, 1), "weight_scale": scales, "weight_shape": np.array(shape)}
    return _named(name, parts), (codes - 8) * scales.astype(np.float32).repeat(32, axis=1)


def fp8(name: str, shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Tensor], np.ndarray]:
    codes = rng.integers(0, 120, shape).astype(np.uint8)
    scales = rng.uniform(0.001, 0.01, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    values = dequantise("f8_e4m3", memoryview(codes.tobytes()), codes.size).reshape(shape)
    wide = scales.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]
    parts = {"weight": codes, "weight_scale_inv": scales}
    return _named(name, parts), values * wide


def _named(name: str, parts: dict[str, np.ndarray]) -> dict[str, Tensor]:
    return {f"{name}.{suffix}": tensor(f"{name}.{suffix}", values) for suffix, values in parts.items()}


def values_of(stack: Any, expert: int) -> np.ndarray:
    assert isinstance(stack, ReferenceStack)
    return np.concatenate([run for run, _ in stack.matrices[expert].runs])


@pytest.mark.parametrize(
    ("make", "settings", "kinds"),
    [
        (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": True}, "f32"),
        (awq, {"quant_method": "awq", "bits": 4}, "int8"),
        (packed, {"format": "pack-quantized", "config_groups": {"g": {"weights": {"num_bits": 4}}}}, "int8"),
        (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "f32"),
    ],
)
def test_quantised_by_other_tools(make: Any, settings: dict[str, Any], kinds: str) -> None:
    """Each expert's codes and scales as if it were a matrix of its own; act-order is undone."""
    checkpoint, rng, wanted = dense(MIXTRAL), np.random.default_rng(1), {}
    for expert in range(E):
        for part, shape in (("w1", (F, D)), ("w3", (F, D)), ("w2", (D, F))):
            name = f"{BLOCK}experts.{expert}.{part}"
            del checkpoint.tensors[f"{name}.weight"]
            parts, wanted[expert, part] = make(name, shape, rng)
            checkpoint.tensors.update(parts)
    joined = join_quantised(checkpoint.tensors, {"quantization_config": settings})
    checkpoint = Checkpoint("hf", checkpoint.path, MIXTRAL, joined)
    moe = load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps()).layers[0].moe
    assert moe is not None and moe.experts.gate_up.matrices[0].runs[0][1] == kinds
    for expert in range(E):
        gate_up = np.concatenate([wanted[expert, "w1"], wanted[expert, "w3"]])
        for got, expected in ((moe.experts.gate_up, gate_up), (moe.experts.down, wanted[expert, "w2"])):
            np.testing.assert_allclose(values_of(got, expert), expected, atol=2.0**-9 * np.abs(expected).max())


def test_quantised_at_load() -> None:
    """Experts and shared experts become `quantization`; the router stays as stored."""
    checkpoint = dense(MIXTRAL)
    ops = ReferenceOps()
    weights = load_weights(checkpoint, config_from_checkpoint(checkpoint), ops, quantization="q4_0")
    moe = weights.layers[0].moe
    assert moe is not None
    stored = checkpoint.tensors[f"{BLOCK}gate.weight"]
    router = np.concatenate([run for run, _ in moe.router.weight.runs])
    assert np.array_equal(router, np.frombuffer(stored.data, np.float32).reshape(stored.shape))
    assert len(np.unique(values_of(moe.experts.down, 1)[0, :32])) <= 16


@pytest.mark.parametrize("kinds", [("q4_k", "q4_k", "q6_k"), ("q8_0", "q5_0", "q8_0"), ("mxfp4", "mxfp4", "mxfp4")])
def test_blocks_of_gguf_stacks(kinds: tuple[str, str, str]) -> None:
    """One tensor for all experts: gates, ups and downs, each of any kind; where gates and ups differ they are
    multiplied out, and nothing else is."""
    gguf = pytest.importorskip("gguf")
    rng, seeds, wanted = np.random.default_rng(2), {}, {}
    for part, kind in zip(("gate", "up", "down"), kinds, strict=True):
        name, as_type = f"blk.0.ffn_{part}_exps.weight", gguf.GGMLQuantizationType[kind.upper()]
        size = gguf.quant_shape_to_byte_shape((E, 256, 256), as_type)
        raw = rng.integers(0, 256, size).astype(np.uint8)
        if kind == "mxfp4":
            raw.reshape(-1, 17)[:, 0] = 120
        else:
            at = {"q4_k": (0, 2), "q6_k": (208,), "q8_0": (0,), "q5_0": (0,)}[kind]
            blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[as_type][1])
            for first in at:
                blocks[:, first : first + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        seeds[name] = Tensor(name, kind, (E, 256, 256), memoryview(raw.tobytes()))
        wanted[part] = dequantise(kind, seeds[name].data, E * 256 * 256).reshape(E, 256, 256)
    seeds["blk.0.ffn_gate_inp.weight"] = tensor("blk.0.ffn_gate_inp.weight", np.ones((E, 256), np.float32))
    seeds["token_embd.weight"] = tensor("token_embd.weight", np.ones((32, 256), np.float32))
    checkpoint = dense(GGUF, "gguf", seeds)
    moe = load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps()).layers[0].moe
    assert moe is not None
    assert moe.experts.gate_up.matrices[0].runs[0][1] == ("int8" if kinds[0] == kinds[1] else "f32")
    for expert in range(E):
        both = np.concatenate([wanted["gate"][expert], wanted["up"][expert]])
        for got, expected in ((moe.experts.gate_up, both), (moe.experts.down, wanted["down"][expert])):
            np.testing.assert_allclose(values_of(got, expert), expected, atol=2.0**-8 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_experts_per_tok": E + 1}, "4 experts for a token are more than the 3"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be a positive"),
        ({"num_local_experts": 2**30}, "num_local_experts must be"),
        ({"num_local_experts": 4000}, "4000 experts"),
        ({"num_local_experts": E, "num_experts": 9}, "num_local_experts and num_experts differ"),
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func = 'sqrtsoftplus'"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5"),
        ({"moe_router_bias": True}, "moe_router_bias = True"),
    ],
)
def test_routers_that_are_not_known_are_refused(settings: dict[str, Any], named: str) -> None:
    checkpoint = dense(MIXTRAL)
    changed = Checkpoint("hf", checkpoint.path, MIXTRAL | settings, checkpoint.tensors)
    with pytest.raises(BadCheckpoint, match=named):
        load_weights(changed, config_from_checkpoint(changed), ReferenceOps())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"expert_used_count": 9}, "9 experts for a token"),
        ({"expert_gating_func": 2}, "expert_gating_func = 2 is not supported"),
        ({"expert_weights_norm": False}, "expert_weights_norm = False"),
        ({"expert_group_count": 2}, "do not divide into 2 groups"),
        ({"expert_chunk_count": 2}, "qwen3moe.expert_chunk_count = 2"),
        ({"expert_count": 2**40}, "expert_count must be"),
        ({"nextn_predict_layers": 1}, "of 1 layers none is left"),
        ({"expert_count": E + 1}, "misshaped blk.0.ffn_gate_inp.weight"),
        ({"expert_feed_forward_length": 128}, "misshaped blk.0.ffn_gate_exps.weight"),
    ],
)
def test_so_they_are_in_gguf_files(settings: dict[str, Any], named: str) -> None:
    seeds = {
        name: tensor(name, np.ones(shape, np.float32))
        for name, shape in {
            "token_embd.weight": (32, 256),
            "blk.0.ffn_gate_inp.weight": (E, 256),
            "blk.0.ffn_gate_exps.weight": (E, 256, 256),
            "blk.0.ffn_up_exps.weight": (E, 256, 256),
        }.items()
    }
    sound = dense(GGUF, "gguf", seeds)
    load_weights(sound, config_from_checkpoint(sound), ReferenceOps())
    changed = Checkpoint(
        "gguf", sound.path, GGUF | {f"qwen3moe.{key}": item for key, item in settings.items()}, sound.tensors
    )
    with pytest.raises(BadCheckpoint, match=named):
        load_weights(changed, config_from_checkpoint(changed), ReferenceOps())


def test_hostile_tensors_of_experts_are_refused() -> None:
    """A tensor of experts that is short of one, flat, or of another order of axes."""
    seeds = {
        "token_embd.weight": tensor("token_embd.weight", np.ones((32, 256), np.float32)),
        "blk.0.ffn_gate_inp.weight": tensor("blk.0.ffn_gate_inp.weight", np.ones((E, 256), np.float32)),
        "blk.0.ffn_gate_exps.weight": tensor("blk.0.ffn_gate_exps.weight", np.ones((E, 256, 256), np.float32)),
    }
    name = "blk.0.ffn_down_exps.weight"
    for shape in ((E - 1, 256, 256), (E * 256, 256), (256, E, 256), (E * 256 * 256,), (1, E, 256, 256)):
        checkpoint = dense(GGUF, "gguf", seeds)
        checkpoint.tensors[name] = tensor(name, np.ones(shape, np.float32))
        with pytest.raises(BadCheckpoint, match=f"misshaped {name}"):
            load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps())
    for shape in ((256,), (), (E, 0, 256)):
        checkpoint = dense(GGUF, "gguf", seeds)
        checkpoint.tensors["blk.0.ffn_gate_exps.weight"] = tensor("g", np.ones(shape, np.float32))
        with pytest.raises(BadCheckpoint, match=r"router and no experts|misshaped"):
            load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps())


@pytest.mark.parametrize("shape", [(E, 2 * F), (E, 2 * F + 1, D), (5000, 2, 1), (0, 2 * F, D), ()])
def test_merged_experts_of_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(BadCheckpoint, match="is not one of experts"):
        as_published({name: tensor(name, np.zeros(shape, np.float32))}, MIXTRAL)


def test_adapters_change_attention_and_not_experts(tmp_path: Path) -> None:
    base = dense(MIXTRAL)
    running = Running(ReferenceOps(), base)
    folder = write_adapter(tmp_path / "a", random_pairs(base, modules=("q_proj", "v_proj", "o_proj", "lm_head")))
    got = running.logits([running.load(folder), 0])
    for logits, checkpoint in zip(got, (merged(base, folder), base), strict=True):
        close(logits, Running(ReferenceOps(), checkpoint, lora=None).logits([0])[0])
    assert np.abs(got[0] - got[1]).max() > 0.1
    for index, module in enumerate(("w1", "gate")):
        pairs = random_pairs(base, modules=(module,))
        assert pairs and all("block_sparse_moe" in name for name in pairs)
        with pytest.raises(BadCheckpoint, match=r"block_sparse_moe.*cannot be adapted in Mixtral.*can: self_"):
            running.load(write_adapter(tmp_path / str(index), pairs))
