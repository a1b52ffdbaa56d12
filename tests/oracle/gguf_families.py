"""Turns a small Hugging Face checkpoint into the GGUF file that llama.cpp's converter would make of it.

Conventions of the converter: q and k rows of some architectures are reordered for interleaved RoPE pairs, Gemma's norm
weights are stored plus one, scales and windows are keys under the architecture's name, matrices keep their values.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.formats.quantised import QuantisedTensor
from tokenmill.formats.tensor import Tensor
from tokenmill.models.config import ModelConfig, config_from_checkpoint
from tokenmill.models.families import GGUF_FAMILIES
from tokenmill.models.family import SEQUENTIAL
from tokenmill.models.moe import MERGED, PAIRED, STACKED
from tokenmill.models.repack import raw_matrix
from tokenmill.models.roles import EXPERT_ROLES, expert_names, layer_names
from tokenmill.models.rope import RopeConfig, rope_frequencies
from tokenmill.models.tensor_names import GLOBAL_NAMES, WHOLE_NAMES, global_names
from tokenmill.ops.api import SIGMOID
from tokenmill.ops.reference_weights import dequantise as dequantise_raw

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from gguf_writer import write_gguf

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Ministral3": "mistral3",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "SmolLM3": "smollm3",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Phi3": "phi3",
    "Olmo": "olmo",
    "Olmo2": "olmo2",
    "Granite": "granite",
    "MiniCPM": "minicpm",
    "Starcoder2": "starcoder2",
    "StableLm": "stablelm",
    "Cohere": "command-r",
    "Cohere2": "cohere2",
    "Arcee": "arcee",
    "Nemotron": "nemotron",
    "HunYuanDenseV1": "hunyuan-dense",
    "Phi": "phi2",
    "GPTNeoX": "gptneox",
    "Falcon": "falcon",
    "Exaone": "exaone",
    "Exaone4": "exaone4",
    "SeedOss": "seed_oss",
    "Mixtral": "llama",
    "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe",
    "Olmoe": "olmoe",
    "GraniteMoe": "granitemoe",
    "GraniteMoeShared": "granitemoe",
    "Glm4Moe": "glm4moe",
    "GptOss": "gpt-oss",
    "Ernie4_5_Moe": "ernie4_5-moe",
    "MiniMaxM2": "minimax-m2",
    "HunYuanMoEV1": "hunyuan-moe",
    "BailingMoeV2": "bailingmoe2",
    "ExaoneMoe": "exaone-moe",
    "Afmoe": "afmoe",
}
"""Class of transformers, less 'ForCausalLM' -> GGUF architecture."""

_F32 = 0


def convert(folder: Path, family: str, path: Path, form: str = STACKED) -> Path:
    """Write the folder's model to `path` as f32 GGUF, with no vocabulary. form: of experts."""
    checkpoint = open_checkpoint(folder)
    config, architecture = config_from_checkpoint(checkpoint), ARCHITECTURES[family]
    target = GGUF_FAMILIES[architecture]
    names = {name: GLOBAL_NAMES["gguf"][role] for role, name in global_names("hf", config.family.names).items()}
    interleaved: dict[str, int] = {}
    for layer in range(config.num_layers):
        theirs = layer_names("hf", config, layer)
        ours = layer_names("gguf", _with_family(config, architecture, form), layer)
        names |= {theirs[role]: ours[role] for role in theirs if role in ours}
        if target.interleaved_heads and not config.family.interleaved_heads:
            interleaved |= {theirs["q"]: config.num_heads, theirs["k"]: config.num_kv_heads}
    tensors: dict[str, tuple[int, list[int], bytes]] = {}
    done: set[str] = set()
    for layer in range(config.num_layers):
        for name, values in moe_tensors(checkpoint, config, _with_family(config, architecture, form), layer, done):
            tensors[name] = (_F32, list(values.shape[::-1]), values.astype("<f4").tobytes())
    for name, tensor in checkpoint.tensors.items():
        if name in done:
            continue
        base, _, suffix = name.rpartition(".")
        if config.tied_embeddings and names.get(base) == "output":
            continue
        values = dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(tensor.shape)
        if names[base].endswith("attn_qkv") and config.family.qkv_by_group:
            values = _by_kind(values, config)
        if base in interleaved:
            values = _interleave(values, interleaved[base])
        if "norm" in base and suffix == "weight":
            values = values + np.float32(config.family.norm_offset)
        tensors[f"{names[base]}.{suffix}"] = (_F32, list(values.shape[::-1]), values.astype("<f4").tobytes())
    for key, values in _rope_tensors(config).items():
        tensors[key] = (_F32, [len(values)], np.array(values, "<f4").tobytes())
    return write_gguf(path, _metadata(config, architecture), tensors)


def moe_tensors(
    checkpoint: Checkpoint, theirs: ModelConfig, ours: ModelConfig, layer: int, done: set[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """What of a layer is a matter of experts, in the form of `ours`; adds to `done` what names that had."""
    if not theirs.layers[layer].is_moe:
        return
    found: dict[str, np.ndarray] = {}
    for role, name in layer_names("hf", theirs, layer).items():
        if role in EXPERT_ROLES or role.startswith("shared") or role in WHOLE_NAMES:
            ends = "" if role in WHOLE_NAMES else ".weight"
            parts = [checkpoint.tensors[f"{one}{ends}"] for one in expert_names(theirs, role, name)]
            done |= {part.name for part in parts}
            values = [_values(part) for part in parts]
            found[role] = np.stack(values) if len(values) > 1 else values[0]
        if role in EXPERT_ROLES and role in theirs.biases:
            parts = [checkpoint.tensors[f"{one}.bias"] for one in expert_names(theirs, role, name)]
            done |= {part.name for part in parts}
            found[f"{role}.bias"] = np.stack([_values(part) for part in parts])
    paired = theirs.moe is not None and theirs.moe.form == PAIRED
    for both, halves in (
        ("expert_gate_up", ("expert_gate", "expert_up")),
        ("expert_gate_up.bias", ("expert_gate.bias", "expert_up.bias")),
        ("shared_gate_up", ("shared_gate", "shared_up")),
    ):
        if both in found:
            values, axis = found.pop(both), -1 if both.endswith("bias") else -2
            in_turns = [values.take(range(first, values.shape[axis], 2), axis) for first in (0, 1)]
            found |= zip(halves, in_turns if paired else np.split(values, 2, axis=axis), strict=True)
    if ours.moe is not None and ours.moe.form == MERGED:
        found["expert_gate_up"] = np.concatenate([found.pop("expert_gate"), found.pop("expert_up")], axis=-2)
    for role, name in layer_names("gguf", ours, layer).items():
        if f"{role}.bias" in found:
            yield f"{name}.bias", found[f"{role}.bias"]
        if role not in found:
            continue
        if role in WHOLE_NAMES:
            yield name, found[role].reshape(-1)
        elif role == "shared_mix":
            yield f"{name}.weight", found[role].reshape(-1)
        elif "{e}" in name:
            yield from ((f"{name.format(e=expert)}.weight", values) for expert, values in enumerate(found[role]))
        else:
            yield f"{name}.weight", found[role]


def _values(tensor: Tensor | QuantisedTensor) -> np.ndarray:
    if isinstance(tensor, QuantisedTensor):
        return dequantise_raw(raw_matrix(tensor))
    return dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(tensor.shape)


def _with_family(config: ModelConfig, architecture: str, form: str) -> ModelConfig:
    moe = None if config.moe is None else dataclasses.replace(config.moe, form=form)
    return dataclasses.replace(config, family=GGUF_FAMILIES[architecture].with_residual(config.residual), moe=moe)


def _by_kind(values: np.ndarray, config: ModelConfig) -> np.ndarray:
    """All queries, keys and values, of rows that go by KV head."""
    parts = values.reshape(config.num_kv_heads, -1, config.head_dim, *values.shape[1:])
    kinds = (parts[:, :-2], parts[:, -2], parts[:, -1])
    return np.concatenate([kind.reshape(-1, *values.shape[1:]) for kind in kinds])


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    by_half = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return by_half.swapaxes(1, 2).reshape(values.shape)


def _rope_tensors(config: ModelConfig) -> dict[str, Any]:
    rope = next(layer.rope for layer in config.layers if (layer.rope is not None and not layer.window) or layer.rope)
    if rope.scaling == "longrope":
        return {"rope_factors_short.weight": rope.short_divisors, "rope_factors_long.weight": rope.long_divisors}
    if rope.scaling == "llama3":
        plain = rope_frequencies(RopeConfig(rope.base), config.rotary_dim)
        return {"rope_freqs.weight": plain / rope_frequencies(rope, config.rotary_dim)}
    return {}


def _stretched_base(rope: RopeConfig, num_turned: int) -> float:
    return float(rope.base * (rope.factor ** (num_turned / (num_turned - 2)) if rope.scaling == "ntk" else 1))


def _metadata(config: ModelConfig, architecture: str) -> dict[str, Any]:
    rope = next(layer.rope for layer in reversed(config.layers) if layer.rope is not None)
    if config.family.local_rope:
        rope = next(layer.rope for layer in config.layers if not layer.window and layer.rope is not None)
    norm = "layer_norm_epsilon" if config.family.norm == "layer" else "layer_norm_rms_epsilon"
    keys: dict[str, Any] = {
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "feed_forward_length": config.ffn_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{norm}": config.norm_eps,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": _stretched_base(rope, config.rotary_dim),
        "vocab_size": config.vocab_size,
    }
    windows = [layer.window for layer in config.layers]
    if any(windows):
        keys["attention.sliding_window"] = max(windows)
    if rope.scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope.original_context
    if rope.query_beta:
        keys |= {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": rope.query_beta}
    if rope.scaling == "longrope":
        keys["rope.scaling.attn_factor"] = float(rope.cos_scale)
    for key, value in (("attn_logit_softcapping", config.attention_cap), ("final_logit_softcapping", config.logit_cap)):
        if value:
            keys[key] = float(value)
    if config.moe is not None:
        keys |= _moe_keys(config)
    if architecture in ("granite", "granitemoe", "minicpm"):
        keys |= {
            "attention.scale": float(config.attention_scale),
            "embedding_scale": float(config.embed_scale),
            "residual_scale": float(config.residual_scale),
            "logit_scale": 1 / config.logit_scale,
        }
    if GGUF_FAMILIES[architecture].residual_key:
        keys[GGUF_FAMILIES[architecture].residual_key] = config.residual != SEQUENTIAL
    if GGUF_FAMILIES[architecture].logits_multiplied:
        keys["logit_scale"] = config.logit_scale
    tokens = {"tokenizer.ggml.model": "no_vocab"}
    return {"general.architecture": architecture, **{f"{architecture}.{key}": keys[key] for key in keys}, **tokens}


def _stretched_base(rope: RopeConfig, num_turned: int) -> float:
    return rope.base * rope.factor ** (num_turned / (num_turned - 2)) if rope.scaling == "ntk" else rope.base


def _moe_keys(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    routing = moe.routing
    keys: dict[str, Any] = {
        "expert_count": routing.num_experts,
        "expert_used_count": routing.top_k,
        "expert_feed_forward_length": moe.expert_width,
    }
    if moe.shared_width and routing.score != SIGMOID:
        keys["expert_shared_feed_forward_length"] = moe.shared_width
    if moe.choice_bias and routing.score != SIGMOID:
        keys["interleave_moe_layer_step"] = 1
    if moe.choice_bias:
        keys["leading_dense_block_count"] = [layer.is_moe for layer in config.layers].index(True)
    if routing.score == SIGMOID:
        keys |= {
            "expert_shared_count": moe.shared_width // moe.expert_width,
            "expert_gating_func": 2,
            "expert_weights_scale": routing.scale,
            "expert_weights_norm": routing.normalise,
            "expert_group_count": routing.num_groups,
            "expert_group_used_count": routing.top_groups,
        }
    return keys
