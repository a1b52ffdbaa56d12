"""The encoder's forward pass: BERT and its kin, in the seam's plain functions.

Every token sees all of its own sequence, so a sequence runs whole in one step and nothing of it is kept: the K and V of
one layer at a time lie in a pool that the next layer writes again. Learned positions and the types of a pair's two
texts are one table, looked up by the batch's places. Norms follow the residual additions.

    T tokens  L rows that are wanted  D model width  W fused qkv width  F FFN width  N outputs of the head
"""

from __future__ import annotations

from typing import Any

from ..ops.api import Array, Ops
from .encoder_config import EncoderConfig
from .encoder_weights import EncoderLayer, EncoderWeights
from .weights import Linear, Norm


def forward(ops: Ops, config: EncoderConfig, weights: EncoderWeights, kv: Any, batch: Any) -> Array:
    """Of the batch's logit rows: what the head makes of the last hidden states [L, N], or those states [L, D] where
    there is no head. `kv`: a pool of one layer."""
    embedded_TD = ops.add(ops.embed(weights.embed, batch.tokens_T), ops.embed(weights.places, batch.places_T))
    x_TD = _norm(ops, config, weights.embed_norm, embedded_TD)
    for layer in weights.layers:
        x_TD = _norm(ops, config, layer.attn_norm, ops.add(x_TD, attention(ops, config, layer, kv, batch, x_TD)))
        x_TD = _norm(ops, config, layer.ffn_norm, ops.add(x_TD, ffn(ops, config, layer, x_TD)))
    x_LD = ops.gather_rows(x_TD, batch.logit_rows_L)
    if weights.head is None:
        return x_LD
    dense, out = weights.head
    return _linear(ops, out, ops.soft_cap(_linear(ops, dense, x_LD), 1.0))  # a soft cap of 1 is tanh


def attention(ops: Ops, config: EncoderConfig, layer: EncoderLayer, kv: Any, batch: Any, x_TD: Array) -> Array:
    """[T, D] to be added to x."""
    qkv_TW = _linear(ops, layer.qkv, x_TD)
    ops.write_kv(kv, 0, qkv_TW, batch, config.heads)
    mixed_TD = ops.paged_attention(kv, 0, qkv_TW, batch, config.heads, config.head_dim**-0.5, causal=False)
    return _linear(ops, layer.output, mixed_TD)


def ffn(ops: Ops, config: EncoderConfig, layer: EncoderLayer, x_TD: Array) -> Array:
    """[T, D] to be added to x."""
    up_TF = _linear(ops, layer.up, x_TD)
    hidden_TF = ops.gelu_erf(up_TF) if config.activation == "gelu_erf" else ops.gelu(up_TF)
    return _linear(ops, layer.down, hidden_TF)


def _norm(ops: Ops, config: EncoderConfig, norm: Norm, x: Array) -> Array:
    return ops.layer_norm(x, norm.weight, norm.bias, config.norm_eps)


def _linear(ops: Ops, linear: Linear, x: Array) -> Array:
    return ops.add_bias(ops.linear(x, linear.weight), linear.bias)
