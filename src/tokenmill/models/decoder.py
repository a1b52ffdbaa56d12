"""The decoder's forward pass, in the seam's plain functions.

A backend may run this once on a recorder and replay what it saw, so nothing here may branch on a batch's content, and
fusing neighbours is the backend's business. What a family has differently is seen here as a weight that is there or
not, or a number of the config. A layer is `attention` then `ffn`: the border between them is where a layer can be cut
across machines.

    T tokens  L rows that want logits  D model width  W fused qkv width  F FFN width  V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ops.api import Array
from ..ops.forward import ForwardOps
from .config import ModelConfig
from .kv import LayerKV
from .weights import LayerWeights, Linear, ModelWeights, Norm


def forward(
    ops: ForwardOps,
    config: ModelConfig,
    weights: ModelWeights,
    ropes: Sequence[Array | None],
    kvs: Sequence[LayerKV],
    batch: Any,
) -> Array:
    """Logits [L, V] of the batch's logit rows; writes the KV of all its tokens. `ropes`, `kvs`: each layer's RoPE
    table and KV."""
    x_LD = hidden(ops, config, weights, ropes, kvs, batch)
    logits_LV = ops.linear(x_LD, weights.head)
    if weights.head_lora is not None:
        logits_LV = ops.add_lora(logits_LV, x_LD, weights.head_lora, batch.adapters_L)
    logits_LV = _scaled(ops, logits_LV, config.logit_scale)
    return ops.soft_cap(logits_LV, config.logit_cap) if config.logit_cap else logits_LV


def hidden(
    ops: ForwardOps,
    config: ModelConfig,
    weights: ModelWeights,
    ropes: Sequence[Array | None],
    kvs: Sequence[LayerKV],
    batch: Any,
) -> Array:
    """The states [L, D] that logits are made of, or vectors of the text so far."""
    x_TD = ops.embed(weights.embed, batch.tokens_T)
    if weights.embed_lora is not None:
        x_TD = ops.add_token_lora(x_TD, batch.tokens_T, weights.embed_lora, batch.adapters_T)
    x_TD = _scaled(ops, x_TD, config.embed_scale)
    for index, layer in enumerate(weights.layers):
        mixed_TD = attention(ops, config, index, layer, ropes[index], kvs[index], batch, x_TD)
        x_TD = ops.add(x_TD, _scaled(ops, mixed_TD, config.residual_scale))
        x_TD = ops.add(x_TD, _scaled(ops, ffn(ops, config, layer, batch, x_TD), config.residual_scale))
    return _norm(ops, config, weights.final_norm, ops.gather_rows(x_TD, batch.logit_rows_L))


def attention(
    ops: ForwardOps,
    config: ModelConfig,
    index: int,
    layer: LayerWeights,
    rope_PR: Array | None,
    layer_kv: LayerKV,
    batch: Any,
    x_TD: Array,
) -> Array:
    """[T, D] to be added to x. Every token's KV is written before any is read."""
    heads = config.heads
    qkv_TW = _linear(ops, layer.qkv, batch, _norm(ops, config, layer.attn_norm, x_TD))
    if layer.q_norm is not None:
        qkv_TW = ops.norm_heads(qkv_TW, layer.q_norm, layer.k_norm, heads, config.norm_eps)
    if rope_PR is not None:
        qkv_TW = ops.rope(qkv_TW, batch.positions_T, rope_PR, heads)
    kv, place = layer_kv
    ops.write_kv(kv, place, qkv_TW, batch, heads)
    mixed_TD = ops.paged_attention(
        kv,
        place,
        qkv_TW,
        batch,
        heads,
        config.attention_scale,
        window=config.layers[index].window,
        soft_cap=config.attention_cap,
    )
    return _norm(ops, config, layer.attn_post_norm, _linear(ops, layer.output, batch, mixed_TD))


def ffn(ops: ForwardOps, config: ModelConfig, layer: LayerWeights, batch: Any, x_TD: Array) -> Array:
    """[T, D] to be added to x."""
    hidden = _linear(ops, layer.gate_up, batch, _norm(ops, config, layer.ffn_norm, x_TD))
    if not config.family.gated:
        hidden_TF = ops.gelu(hidden)
    else:
        hidden_TF = ops.gelu_mul(hidden) if config.activation == "gelu" else ops.silu_mul(hidden)
    return _norm(ops, config, layer.ffn_post_norm, _linear(ops, layer.down, batch, hidden_TF))


def _norm(ops: ForwardOps, config: ModelConfig, norm: Norm | None, x: Array) -> Array:
    if norm is None:
        return x
    if norm.bias is None:
        return ops.rms_norm(x, norm.weight, config.norm_eps)
    return ops.layer_norm(x, norm.weight, norm.bias, config.norm_eps)


def _linear(ops: ForwardOps, linear: Linear, batch: Any, x: Array) -> Array:
    out = ops.linear(x, linear.weight)
    if linear.lora is not None:  # before the bias, which an adapter leaves as it is
        out = ops.add_lora(out, x, linear.lora, batch.adapters_T)
    return out if linear.bias is None else ops.add_bias(out, linear.bias)


def _scaled(ops: ForwardOps, x: Array, factor: float) -> Array:
    return x if factor == 1 else ops.scale(x, factor)
