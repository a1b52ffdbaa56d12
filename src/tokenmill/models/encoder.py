"""The encoder's forward pass: BERT and its kin, in the seam's plain functions.

A sequence runs whole in one step and nothing of it is kept: the K and V of one layer at a time lie in a pool that the
next layer writes again. Every token sees all of its own sequence, or what lies within a window to both sides. Learned
positions and the types of a pair's two texts are one table, looked up by the batch's places; or positions turn q and k.
Norms follow the residual additions, or come before attention and FFN. A classifier's head is a pass of its own, on what
was pooled.

    T tokens  L rows that are wanted  D model width  W fused qkv width  F FFN width  S pooled sequences  N outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ops.api import Array
from ..ops.forward import ForwardOps
from .encoder_config import EncoderConfig
from .encoder_weights import EncoderLayer, EncoderWeights
from .weights import Linear, Norm


def hidden(
    ops: ForwardOps, config: EncoderConfig, weights: EncoderWeights, ropes: Sequence[Array | None], kv: Any, batch: Any
) -> Array:
    """The last hidden states [L, D] of the batch's logit rows. `ropes`: each layer's RoPE table; `kv`: a pool of one
    layer."""
    x_TD = ops.embed(weights.embed, batch.tokens_T)
    if weights.places is not None:
        x_TD = ops.add(x_TD, ops.embed(weights.places, batch.places_T))
    x_TD = _norm(ops, config, weights.embed_norm, x_TD)
    before, after = (1, 0) if config.family.pre_norm else (0, 1)
    for index, layer in enumerate(weights.layers):
        attn_norms, ffn_norms = (None, layer.attn_norm), (None, layer.ffn_norm)
        mixed_TD = attention(
            ops, config, index, layer, ropes[index], kv, batch, _norm(ops, config, attn_norms[before], x_TD)
        )
        x_TD = _norm(ops, config, attn_norms[after], ops.add(x_TD, mixed_TD))
        fed_TD = ffn(ops, config, layer, _norm(ops, config, ffn_norms[before], x_TD))
        x_TD = _norm(ops, config, ffn_norms[after], ops.add(x_TD, fed_TD))
    return _norm(ops, config, weights.final_norm, ops.gather_rows(x_TD, batch.logit_rows_L))


def score(ops: ForwardOps, config: EncoderConfig, weights: EncoderWeights, pooled_SD: Array) -> Array:
    """What the classifier makes of pooled states: [S, N]."""
    assert weights.head is not None, "the model has no head"
    dense, norm, out = weights.head
    x_SD = _linear(ops, dense, pooled_SD)
    if config.head_activation == "tanh":
        x_SD = ops.soft_cap(x_SD, 1.0)
    else:
        x_SD = ops.gelu_erf(x_SD) if config.head_activation == "gelu_erf" else ops.gelu(x_SD)
    return _linear(ops, out, _norm(ops, config, norm, x_SD))


def attention(
    ops: ForwardOps,
    config: EncoderConfig,
    index: int,
    layer: EncoderLayer,
    rope_PR: Array | None,
    kv: Any,
    batch: Any,
    x_TD: Array,
) -> Array:
    """[T, D] to be added to x."""
    qkv_TW = _linear(ops, layer.qkv, x_TD)
    if rope_PR is not None:
        qkv_TW = ops.rope(qkv_TW, batch.positions_T, rope_PR, config.heads)
    ops.write_kv(kv, 0, qkv_TW, batch, config.heads)
    window = config.layers[index].window
    mixed_TD = ops.paged_attention(
        kv, 0, qkv_TW, batch, config.heads, config.head_dim**-0.5, window=window, causal=False
    )
    return _linear(ops, layer.output, mixed_TD)


def ffn(ops: ForwardOps, config: EncoderConfig, layer: EncoderLayer, x_TD: Array) -> Array:
    """[T, D] to be added to x."""
    up = _linear(ops, layer.up, x_TD)
    if config.family.gated:
        gate = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "gelu_erf": ops.gelu_erf_mul}[config.activation]
        return _linear(ops, layer.down, gate(up))
    hidden_TF = ops.gelu_erf(up) if config.activation == "gelu_erf" else ops.gelu(up)
    return _linear(ops, layer.down, hidden_TF)


def _norm(ops: ForwardOps, config: EncoderConfig, norm: Norm | None, x: Array) -> Array:
    return x if norm is None else ops.layer_norm(x, norm.weight, norm.bias, config.norm_eps)


def _linear(ops: ForwardOps, linear: Linear, x: Array) -> Array:
    out = ops.linear(x, linear.weight)
    return out if linear.bias is None else ops.add_bias(out, linear.bias)
