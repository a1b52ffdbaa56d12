"""A small Hugging Face checkpoint with latent attention as the GGUF file that llama.cpp's converters make of it: of
today, with matrices for the absorbed form, or of before, with keys and values of latents in one matrix."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.models.config import ModelConfig, config_from_checkpoint
from tokenmill.models.roles import EXPERT_ROLES, expert_names, layer_names
from tokenmill.models.tensor_names import GLOBAL_NAMES, LAYER_NAMES, WHOLE_NAMES
from tokenmill.ops.api import SIGMOID

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from gguf_writer import write_gguf

GGUF_NAMES = {
    "DeepseekV2": "deepseek2",
    "DeepseekV3": "deepseek2",
    "Glm4MoeLite": "deepseek2",
    "MiniCPM3": "minicpm3",
}
"""Class of transformers, less 'ForCausalLM' -> GGUF architecture."""

_F32 = 0


def convert_latent(folder: Path, path: Path, *, absorbed: bool = True) -> Path:
    """Write the folder's model to `path` as f32 GGUF, with no vocabulary."""
    checkpoint = open_checkpoint(folder)
    config = config_from_checkpoint(checkpoint)
    found = {
        f"{GLOBAL_NAMES['gguf'][role]}.weight": _values(checkpoint, f"{name}.weight")
        for role, name in GLOBAL_NAMES["hf"].items()
        if f"{name}.weight" in checkpoint.tensors and (role != "head" or not config.tied_embeddings)
    }
    for layer in range(config.num_layers):
        found |= _layer(checkpoint, config, layer, absorbed)
    tensors = {
        name: (_F32, list(values.shape[::-1]), np.ascontiguousarray(values, "<f4").tobytes())
        for name, values in found.items()
    }
    return write_gguf(path, _metadata(config, absorbed), tensors)


def _values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensors[name]
    return dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(tensor.shape)


def _layer(checkpoint: Checkpoint, config: ModelConfig, layer: int, absorbed: bool) -> dict[str, np.ndarray]:
    found = {}
    for role, name in layer_names("hf", config, layer).items():
        ours = LAYER_NAMES["gguf"][role].format(layer)
        if role in WHOLE_NAMES:
            found[ours] = _values(checkpoint, name)
        elif role in EXPERT_ROLES:
            each = [_values(checkpoint, f"{one}.weight") for one in expert_names(config, role, name)]
            found[f"{ours}.weight"] = np.stack(each)
        elif role == "kv_b" and absorbed:
            found |= _absorbed(config, layer, _values(checkpoint, f"{name}.weight"))
        else:
            found[f"{ours}.weight"] = _values(checkpoint, f"{name}.weight")
            if role in config.biases:
                found[f"{ours}.bias"] = _values(checkpoint, f"{name}.bias")
    return found


def _absorbed(config: ModelConfig, layer: int, kv_b: np.ndarray) -> dict[str, np.ndarray]:
    latent = config.latent
    assert latent is not None
    by_head = kv_b.reshape(latent.num_heads, -1, latent.latent_dim)
    keys, values = by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :]
    names = LAYER_NAMES["gguf"]
    return {
        f"{names['k_b'].format(layer)}.weight": keys.swapaxes(1, 2),
        f"{names['v_b'].format(layer)}.weight": values,
    }


def _metadata(config: ModelConfig, absorbed: bool) -> dict[str, Any]:
    latent, moe = config.latent, config.moe
    assert latent is not None
    rope = config.layers[0].rope
    assert rope is not None
    keys: dict[str, Any] = {
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "feed_forward_length": config.ffn_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": 1 if absorbed else config.num_heads,
        "attention.key_length": latent.key_dim if absorbed else latent.query_dim,
        "attention.value_length": latent.latent_dim if absorbed else latent.value_dim,
        "attention.kv_lora_rank": latent.latent_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": latent.rope_dim,
        "rope.freq_base": float(rope.base),
        "vocab_size": config.vocab_size,
    }
    if absorbed:
        keys |= {"attention.key_length_mla": latent.query_dim, "attention.value_length_mla": latent.value_dim}
    if config.query_rank:
        keys["attention.q_lora_rank"] = config.query_rank
    if rope.scaling == "yarn":
        stretch = (config.attention_scale * latent.query_dim**0.5) ** 0.5
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope.factor),
            "rope.scaling.original_context_length": rope.original_context,
            "rope.scaling.yarn_log_multiplier": float((stretch - 1) / np.log(rope.factor)),
        }
    if moe is not None:
        routing = moe.routing
        keys |= {
            "leading_dense_block_count": min(index for index, each in enumerate(config.layers) if each.is_moe),
            "expert_count": routing.num_experts,
            "expert_used_count": routing.top_k,
            "expert_feed_forward_length": moe.expert_width,
            "expert_shared_count": moe.shared_width // moe.expert_width,
            "expert_weights_scale": float(routing.scale),
            "expert_weights_norm": routing.normalise,
            "expert_gating_func": 2 if routing.score == SIGMOID else 1,
        }
        if routing.num_groups > 1:
            keys |= {"expert_group_count": routing.num_groups, "expert_group_used_count": routing.top_groups}
    architecture = "deepseek2" if moe is not None else "minicpm3"
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture, **named, "tokenizer.ggml.model": "no_vocab"}
