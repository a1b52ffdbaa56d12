"""Turns a small Hugging Face checkpoint into the GGUF file that llama.cpp's converter would make of it.

Conventions of the converter: q and k rows of some architectures are reordered for interleaved RoPE pairs, Gemma's norm
weights are stored plus one, scales and windows are keys under the architecture's name, matrices keep their values.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.models.config import ModelConfig, config_from_checkpoint
from tokenmill.models.families import GGUF_FAMILIES, GLOBAL_NAMES
from tokenmill.models.weights import layer_names

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from gguf_writer import write_gguf

ARCHITECTURES = {
    "Llama": "llama",
    "Mistral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "SmolLM3": "smollm3",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Phi3": "phi3",
    "Olmo2": "olmo2",
    "Granite": "granite",
    "Starcoder2": "starcoder2",
    "StableLm": "stablelm",
    "Exaone4": "exaone4",
    "SeedOss": "seed_oss",
}
"""Class of transformers, less 'ForCausalLM' -> GGUF architecture."""

_F32 = 0


def convert(folder: Path, family: str, path: Path) -> Path:
    """Write the folder's model to `path` as f32 GGUF, with no vocabulary."""
    checkpoint = open_checkpoint(folder)
    config, architecture = config_from_checkpoint(checkpoint), ARCHITECTURES[family]
    theirs = layer_names("hf", config)
    target = GGUF_FAMILIES[architecture]
    names = {name: GLOBAL_NAMES["gguf"][role] for role, name in GLOBAL_NAMES["hf"].items()}
    ours = layer_names("gguf", _with_family(config, architecture))
    for layer in range(config.num_layers):
        names |= {theirs[role].format(layer): ours[role].format(layer) for role in theirs}
    interleaved = {
        theirs[role].format(layer): heads
        for role, heads in (("q", config.num_heads), ("k", config.num_kv_heads))
        for layer in range(config.num_layers)
        if target.interleaved_heads
    }
    tensors: dict[str, tuple[int, list[int], bytes]] = {}
    for name, tensor in checkpoint.tensors.items():
        base, _, suffix = name.rpartition(".")
        if config.tied_embeddings and base == GLOBAL_NAMES["hf"]["head"]:
            continue
        values = dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(tensor.shape)
        if base in interleaved:
            values = _interleave(values, interleaved[base])
        if "norm" in base:
            values = values + np.float32(config.family.norm_offset)
        tensors[f"{names[base]}.{suffix}"] = (_F32, list(values.shape[::-1]), values.astype("<f4").tobytes())
    for key, values in _rope_tensors(config).items():
        tensors[key] = (_F32, [len(values)], np.array(values, "<f4").tobytes())
    return write_gguf(path, _metadata(config, architecture), tensors)


def _with_family(config: ModelConfig, architecture: str) -> ModelConfig:
    import dataclasses

    return dataclasses.replace(config, family=GGUF_FAMILIES[architecture])


def _interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    by_half = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return by_half.swapaxes(1, 2).reshape(values.shape)


def _rope_tensors(config: ModelConfig) -> dict[str, Any]:
    rope = next(layer.rope for layer in config.layers if (layer.rope is not None and not layer.window) or layer.rope)
    if rope.scaling == "longrope":
        return {"rope_factors_short.weight": rope.short_divisors, "rope_factors_long.weight": rope.long_divisors}
    if rope.scaling == "llama3":
        from tokenmill.models.config import RopeConfig
        from tokenmill.models.rope import rope_frequencies

        plain = rope_frequencies(RopeConfig(rope.base), config.rotary_dim)
        return {"rope_freqs.weight": plain / rope_frequencies(rope, config.rotary_dim)}
    return {}


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
        "rope.freq_base": float(rope.base),
        "vocab_size": config.vocab_size,
    }
    windows = [layer.window for layer in config.layers]
    if any(windows):
        keys["attention.sliding_window"] = max(windows)
    if rope.scaling in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope.original_context
    if rope.scaling == "longrope":
        keys["rope.scaling.attn_factor"] = float(rope.cos_scale)
    for key, value in (("attn_logit_softcapping", config.attention_cap), ("final_logit_softcapping", config.logit_cap)):
        if value:
            keys[key] = float(value)
    if architecture == "granite":
        keys |= {
            "attention.scale": float(config.attention_scale),
            "embedding_scale": float(config.embed_scale),
            "residual_scale": float(config.residual_scale),
            "logit_scale": 1 / config.logit_scale,
        }
    tokens = {"tokenizer.ggml.model": "no_vocab"}
    return {"general.architecture": architecture, **{f"{architecture}.{key}": keys[key] for key in keys}, **tokens}
