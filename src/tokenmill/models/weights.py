"""From a checkpoint's tensors to packed weights: names to roles, shapes checked, neighbours stacked.

q, k, v become one matrix and gate, up another, so that a layer has four linears. Rows of GGUF's q and k, which are
ordered for interleaved RoPE pairs, are put back in half-split order by moving raw rows: no value changes. Tensor kinds
that the kernels do not take are dequantised to float32, which is exact and costs 4 bytes a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.tensor import Tensor
from ..ops.api import Array, Ops, RawTensor, Weight
from .config import ModelConfig

PACKED_KINDS = frozenset({"f32", "f16", "bf16", "q4_0", "q4_1", "q8_0"})
_NAMED_IN_ERRORS = 6

GLOBAL_NAMES = {
    "gguf": {
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "head": "output.weight",
    },
    "hf": {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
}
LAYER_NAMES = {
    "gguf": {
        "attn_norm": "blk.{}.attn_norm.weight",
        "q": "blk.{}.attn_q.weight",
        "k": "blk.{}.attn_k.weight",
        "v": "blk.{}.attn_v.weight",
        "output": "blk.{}.attn_output.weight",
        "ffn_norm": "blk.{}.ffn_norm.weight",
        "gate": "blk.{}.ffn_gate.weight",
        "up": "blk.{}.ffn_up.weight",
        "down": "blk.{}.ffn_down.weight",
    },
    "hf": {
        "attn_norm": "model.layers.{}.input_layernorm.weight",
        "q": "model.layers.{}.self_attn.q_proj.weight",
        "k": "model.layers.{}.self_attn.k_proj.weight",
        "v": "model.layers.{}.self_attn.v_proj.weight",
        "output": "model.layers.{}.self_attn.o_proj.weight",
        "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
        "gate": "model.layers.{}.mlp.gate_proj.weight",
        "up": "model.layers.{}.mlp.up_proj.weight",
        "down": "model.layers.{}.mlp.down_proj.weight",
    },
}
ROPE_FACTORS = "rope_freqs.weight"
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
"""Buffers that old exporters saved; they follow from the config."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: Array
    qkv: Weight
    output: Weight
    ffn_norm: Array
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`head` is `embed` itself where the embeddings are tied. `rope_factors` float64 [C/2] or None."""

    embed: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Weight
    rope_factors: np.ndarray | None
    num_bytes: int


def load_weights(checkpoint: Checkpoint, config: ModelConfig, ops: Ops) -> ModelWeights:
    """Pack every tensor of `checkpoint`, reading each byte once. Raises BadCheckpoint naming every missing, unexpected
    or misshaped tensor."""
    names, layer_names = GLOBAL_NAMES[checkpoint.kind], LAYER_NAMES[checkpoint.kind]
    tensors = checkpoint.tensors
    _check_tensors(checkpoint, config)
    num_bytes = 0

    def pack(*parts: RawTensor) -> Weight:
        nonlocal num_bytes
        weight = ops.pack(parts)
        num_bytes += weight.num_bytes
        return weight

    def vector(name: str) -> Array:
        nonlocal num_bytes
        values = _values(tensors[name])
        num_bytes += values.nbytes
        return ops.vector(values)

    def matrix(name: str) -> RawTensor:
        return _raw(tensors[name])

    def heads(name: str, num_heads: int) -> RawTensor:
        return _half_split(matrix(name), num_heads) if config.interleaved_heads else matrix(name)

    layers = []
    for layer in range(config.num_layers):
        at = {role: pattern.format(layer) for role, pattern in layer_names.items()}
        layers.append(
            LayerWeights(
                attn_norm=vector(at["attn_norm"]),
                qkv=pack(heads(at["q"], config.num_heads), heads(at["k"], config.num_kv_heads), matrix(at["v"])),
                output=pack(matrix(at["output"])),
                ffn_norm=vector(at["ffn_norm"]),
                gate_up=pack(matrix(at["gate"]), matrix(at["up"])),
                down=pack(matrix(at["down"])),
            )
        )
    embed = pack(matrix(names["embed"]))
    return ModelWeights(
        embed=embed,
        layers=tuple(layers),
        final_norm=vector(names["final_norm"]),
        head=embed if config.tied_embeddings else pack(matrix(names["head"])),
        rope_factors=_values(tensors[ROPE_FACTORS]).astype(np.float64) if ROPE_FACTORS in tensors else None,
        num_bytes=num_bytes,
    )


def expected_shapes(kind: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this kind and shape must have."""
    c = config
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    by_role = {
        "attn_norm": (c.width,),
        "q": (q_width, c.width),
        "k": (kv_width, c.width),
        "v": (kv_width, c.width),
        "output": (c.width, q_width),
        "ffn_norm": (c.width,),
        "gate": (c.ffn_width, c.width),
        "up": (c.ffn_width, c.width),
        "down": (c.width, c.ffn_width),
    }
    names = GLOBAL_NAMES[kind]
    shapes: dict[str, tuple[int, ...]] = {
        names["embed"]: (c.vocab_size, c.width),
        names["final_norm"]: (c.width,),
    }
    if not c.tied_embeddings:
        shapes[names["head"]] = (c.vocab_size, c.width)
    for layer in range(c.num_layers):
        for role, pattern in LAYER_NAMES[kind].items():
            shapes[pattern.format(layer)] = by_role[role]
    return shapes


def _check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    expected, tensors = expected_shapes(checkpoint.kind, config), checkpoint.tensors
    optional: dict[str, tuple[int, ...]] = {ROPE_FACTORS: (config.head_dim // 2,)}
    if config.tied_embeddings:  # some exporters write the tied matrix twice
        optional[GLOBAL_NAMES[checkpoint.kind]["head"]] = (config.vocab_size, config.width)
    missing = [name for name in expected if name not in tensors]
    extra = [
        name for name in tensors if name not in expected and name not in optional and not name.endswith(_DERIVED_SUFFIX)
    ]
    misshaped = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in (expected | optional).items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [("is missing", missing), ("has unexpected", extra), ("has misshaped", misshaped)]
    found = [f"{verb} {_listed(names)}" for verb, names in problems if names]
    if found:
        raise BadCheckpoint(f"{checkpoint.path} ({config.architecture}) {'; '.join(found)}.")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _raw(tensor: Tensor) -> RawTensor:
    num_rows, num_cols = tensor.shape
    if tensor.kind in PACKED_KINDS:
        return RawTensor(tensor.kind, num_rows, num_cols, np.frombuffer(tensor.data, np.uint8))
    return RawTensor("f32", num_rows, num_cols, np.ascontiguousarray(_values(tensor)).view(np.uint8))


def _values(tensor: Tensor) -> np.ndarray:
    """float32, flat."""
    return dequantise(tensor.kind, tensor.data, tensor.num_values)


def _half_split(part: RawTensor, num_heads: int) -> RawTensor:
    """Within each head, row 2i + h goes to row h * C/2 + i: pair members move from neighbours to half a head apart."""
    rows = part.data.reshape(num_heads, -1, 2, part.row_bytes)
    return RawTensor(part.kind, part.num_rows, part.num_cols, np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1))
