"""The decoder's forward pass, in the seam's plain functions.

A backend may run this once on a recorder and replay what it saw, so nothing here may branch on a batch's content, and
fusing neighbours is the backend's business. A layer is `attention` then `ffn`: the border between them is where a layer
can be cut across machines.

    T tokens  L rows that want logits  D width  W fused qkv width  V vocabulary
"""

from __future__ import annotations

from typing import Any

from ..ops.api import Array, Ops
from .config import ModelConfig
from .weights import LayerWeights, ModelWeights


def forward(ops: Ops, config: ModelConfig, weights: ModelWeights, rope_PC: Array, kv: Any, batch: Any) -> Array:
    """Logits [L, V] of the batch's logit rows; writes the KV of all its tokens."""
    x_TD = ops.embed(weights.embed, batch.tokens_T)
    for index, layer in enumerate(weights.layers):
        x_TD = ops.add(x_TD, attention(ops, config, index, layer, rope_PC, kv, batch, x_TD))
        x_TD = ops.add(x_TD, ffn(ops, config, layer, x_TD))
    x_LD = ops.gather_rows(x_TD, batch.logit_rows_L)
    return ops.linear(ops.rms_norm(x_LD, weights.final_norm, config.norm_eps), weights.head)


def attention(
    ops: Ops, config: ModelConfig, index: int, layer: LayerWeights, rope_PC: Array, kv: Any, batch: Any, x_TD: Array
) -> Array:
    """[T, D] to be added to x. Every token's KV is written before any is read."""
    normed_TD = ops.rms_norm(x_TD, layer.attn_norm, config.norm_eps)
    qkv_TW = ops.rope(ops.linear(normed_TD, layer.qkv), batch.positions_T, rope_PC, config.heads)
    ops.write_kv(kv, index, qkv_TW, batch, config.heads)
    mixed = ops.paged_attention(kv, index, qkv_TW, batch, config.heads, config.head_dim**-0.5)
    return ops.linear(mixed, layer.output)


def ffn(ops: Ops, config: ModelConfig, layer: LayerWeights, x_TD: Array) -> Array:
    """[T, D] to be added to x."""
    normed_TD = ops.rms_norm(x_TD, layer.ffn_norm, config.norm_eps)
    return ops.linear(ops.silu_mul(ops.linear(normed_TD, layer.gate_up)), layer.down)
