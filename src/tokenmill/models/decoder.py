"""The decoder's forward pass, in the plain functions of the kernel interface.

A backend may run this once on a recorder and replay what it saw, so nothing here may branch on a batch's content, and
fusing neighbours is the backend's business. What a family has differently is seen here as a weight that is there or
not, or a number of the config. A layer is `attention` then `ffn`, or one of them: the border between them is where a
layer can be cut across machines.

    T tokens  L rows that want logits  D model width  W fused qkv width  F FFN width  V vocabulary
    X channels of latents, or of all heads  E experts  k experts of a token  r channels that queries go through
    N layers  I channels of a layer's input beside the residual stream
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from ..ops.api import SIGMOID, Array, HeadGeometry
from ..ops.forward import ForwardOps
from .config import ModelConfig
from .family import SEQUENTIAL
from .kv_groups import LayerKV
from .mixer import mix
from .rope import RopeTables
from .weights import HeadNorms, InputWeights, LayerWeights, Linear, ModelWeights, MoeWeights, Norm


@dataclass(frozen=True, slots=True, eq=False)
class AuxHiddenStates:
    """Hidden states of all tokens of a step, for a drafter that looks at them (vLLM's auxiliary hidden states; EAGLE-3,
    arXiv 2503.01840): each step writes its rows over those of the one before.

    layers      for each of the first arrays the number of a layer: the residual stream that the layer gets, or that
                the last one gives where it is the number of layers
    is_normed   whether one array more has what the final norm makes of the last one
    arrays      float32 [max_tokens, D] each
    """

    layers: tuple[int, ...]
    is_normed: bool
    arrays: tuple[np.ndarray, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, max_tokens: int, layers: Sequence[int], *, is_normed: bool = False
    ) -> AuxHiddenStates:
        assert all(0 <= layer <= config.num_layers for layer in layers), (layers, config.num_layers)
        arrays = tuple(np.zeros((max_tokens, config.width), np.float32) for _ in range(len(layers) + is_normed))
        return cls(tuple(layers), is_normed, arrays)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def keep(self, ops: ForwardOps, layer: int, x_TD: Array) -> None:
        for index, number in enumerate(self.layers):
            if number == layer:
                ops.store_rows(x_TD, self.arrays[index])


def forward(
    ops: ForwardOps,
    config: ModelConfig,
    weights: ModelWeights,
    ropes: Sequence[RopeTables | None],
    kvs: Sequence[LayerKV],
    batch: Any,
    aux: AuxHiddenStates | None = None,
) -> Array:
    """Logits [L, V] of the batch's logit rows; writes the KV of all its tokens. `ropes`, `kvs`: each layer's RoPE
    tables and KV. aux: what it is to leave for a drafter; no logit depends on it."""
    x_LD = hidden(ops, config, weights, ropes, kvs, batch, aux)
    logits_LV = ops.linear(x_LD, weights.head)
    if weights.head_lora is not None:
        logits_LV = ops.add_lora(logits_LV, x_LD, weights.head_lora, batch.adapters_L)
    if weights.head_bias is not None:
        logits_LV = ops.add_bias(logits_LV, weights.head_bias)
    logits_LV = _scaled(ops, logits_LV, config.logit_scale)
    return ops.soft_cap(logits_LV, config.logit_cap) if config.logit_cap else logits_LV


def hidden(
    ops: ForwardOps,
    config: ModelConfig,
    weights: ModelWeights,
    ropes: Sequence[RopeTables | None],
    kvs: Sequence[LayerKV],
    batch: Any,
    aux: AuxHiddenStates | None = None,
) -> Array:
    """The states [L, D] that logits are made of, or vectors of the text so far."""
    x_TD = ops.embed(weights.embed, batch.tokens_T)
    if weights.embed_lora is not None:
        x_TD = ops.add_token_lora(x_TD, batch.tokens_T, weights.embed_lora, batch.adapters_T)
    x_TD = _scaled(ops, x_TD, config.embed_scale)
    inputs_TX = None if weights.inputs is None else _layer_inputs(ops, config, weights.inputs, batch, x_TD)
    for index, layer in enumerate(weights.layers):
        if aux is not None:
            aux.keep(ops, index, x_TD)
        given_TD = x_TD
        if config.layers[index].mixes:
            mixed_TD = attention(ops, config, index, layer, ropes[index], kvs[index], batch, x_TD)
            x_TD = ops.add(x_TD, _scaled(ops, mixed_TD, config.residual_scale))
        if config.layers[index].has_ffn:
            fed_TD = ffn(ops, config, layer, batch, x_TD if config.residual == SEQUENTIAL else given_TD)
            x_TD = ops.add(x_TD, _scaled(ops, fed_TD, config.residual_scale))
        if inputs_TX is not None:
            input_TI = ops.columns(inputs_TX, index * config.input_width, config.input_width)
            x_TD = ops.add(x_TD, _take_input(ops, config, layer, batch, x_TD, input_TI))
        x_TD = _scaled(ops, x_TD, layer.scale)
    if aux is not None:
        aux.keep(ops, config.num_layers, x_TD)
        if aux.is_normed:
            ops.store_rows(_norm(ops, config, weights.final_norm, x_TD), aux.arrays[-1])
    return _norm(ops, config, weights.final_norm, ops.gather_rows(x_TD, batch.logit_rows_L))


def _layer_inputs(ops: ForwardOps, config: ModelConfig, weights: InputWeights, batch: Any, x_TD: Array) -> Array:
    """[T, N*I]: what each layer is given of a token (per-layer embeddings of Gemma 3n and 4): of the token itself, and
    of its embedding, x."""
    embed_TX = ops.scale(ops.embed(weights.embed, batch.tokens_T), config.input_width**0.5)
    given_TX = ops.scale(ops.linear(x_TD, weights.linear), config.width**-0.5)
    given_TX = ops.norm_groups(given_TX, weights.norm, config.input_width, config.norm_eps)
    return ops.scale(ops.add(given_TX, embed_TX), 2**-0.5)


def _take_input(
    ops: ForwardOps, config: ModelConfig, layer: LayerWeights, batch: Any, x_TD: Array, input_TI: Array
) -> Array:
    """[T, D] to be added to x."""
    assert layer.input_gate is not None and layer.input_up is not None
    gated_T2I = ops.join_columns([_linear(ops, layer.input_gate, batch, x_TD), input_TI])
    gated_TI = ops.gelu_mul(gated_T2I) if config.activation == "gelu" else ops.silu_mul(gated_T2I)
    return _norm(ops, config, layer.input_norm, _linear(ops, layer.input_up, batch, gated_TI))


def attention(
    ops: ForwardOps,
    config: ModelConfig,
    index: int,
    layer: LayerWeights,
    rope: RopeTables | None,
    layer_kv: LayerKV,
    batch: Any,
    x_TD: Array,
) -> Array:
    """[T, D] to be added to x, by attention or a mixer, or the sum of both. Every token's KV is written before any is
    read."""
    x_TD = _norm(ops, config, layer.attn_norm, x_TD)
    mixed: list[Array] = []
    if layer.mixer is not None:
        assert config.mixer is not None and layer_kv.state is not None
        assert layer.mixer_in is not None and layer.mixer_out is not None
        in_TX = _linear(ops, layer.mixer_in, batch, _scaled(ops, x_TD, config.branches.mixer_in))
        out_TX = mix(ops, config.mixer, layer.mixer, layer_kv.state, batch, in_TX)
        mixed.append(_scaled(ops, _linear(ops, layer.mixer_out, batch, out_TX), config.branches.mixer_out))
    if layer.qkv is not None:
        assert layer_kv.kv is not None and layer.output is not None
        qkv_TW = _linear(ops, layer.qkv, batch, _scaled(ops, x_TD, config.branches.attention_in))
        if layer.latent is not None:
            assert rope is not None, "latent attention has positions"
            out_TX = _latent_attention(ops, config, layer, rope.turns_PR, layer_kv.kv, batch, qkv_TW)
        else:
            out_TX = _head_attention(ops, config, index, layer, rope, layer_kv.kv, batch, qkv_TW)
        mixed.append(_scaled(ops, _linear(ops, layer.output, batch, out_TX), config.branches.attention_out))
    return _norm(ops, config, layer.attn_post_norm, reduce(ops.add, mixed))


def _head_attention(
    ops: ForwardOps,
    config: ModelConfig,
    index: int,
    layer: LayerWeights,
    rope: RopeTables | None,
    layer_kv: tuple[Any, int],
    batch: Any,
    qkv_TW: Array,
) -> Array:
    heads, gates_TX = config.heads_of(index), None
    is_own = config.layers[index].kv_layer is None
    if config.family.gated_attention:
        q_width = heads.num_heads * heads.head_dim
        gates_TX = ops.columns(qkv_TW, q_width, q_width)
        kv_TX = ops.columns(qkv_TW, 2 * q_width, heads.width - q_width)
        qkv_TW = ops.join_columns([ops.columns(qkv_TW, 0, q_width), kv_TX])
    if layer.q_up is not None:
        kv_width = 2 * heads.num_kv_heads * heads.head_dim
        q_TW = _queries(ops, config, layer, batch, ops.columns(qkv_TW, 0, config.query_rank))
        qkv_TW = ops.join_columns([q_TW, ops.columns(qkv_TW, config.query_rank, kv_width)])
    if is_own:
        qkv_TW = _with_values(ops, config, index, layer, qkv_TW)
    else:  # queries alone: nobody reads what stands in the place of keys and values
        places = np.arange(heads.num_heads * heads.head_dim, dtype=np.int32)
        qkv_TW = ops.spread_columns(qkv_TW, places, heads.width, 0.0)
    if layer.head_norms is not None:
        qkv_TW = _layer_norm_heads(ops, config, layer.head_norms, heads, qkv_TW)
    norm_first, k_norm = not config.family.norm_after_rope, layer.k_norm if is_own else layer.q_norm
    if layer.q_norm is not None and norm_first:
        qkv_TW = ops.norm_heads(qkv_TW, layer.q_norm, k_norm, heads, config.norm_eps)
    if rope is not None and rope.turns_PR is not None:
        qkv_TW = ops.rope(qkv_TW, batch.positions_T, rope.turns_PR, heads)
    if layer.q_norm is not None and not norm_first:
        qkv_TW = ops.norm_heads(qkv_TW, layer.q_norm, k_norm, heads, config.norm_eps)
    kv, place = layer_kv
    if is_own:
        ops.write_kv(kv, place, qkv_TW, batch, heads)
    if rope is not None and rope.query_scales_PC is not None:  # keys, which it scales too, are stored by now
        qkv_TW = ops.rope(qkv_TW, batch.positions_T, rope.query_scales_PC, heads)
    mixed_TX = ops.paged_attention(
        kv,
        place,
        qkv_TW,
        batch,
        heads,
        config.attention_scale,
        window=config.layers[index].sees,
        soft_cap=config.attention_cap,
        causal=config.is_causal,
        sinks_H=layer.sinks,
    )
    return mixed_TX if gates_TX is None else ops.gate_rows(mixed_TX, gates_TX)


def _with_values(ops: ForwardOps, config: ModelConfig, index: int, layer: LayerWeights, qkv_TW: Array) -> Array:
    """With values that are keys, before these are normed, where the layer has no others; and normed, where it does
    so."""
    heads, are_keys = config.heads_of(index), config.layers[index].keys_are_values
    if not are_keys and layer.v_norm is None:
        return qkv_TW
    kv_width = heads.num_kv_heads * heads.head_dim
    keys_end = heads.width - kv_width
    v_TX = ops.columns(qkv_TW, keys_end - kv_width if are_keys else keys_end, kv_width)
    if layer.v_norm is not None:
        v_TX = ops.norm_groups(v_TX, layer.v_norm, heads.head_dim, config.norm_eps)
    return ops.join_columns([ops.columns(qkv_TW, 0, keys_end), v_TX])


def _layer_norm_heads(
    ops: ForwardOps, config: ModelConfig, norms: HeadNorms, heads: HeadGeometry, qkv_TW: Array
) -> Array:
    """With layer norms of queries and keys: norms of what is left of a head without its mean."""
    v_width = heads.num_kv_heads * heads.head_dim
    qk_TX, v_TX = ops.columns(qkv_TW, 0, heads.width - v_width), ops.columns(qkv_TW, heads.width - v_width, v_width)
    qk_TX = ops.linear_heads(qk_TX, norms.centring)
    return ops.join_columns([ops.norm_groups(qk_TX, norms.weight, heads.head_dim, config.norm_eps), v_TX])


def _latent_attention(
    ops: ForwardOps,
    config: ModelConfig,
    layer: LayerWeights,
    rope_PR: Array,
    layer_kv: tuple[Any, int],
    batch: Any,
    qc_TW: Array,
) -> Array:
    """[T, H * value_dim], in the absorbed form of DeepSeek-V2 (arXiv 2405.04434): queries go into the latent space, and
    what attention gives comes out of it. qc_TW: queries, or what they are made of, then latents."""
    latent, weights = config.latent, layer.latent
    assert latent is not None and weights is not None
    q_width = config.query_rank or latent.num_heads * latent.query_dim
    q_TW, c_TX = ops.columns(qc_TW, 0, q_width), ops.columns(qc_TW, q_width, latent.key_dim)
    if layer.q_up is not None:
        q_TW = _queries(ops, config, layer, batch, q_TW)
    q_TX = ops.latent_queries(q_TW, weights.k_up, batch.positions_T, rope_PR, latent)
    c_TX = ops.latent_kv(c_TX, weights.norm, _inner_eps(config), batch.positions_T, rope_PR, latent)
    kv, place = layer_kv
    ops.write_latent(kv, place, c_TX, batch, latent)
    mixed_TX = ops.latent_attention(kv, place, q_TX, batch, latent, config.attention_scale)
    return ops.linear_heads(mixed_TX, weights.v_up)


def _queries(ops: ForwardOps, config: ModelConfig, layer: LayerWeights, batch: Any, narrow_Tr: Array) -> Array:
    """Queries [T, W] of the channels that they go through."""
    assert layer.q_up is not None
    if layer.q_up_norm is not None:
        narrow_Tr = ops.rms_norm(narrow_Tr, layer.q_up_norm, _inner_eps(config))
    return _linear(ops, layer.q_up, batch, narrow_Tr)


def _inner_eps(config: ModelConfig) -> float:
    return config.norm_eps if config.inner_eps is None else config.inner_eps


def ffn(ops: ForwardOps, config: ModelConfig, layer: LayerWeights, batch: Any, x_TD: Array) -> Array:
    """[T, D] to be added to x."""
    normed_TD = _norm(ops, config, layer.ffn_norm, x_TD)
    y_TD = _dense_ffn(ops, config, layer, batch, normed_TD)
    if layer.moe is not None:
        y_TD = _experts(ops, config, layer.moe, batch, x_TD, normed_TD, y_TD)
    return _norm(ops, config, layer.ffn_post_norm, y_TD)


def _dense_ffn(ops: ForwardOps, config: ModelConfig, layer: LayerWeights, batch: Any, x_TD: Array) -> Array | None:
    """What every row goes through: of a mixture of experts, the shared ones; None where there are none."""
    if layer.gate_up is None or layer.down is None:
        return None
    gated = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "gelu_erf": ops.gelu_erf_mul}
    plain = {"silu": ops.silu, "gelu": ops.gelu, "gelu_erf": ops.gelu_erf, "relu2": ops.relu2}
    activate = (gated if config.family.gated else plain)[config.activation]
    hidden = _linear(ops, layer.gate_up, batch, x_TD)
    if config.branches.gate != 1:
        gate_TF, up_TF = (ops.columns(hidden, first, config.ffn_width) for first in (0, config.ffn_width))
        hidden = ops.join_columns([ops.scale(gate_TF, config.branches.gate), up_TF])
    return _scaled(ops, _linear(ops, layer.down, batch, activate(hidden)), config.branches.ffn_out)


def _experts(
    ops: ForwardOps,
    config: ModelConfig,
    weights: MoeWeights,
    batch: Any,
    x_TD: Array,
    normed_TD: Array,
    shared_TD: Array | None,
) -> Array:
    """What a row's own experts give, plus what the shared ones gave. x: of the residual stream; normed: as the layer's
    norm makes it."""
    moe = config.moe
    assert moe is not None
    routed_TD = normed_TD
    if weights.router_norm is not None:
        routed_TD = ops.rms_norm(x_TD, weights.router_norm, config.norm_eps)
    logits_TE = _linear(ops, weights.router, batch, routed_TD)
    routes_T2k = ops.moe_route(logits_TE, moe.routing, weights.choice_bias, weights.scales)
    given_TD = normed_TD if weights.norm is None else _norm(ops, config, weights.norm, x_TD)
    if weights.spread is not None:
        scores_T2 = ops.moe_route(logits_TE, replace(moe.routing, score=SIGMOID, normalise=False))
        given_TD = ops.multiply(given_TD, ops.linear(scores_T2, weights.spread))
    own_TD = _norm(ops, config, weights.post_norm, ops.moe_ffn(given_TD, routes_T2k, weights.experts))
    if shared_TD is None:
        return own_TD
    if weights.mix is not None:
        shared_TD = ops.gate_rows(shared_TD, _linear(ops, weights.mix, batch, normed_TD))
    return ops.add(own_TD, _norm(ops, config, weights.shared_post_norm, shared_TD))


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
