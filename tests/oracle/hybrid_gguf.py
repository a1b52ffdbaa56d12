"""A small folder of a hybrid model as the GGUF file that llama.cpp's converters make of it.

Read from the folder's files alone. Decays are stored as -exp(A_log), Qwen's norms plus one, convolutions without their
middle size. Qwen3-Next's queries, keys, values and gates are taken apart, its factors and steps are not. In Qwen3.5
heads of values are put in turns, the first of each head of keys before the second of each: rows, channels of the
convolution, and columns of the last linear. Granite's q and k are for interleaved RoPE pairs.

    H heads of keys  R heads of values for each  N rows  K columns
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from gguf_writer import write_gguf

HYBRID_GGUF_NAMES = {
    "Lfm2": "lfm2",
    "Lfm2Moe": "lfm2moe",
    "Qwen3Next": "qwen3next",
    "Qwen3_5": "qwen35",
    "Qwen3_5Moe": "qwen35moe",
    "GraniteMoeHybrid": "granitehybrid",
}
"""Class of transformers, less 'ForCausalLM' -> GGUF architecture."""

_F32, _Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0
_ENDS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
}  # fmt: skip
_NAMES = {
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    **{f"self_attn.{each}_{norm}": f"attn_{each}_norm" for each in "qk" for norm in ("norm", "layernorm")},
    "self_attn.o_proj": "attn_output", "self_attn.out_proj": "attn_output",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    **{f"{module}.gate": "ffn_gate_inp" for module in ("mlp", "feed_forward")},
    "block_sparse_moe.router.layer": "ffn_gate_inp", "block_sparse_moe.output_linear": "ffn_down_exps",
    **{f"mlp.shared_expert.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_ba": "ssm_ba", "mamba.in_proj": "ssm_in",
    **{f"{module}.{each}": f"ssm_{ours}" for module in ("linear_attn", "mamba")
       for each, ours in (("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))},
    **{f"conv.{each}": f"shortconv.{each}" for each in ("conv", "in_proj", "out_proj")},
}  # fmt: skip
_EXPERT = re.compile(r"(?:mlp|feed_forward)\.experts\.(\d+)\.(\w+)")
_EXPERT_NAMES = {
    **{f"{each}_proj": f"ffn_{each}_exps" for each in ("gate", "up", "down")},
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


def convert_hybrid(folder: Path, path: Path, *, is_quantised: bool = False, is_early: bool = False) -> Path:
    """Write the folder's model to `path`, with no vocabulary: as f32, or with matrices as Q8_0 whose rows allow it.
    is_early: as the first converter of Qwen3-Next did, which took nothing apart."""
    config = json.loads((folder / "config.json").read_text())
    kind = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}.get(config["model_type"], config["model_type"])
    architecture = {"granitemoehybrid": "granitehybrid"}.get(kind, kind.replace("_", ""))
    tensors = {}
    stored_tensors = load_file(folder / "model.safetensors")
    for name, values in _tensors(config, stored_tensors, architecture, is_early):
        stored = _F32
        if is_quantised and values.ndim > 1 and values.shape[-1] % 32 == 0 and not name.endswith("norm.weight"):
            stored = _Q8_0
        data = quantize(np.ascontiguousarray(values, np.float32), stored)
        tensors[name] = (int(stored), list(values.shape[::-1]), np.ascontiguousarray(data).tobytes())
    keys = {f"{architecture}.{key}": value for key, value in _keys(config, architecture).items()}
    return write_gguf(path, {"general.architecture": architecture, **keys, "tokenizer.ggml.model": "no_vocab"}, tensors)


def tiled(values: np.ndarray, num_keys: int, num_values: int, axis: int = 0) -> np.ndarray:
    """[H * R * size] along an axis, of heads of keys each with its heads of values, as [R * H * size]."""
    shape, ratio = values.shape, num_values // num_keys
    apart = values.reshape(*shape[:axis], num_keys, ratio, -1, *shape[axis + 1 :])
    return apart.swapaxes(axis, axis + 1).reshape(shape)


def _tensors(
    config: dict[str, Any], stored: dict[str, np.ndarray], architecture: str, is_early: bool
) -> Iterator[tuple[str, np.ndarray]]:
    experts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, values in stored.items():
        base, _, suffix = name.rpartition(".")
        if architecture.startswith("qwen") and "norm" in base and "linear_attn" not in base:
            values = values + 1
        if base in _ENDS:
            yield f"{_ENDS[base]}.{suffix}", values
            continue
        layer, _, within = name.removeprefix("model.layers.").partition(".")
        expert = _EXPERT.match(within)
        if expert is not None:
            target = f"blk.{layer}.{_EXPERT_NAMES[expert[2]]}.weight"
            experts.setdefault(target, []).append((int(expert[1]), values))
            continue
        if architecture.startswith("qwen35") and "linear_attn." in within:
            values = _in_turns(config, within, values)
        if is_early and "in_proj_qkvz" in within:
            yield f"blk.{layer}.ssm_in.weight", values
            continue
        yield from ((f"blk.{layer}.{one}", part) for one, part in _of_layer(config, architecture, within, values))
    for target, parts in experts.items():
        yield target, np.stack([values for _, values in sorted(parts, key=lambda part: part[0])])


def _in_turns(config: dict[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    first = 2 * num_keys * config["linear_key_head_dim"] if "in_proj_qkv" in name or "conv1d" in name else 0
    if name.endswith("linear_attn.norm.weight"):
        return values
    if "out_proj" in name:
        return tiled(values, num_keys, num_values, axis=1)
    return np.concatenate([values[:first], tiled(values[first:], num_keys, num_values)])


def _of_layer(
    config: dict[str, Any], architecture: str, name: str, values: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    base, _, suffix = name.rpartition(".")
    is_granite = architecture == "granitehybrid"
    if name.endswith("A_log"):
        rates = -np.exp(values)
        yield "ssm_a", rates[:, None] if is_granite else rates
    elif name.endswith("dt_bias"):
        yield "ssm_dt.bias", values
    elif name == "mamba.D":
        yield "ssm_d", values[:, None]
    elif name.endswith("expert_bias"):
        yield "exp_probs_b.bias", values
    elif "in_proj_qkvz" in name:
        yield from _taken_apart(config, values)
    elif base in ("block_sparse_moe.input_linear", "shared_mlp.input_linear"):
        ends = "exps" if base.startswith("block") else "shexp" if config["num_local_experts"] else ""
        for each, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
            yield f"ffn_{each}{'_' if ends else ''}{ends}.weight", half
    elif base == "shared_mlp.output_linear":
        yield f"ffn_down{'_shexp' if config['num_local_experts'] else ''}.weight", values
    elif base == "post_attention_layernorm":
        yield f"{'ffn_norm' if is_granite else 'post_attention_norm'}.weight", values
    else:
        if is_granite and base in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in base else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if is_granite and base == "mamba.norm":
            values = values.reshape(config["mamba_n_groups"], -1)
        if "conv" in base and values.ndim == 3:
            values = values[:, 0]
        yield f"{_NAMES[base]}.{suffix}", values[0] if base == "mlp.shared_expert_gate" else values


def _taken_apart(config: dict[str, Any], qkvz_NK: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Of each head of keys its query, key, values and gates: all queries, keys and values, and all gates."""
    num_keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // num_keys * config["linear_value_head_dim"]
    by_head = qkvz_NK.reshape(num_keys, -1, qkvz_NK.shape[1])
    parts = np.split(by_head, np.cumsum([key_dim, key_dim, values]), axis=1)
    *qkv, z = (part.reshape(-1, qkvz_NK.shape[1]) for part in parts)
    yield "attn_qkv.weight", np.concatenate(qkv)
    yield "attn_gate.weight", z


def _keys(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    kinds, rope = config["layer_types"], config["rope_parameters"] or {}
    num_kv_heads: Any = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", config.get("norm_eps")),
        "rope.freq_base": float(rope.get("rope_theta", 10_000.0)), "vocab_size": config["vocab_size"],
    }  # fmt: skip
    if "intermediate_size" in config:
        keys["feed_forward_length"] = _ffn_width(config) if architecture == "lfm2" else config["intermediate_size"]
    if architecture.startswith("qwen"):
        keys |= _delta_keys(config, architecture, head_dim)
    else:
        num_kv_heads = [num_kv_heads if kind == "full_attention" else 0 for kind in kinds]
    if architecture.startswith("lfm2"):
        keys["shortconv.l_cache"] = config["conv_L_cache"]
    if architecture == "granitehybrid":
        keys |= _granite_keys(config, head_dim)
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts:
        keys |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
        for key, said in (
            ("expert_feed_forward_length", "moe_intermediate_size"),
            ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
            ("expert_shared_feed_forward_length", "shared_intermediate_size"),
            ("leading_dense_block_count", "num_dense_layers"),
        ):
            keys |= {key: config[said]} if said in config else {}
    if architecture == "lfm2moe":
        keys["expert_gating_func"] = 2
    return {**keys, "attention.head_count_kv": num_kv_heads}


def _delta_keys(config: dict[str, Any], architecture: str, head_dim: int) -> dict[str, Any]:
    keys = {
        "attention.key_length": head_dim, "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * config["rope_parameters"].get("partial_rotary_factor", 0.25)),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config.get("full_attention_interval", 4),
    }  # fmt: skip
    if architecture != "qwen3next":
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    if config["layer_types"] != [("linear", "full")[layer % 4 == 3] + "_attention" for layer in range(4)]:
        keys["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config["layer_types"]]
    return keys


def _granite_keys(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]), "logit_scale": float(config["logits_scaling"]),
        "rope.dimension_count": head_dim,
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"], "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
    }  # fmt: skip


def _ffn_width(config: dict[str, Any]) -> int:
    width = int(config["intermediate_size"])
    if config["block_auto_adjust_ff_dim"]:
        width, multiple = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3)), config["block_multiple_of"]
        width = multiple * -(-width // multiple)
    return width
