"""Step-3 (arXiv 2507.19427) in plain torch: its published equations, and a small random checkpoint of them.

Queries go through fewer channels, which are normed; all heads share one head of keys and values; some layers have a
mixture of experts beside one expert that every token goes through. transformers has no class for it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu, softmax

CONFIG = {
    "architectures": ["Step3TextForCausalLM"],
    "model_type": "step3_text",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 1,
    "head_dim": 16,
    "share_q_dim": 24,
    "max_position_embedding": 256,
    "max_seq_len": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "moe_layers_enum": "1,2",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 40,
    "norm_expert_weight": False,
}

Tensors = dict[str, torch.Tensor]


def save(folder: Path, **changes: object) -> tuple[dict, Tensors]:
    """A seeded random checkpoint in `folder`: its config and weights."""
    config = CONFIG | changes
    torch.manual_seed(5)
    tensors = {name: 0.15 * torch.randn(shape) for name, shape in _shapes(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = 1 + tensors[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


def logits(config: dict, tensors: Tensors, tokens: np.ndarray) -> tuple[np.ndarray, list[list[set[int]]]]:
    """-> (logits [T, V], of each layer with experts each token's)"""
    chosen = []
    x = tensors["model.embed_tokens.weight"][torch.tensor(tokens.astype(np.int64))]
    for layer in range(config["num_hidden_layers"]):
        at = {
            name.removeprefix(f"model.layers.{layer}."): weight
            for name, weight in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x = x + _attention(config, at, _norm(config, x, at["input_layernorm.weight"]))
        normed = _norm(config, x, at["post_attention_layernorm.weight"])
        if "moe.gate.weight" in at:
            mixed, experts = _experts(config, at, normed)
            chosen.append(experts)
            x = x + mixed + _ffn(at, "share_expert", normed)
        else:
            x = x + _ffn(at, "mlp", normed)
    x = _norm(config, x, tensors["model.norm.weight"])
    return linear(x, tensors["lm_head.weight"]).numpy(), chosen


def _attention(config: dict, at: Tensors, x: torch.Tensor) -> torch.Tensor:
    heads, dim, length = config["num_attention_heads"], config["head_dim"], len(x)
    q = _norm(config, linear(x, at["self_attn.q_proj.weight"]), at["self_attn.inter_norm.weight"])
    q = linear(q, at["self_attn.wq.weight"]).view(length, heads, dim)
    k = linear(x, at["self_attn.k_proj.weight"]).view(length, 1, dim)
    v = linear(x, at["self_attn.v_proj.weight"])
    q, k = _turned(config, q), _turned(config, k)
    scores = torch.einsum("thc,sc->hts", q, k[:, 0]) * dim**-0.5
    scores = scores + torch.full((length, length), -torch.inf).triu(1)
    mixed = torch.einsum("hts,sc->thc", softmax(scores, dim=-1), v)
    return linear(mixed.reshape(length, -1), at["self_attn.o_proj.weight"])


def _turned(config: dict, x: torch.Tensor) -> torch.Tensor:
    half = config["head_dim"] // 2
    frequencies = config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (torch.arange(len(x))[:, None] * frequencies).to(torch.float32)[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _experts(config: dict, at: Tensors, x: torch.Tensor) -> tuple[torch.Tensor, list[set[int]]]:
    scores = softmax(linear(x, at["moe.gate.weight"]), dim=-1)
    weights, ids = scores.topk(config["moe_top_k"])
    if config["norm_expert_weight"]:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], ids[row], strict=True):
            gate = linear(x[row], at["moe.gate_proj.weight"][expert])
            up = linear(x[row], at["moe.up_proj.weight"][expert])
            out[row] += weight * linear(silu(gate) * up, at["moe.down_proj.weight"][expert])
    return out, [set(row.tolist()) for row in ids]


def _ffn(at: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    hidden = silu(linear(x, at[f"{name}.gate_proj.weight"])) * linear(x, at[f"{name}.up_proj.weight"])
    return linear(hidden, at[f"{name}.down_proj.weight"])


def _norm(config: dict, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    width, vocab, ffn = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    narrow, dim, heads = config["share_q_dim"], config["head_dim"], config["num_attention_heads"]
    experts, expert_ffn = config["moe_num_experts"], config["moe_intermediate_size"]
    shapes = {
        "model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,), "lm_head.weight": (vocab, width),
    }  # fmt: skip
    moe_layers = {int(item) for item in config["moe_layers_enum"].split(",")}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (narrow, width),
            f"{at}self_attn.inter_norm.weight": (narrow,),
            f"{at}self_attn.wq.weight": (heads * dim, narrow),
            f"{at}self_attn.k_proj.weight": (dim, width),
            f"{at}self_attn.v_proj.weight": (dim, width),
            f"{at}self_attn.o_proj.weight": (width, heads * dim),
        }
        if layer in moe_layers:
            shapes |= {
                f"{at}moe.gate.weight": (experts, width),
                f"{at}moe.gate_proj.weight": (experts, expert_ffn, width),
                f"{at}moe.up_proj.weight": (experts, expert_ffn, width),
                f"{at}moe.down_proj.weight": (experts, width, expert_ffn),
            }
        name, inner = ("share_expert", config["share_expert_dim"]) if layer in moe_layers else ("mlp", ffn)
        shapes |= {
            f"{at}{name}.gate_proj.weight": (inner, width),
            f"{at}{name}.up_proj.weight": (inner, width),
            f"{at}{name}.down_proj.weight": (width, inner),
        }
    return shapes
