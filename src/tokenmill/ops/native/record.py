"""A recorder with the functions of the kernel interface: running a forward pass on it gives a flat list of operations
on values.

Quantising the input of a quantised linear is an operation of its own here, made once per input.

E experts  F FFN width  D model width  T tokens  L logit rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..api import (
    BY_HEAD,
    BY_KEY,
    BY_VALUE,
    GROUP,
    SIGMOID,
    SOFTMAX,
    SOFTMAX_CHOSEN,
    SPARSE_MIXER,
    Experts,
    HeadGeometry,
    LatentGeometry,
    Routing,
    StateGeometry,
)
from .library import LatentStruct, MoeStruct, StateStruct
from .operation import (
    F32,
    GELU,
    GELU_ERF,
    LOGIT_ROWS,
    QUANTISED,
    RELU2,
    SILU,
    TOKEN_ROWS,
    NativeKV,
    NativeLora,
    NativeStack,
    NativeWeight,
    Operation,
    SymbolicBatch,
    Value,
)


class Recorder:
    """See ops/forward.py for what the functions mean. An ndarray argument becomes an input of the program."""

    name = "native"

    def __init__(self, batch: SymbolicBatch) -> None:
        self.batch = batch
        self.operations: list[Operation] = []
        self._quantised: dict[tuple[Value, int], Value] = {}
        self._inputs: dict[int, Value] = {}

    def embed(self, table: NativeWeight, tokens_T: object) -> Value:
        by_place = tokens_T is self.batch.places_T
        assert by_place or tokens_T is self.batch.tokens_T, "embed takes the step's own tokens or places"
        return self._emit("embed", TOKEN_ROWS, (), table.num_cols, weight=table, by_place=by_place)

    def rms_norm(self, x_TD: Any, weight_D: np.ndarray, eps: float) -> Value:
        x = self._value(x_TD)
        assert weight_D.shape == (x.width,), (weight_D.shape, x.width)
        return self._emit("rms_norm", x.rows, (x,), x.width, vector=weight_D, value=eps)

    def layer_norm(self, x_TD: Any, weight_D: np.ndarray, bias_D: np.ndarray, eps: float) -> Value:
        x = self._value(x_TD)
        assert weight_D.shape == bias_D.shape == (x.width,), (weight_D.shape, bias_D.shape, x.width)
        return self._emit("layer_norm", x.rows, (x,), x.width, vector=weight_D, vector2=bias_D, value=eps)

    def norm_heads(
        self, qkv_TW: Any, q_weight: np.ndarray, k_weight: np.ndarray, heads: HeadGeometry, eps: float
    ) -> Value:
        x = self._value(qkv_TW)
        assert x.width == heads.width, (x.width, heads)
        vectors = {"vector": q_weight, "vector2": k_weight}
        return self._emit("norm_heads", x.rows, (x,), x.width, value=eps, heads=heads, **vectors)

    def linear(self, x_TK: Any, weight: NativeWeight) -> Value:
        x = self._value(x_TK)
        assert x.width == weight.num_cols, (x.width, weight.num_cols)
        if weight.order is not None:
            x = self._emit("pick", x.rows, (x,), x.width, order=weight.order)
        quantised = None if weight.form == F32 else self._quantise(x, weight.form)
        return self._emit("linear", x.rows, (x if weight.dense else None, quantised), weight.num_rows, weight=weight)

    def add_lora(self, y_TN: Any, x_TK: Any, table: NativeLora, adapters_T: object) -> Value:
        y, x = self._value(y_TN), self._value(x_TK)
        assert y.array is None, "y is written into, so it must be a value of the program"
        assert (x.width, y.width, x.rows) == (table.num_cols, sum(table.widths), y.rows), (x, y, table.widths)
        of_rows = self.batch.adapters_T if y.rows == TOKEN_ROWS else self.batch.adapters_L
        assert adapters_T is of_rows, "add_lora takes the step's own adapters"
        narrow = self._emit("lora_shrink", x.rows, (x,), len(table.widths) * table.max_rank, lora=table)
        self._add("lora_expand", y.rows, (narrow, y), y, y.width, lora=table)
        return y

    def add_token_lora(self, y_TD: Any, tokens_T: object, table: NativeLora, adapters_T: object) -> Value:
        y = self._value(y_TD)
        assert y.array is None, "y is written into, so it must be a value of the program"
        assert y.rows == TOKEN_ROWS and (y.width,) == table.widths, (y, table.widths)
        assert tokens_T is self.batch.tokens_T and adapters_T is self.batch.adapters_T, "the step's own"
        narrow = self._emit("lora_lookup", y.rows, (), table.max_rank, lora=table)
        self._add("lora_expand", y.rows, (narrow, y), y, y.width, lora=table)
        return y

    def add(self, x_TD: Any, y_TD: Any) -> Value:
        x, y = self._value(x_TD), self._value(y_TD)
        assert (x.rows, x.width) == (y.rows, y.width), (x, y)
        return self._emit("add", x.rows, (x, y), x.width)

    def add_bias(self, x_TN: Any, bias_N: np.ndarray) -> Value:
        x = self._value(x_TN)
        assert bias_N.shape == (x.width,), (bias_N.shape, x.width)
        return self._emit("add_bias", x.rows, (x,), x.width, vector=bias_N)

    def scale(self, x_TD: Any, factor: float) -> Value:
        x = self._value(x_TD)
        return self._emit("scale", x.rows, (x,), x.width, value=factor)

    def soft_cap(self, x_TD: Any, cap: float) -> Value:
        x = self._value(x_TD)
        return self._emit("soft_cap", x.rows, (x,), x.width, cap=cap)

    def silu_mul(self, gate_up_T2F: Any) -> Value:
        return self._gated(gate_up_T2F, SILU)

    def gelu_mul(self, gate_up_T2F: Any) -> Value:
        return self._gated(gate_up_T2F, GELU)

    def gelu_erf_mul(self, gate_up_T2F: Any) -> Value:
        return self._gated(gate_up_T2F, GELU_ERF)

    def silu(self, x_TF: Any) -> Value:
        return self._activated(x_TF, SILU)

    def gelu(self, x_TF: Any) -> Value:
        return self._activated(x_TF, GELU)

    def gelu_erf(self, x_TF: Any) -> Value:
        return self._activated(x_TF, GELU_ERF)

    def relu2(self, x_TF: Any) -> Value:
        return self._activated(x_TF, RELU2)

    def _activated(self, x_TF: Any, activation: int) -> Value:
        x = self._value(x_TF)
        return self._emit("activate", x.rows, (x,), x.width, activation=activation)

    def _gated(self, gate_up_T2F: Any, activation: int) -> Value:
        x = self._value(gate_up_T2F)
        assert x.width % 2 == 0, x.width
        return self._emit("gated", x.rows, (x,), x.width // 2, activation=activation)

    def rope(self, qkv_TW: Any, positions_T: object, table_PR: np.ndarray, heads: HeadGeometry) -> Value:
        x = self._value(qkv_TW)
        assert positions_T is self.batch.positions_T, "rope takes the step's own positions"
        assert x.width == heads.width and table_PR.shape[1] <= heads.head_dim, (x.width, heads, table_PR.shape)
        return self._emit("rope", x.rows, (x,), x.width, vector=table_PR, heads=heads)

    def write_kv(self, kv: NativeKV, layer: int, qkv_TW: Any, batch: Any, heads: HeadGeometry) -> None:
        x = self._value(qkv_TW)
        assert batch is self.batch and x.width == heads.width, (x.width, heads)
        self._add("write_kv", x.rows, (x,), None, heads.width, kv=kv, layer=layer, heads=heads)

    def paged_attention(
        self,
        kv: NativeKV,
        layer: int,
        qkv_TW: Any,
        batch: Any,
        heads: HeadGeometry,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        causal: bool = True,
        sinks_H: np.ndarray | None = None,
    ) -> Value:
        x = self._value(qkv_TW)
        assert window >= 0 or causal, window
        assert batch is self.batch and x.width == heads.width, (x.width, heads)
        assert sinks_H is None or sinks_H.shape == (heads.num_heads,), heads
        width = heads.num_heads * heads.head_dim
        limits = {"value": scale, "window": window, "cap": soft_cap, "whole": not causal, "vector": sinks_H}
        return self._emit("attention", x.rows, (x,), width, kv=kv, layer=layer, heads=heads, **limits)

    def gather_rows(self, x_TD: Any, rows_L: object) -> Value:
        x = self._value(x_TD)
        assert rows_L is self.batch.logit_rows_L, "gather_rows takes the step's own logit rows"
        return self._emit("gather", LOGIT_ROWS, (x,), x.width)

    def store_rows(self, x_TW: Any, array: np.ndarray) -> None:
        x = self._value(x_TW)
        assert x.rows == TOKEN_ROWS, "a step leaves rows of all its tokens"
        assert array.shape[1:] == (x.width,) and array.dtype == np.float32 and array.flags.c_contiguous, array.shape
        self._add("columns", x.rows, (x,), Value(x.rows, x.width, array=array), x.width)

    def load_rows(self, array: np.ndarray, tokens_T: object) -> Value:
        assert tokens_T is self.batch.tokens_T, "load_rows takes the step's own tokens"
        assert array.dtype == np.float32 and array.flags.c_contiguous, array.dtype
        return self._value(array)

    def columns(self, x_TW: Any, first: int, count: int) -> Value:
        x = self._value(x_TW)
        assert first >= 0 and count > 0 and first + count <= x.width, (first, count, x.width)
        return self._emit("columns", x.rows, (x,), count, window=first)

    def join_columns(self, parts: Sequence[Any]) -> Value:
        values = [self._value(part) for part in parts]
        assert values and len({x.rows for x in values}) == 1, parts
        while len(values) > 1:
            width = sum(x.width for x in values[:3])
            values[:3] = [self._emit("join", values[0].rows, values[:3], width)]
        return values[0]

    def spread_columns(self, x_TN: Any, places_N: np.ndarray, width: int, other: float) -> Value:
        x = self._value(x_TN)
        assert places_N.shape == (x.width,) and places_N.dtype == np.int32 and places_N.flags.c_contiguous, places_N
        return self._emit("spread", x.rows, (x,), width, order=places_N, value=other)

    def gate_rows(self, x_TD: Any, gate_T1: Any) -> Value:
        x, gate = self._value(x_TD), self._value(gate_T1)
        assert gate.rows == x.rows and gate.width in (1, x.width), (x, gate)
        return self._emit("gate_rows", x.rows, (x, gate), x.width)

    def multiply(self, x_TD: Any, y_TD: Any) -> Value:
        x, y = self._value(x_TD), self._value(y_TD)
        assert (x.rows, x.width) == (y.rows, y.width), (x, y)
        return self._emit("multiply", x.rows, (x, y), x.width)

    def norm_groups(self, x_TD: Any, weight_D: np.ndarray, size: int, eps: float) -> Value:
        x = self._value(x_TD)
        assert weight_D.shape == (x.width,) and x.width % size == 0, (weight_D.shape, x.width, size)
        heads = HeadGeometry(x.width // size, 0, size)
        return self._emit("norm_groups", x.rows, (x,), x.width, vector=weight_D, value=eps, heads=heads)

    def causal_conv(
        self,
        kv: NativeKV,
        layer: int,
        x_TW: Any,
        weight_KW: np.ndarray,
        bias_W: np.ndarray | None,
        batch: Any,
        state: StateGeometry,
        *,
        silu: bool = False,
    ) -> Value:
        x = self._value(x_TW)
        assert batch is self.batch and weight_KW.shape == (state.taps, state.conv_width), (weight_KW.shape, state)
        assert x.width == state.conv_width and (bias_W is None or bias_W.shape == (x.width,)), (x.width, state)
        vectors = {"vector": weight_KW, "vector2": bias_W}
        struct = _state_struct(state)
        return self._emit("causal_conv", x.rows, (x,), x.width, kv=kv, layer=layer, whole=silu, state=struct, **vectors)

    def scan_gates(
        self,
        x_TN: Any,
        y_TH: Any | None,
        rates_N: np.ndarray | None,
        bias_N: np.ndarray,
        state: StateGeometry,
        *,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Value:
        x, y = self._value(x_TN), None if y_TH is None else self._value(y_TH)
        steps = (state.num_steps,)
        assert (x.width,) == steps and (y is None or (y.rows, y.width) == (x.rows, state.num_heads)), (x, y, state)
        assert (rates_N is None) == (state.decay == BY_VALUE), state
        struct = _state_struct(state)
        struct.low, struct.high = limits
        struct.rates, struct.dt_bias = (_address(vector, np.float32, steps) for vector in (rates_N, bias_N))
        details = {"state": struct, "keep": (rates_N, bias_N)}
        return self._emit("scan_gates", x.rows, (x, y), state.gates_width, **details)

    def state_scan(
        self,
        kv: NativeKV,
        layer: int,
        keys_TX: Any,
        values_TX: Any,
        gates_TG: Any,
        batch: Any,
        state: StateGeometry,
        *,
        skip: np.ndarray | None = None,
        rates_KX: np.ndarray | None = None,
    ) -> Value:
        keys, values, gates = (self._value(x) for x in (keys_TX, values_TX, gates_TG))
        assert batch is self.batch and keys.rows == values.rows == gates.rows == TOKEN_ROWS, (keys, values, gates)
        assert (keys.width, values.width) == (2 * state.keys_width, state.values_width), (keys, values, state)
        by_value = state.decay == BY_VALUE
        assert gates.width == state.gates_width and (rates_KX is not None) == by_value, (gates, state)
        struct = _state_struct(state)
        struct.skip = _address(skip, np.float32, (state.values_width if by_value else state.num_heads,))
        struct.rates = _address(rates_KX, np.float32, (state.key_dim, state.values_width))
        details = {"kv": kv, "layer": layer, "state": struct, "keep": (skip, rates_KX)}
        return self._emit("state_scan", keys.rows, (keys, values, gates), values.width, **details)

    def linear_heads(self, x_TX: Any, stack: NativeStack) -> Value:
        x = self._value(x_TX)
        assert x.width == stack.num_matrices * stack.num_cols, (x.width, stack)
        inputs = (x, None) if stack.form == F32 else (None, self._quantise(x, stack.form))
        return self._emit("linear_heads", x.rows, inputs, stack.num_matrices * stack.num_rows, stack=stack)

    def latent_queries(
        self, q_TW: Any, k_up: NativeStack, positions_T: object, table_PR: np.ndarray, latent: LatentGeometry
    ) -> Value:
        x, heads = self._value(q_TW), latent.num_heads
        assert positions_T is self.batch.positions_T, "latent_queries takes the step's own positions"
        assert (x.width, table_PR.shape[1]) == (heads * latent.query_dim, latent.rope_dim), (x.width, latent)
        assert (k_up.num_matrices, k_up.num_rows, k_up.num_cols) == (heads, latent.latent_dim, latent.nope_dim), latent
        struct, aligned = _struct_of(latent), latent.query_dim % GROUP == 0
        inputs: tuple[Value | None, Value | None] = (x, None)
        if k_up.form != F32:
            assert aligned, f"quantised matrices of heads need a multiple of {GROUP} channels, got {latent.query_dim}"
            inputs = (None, self._quantise(x, k_up.form))
        wide = self._emit("linear_heads", x.rows, inputs, heads * latent.key_dim, stack=k_up, latent=struct)
        self._add("latent_turn", x.rows, (x,), wide, wide.width, vector=table_PR, latent=struct)
        return wide

    def latent_kv(
        self,
        c_TX: Any,
        weight: np.ndarray,
        eps: float,
        positions_T: object,
        table_PR: np.ndarray,
        latent: LatentGeometry,
    ) -> Value:
        x = self._value(c_TX)
        assert positions_T is self.batch.positions_T, "latent_kv takes the step's own positions"
        assert x.width == latent.key_dim and weight.shape == (latent.latent_dim,), (x.width, weight.shape, latent)
        assert table_PR.shape[1] == latent.rope_dim, (table_PR.shape, latent)
        vectors = {"vector": weight, "vector2": table_PR}
        return self._emit("latent_kv", x.rows, (x,), x.width, value=eps, latent=_struct_of(latent), **vectors)

    def write_latent(self, kv: NativeKV, layer: int, c_TX: Any, batch: Any, latent: LatentGeometry) -> None:
        x = self._value(c_TX)
        assert batch is self.batch and x.width == latent.key_dim, (x.width, latent)
        self._add("write_latent", x.rows, (x,), None, x.width, kv=kv, layer=layer, latent=_struct_of(latent))

    def latent_attention(
        self, kv: NativeKV, layer: int, q_TX: Any, batch: Any, latent: LatentGeometry, scale: float
    ) -> Value:
        x = self._value(q_TX)
        assert batch is self.batch and x.width == latent.num_heads * latent.key_dim, (x.width, latent)
        heads = HeadGeometry(latent.num_heads, 1, latent.latent_dim)  # of what is mixed
        details = {"kv": kv, "layer": layer, "heads": heads, "latent": _struct_of(latent), "value": scale}
        return self._emit("latent_attention", x.rows, (x,), latent.num_heads * latent.latent_dim, **details)

    def moe_route(
        self,
        logits_TE: Any,
        routing: Routing,
        bias_E: np.ndarray | None = None,
        scales_E: np.ndarray | None = None,
    ) -> Value:
        x = self._value(logits_TE)
        assert x.width == routing.num_experts, (x.width, routing)
        details = {"moe": routing_struct(routing, bias_E), "vector": scales_E, "keep": (bias_E,)}
        return self._emit("moe_route", x.rows, (x,), 2 * routing.top_k, **details)

    def moe_ffn(self, x_TD: Any, routes_T2k: Any, experts: Experts) -> Value:
        x, routes = self._value(x_TD), self._value(routes_T2k)
        gate_up, down = experts.gate_up, experts.down
        assert isinstance(gate_up, NativeStack) and isinstance(down, NativeStack), experts
        assert (x.width, x.rows) == (gate_up.num_cols, routes.rows), (x, routes, gate_up)
        taken = x if gate_up.form == F32 else self._quantise(x, gate_up.form)
        struct, activation = experts_struct(experts, routes.width // 2)
        inputs = (taken, routes, inner_values(x.rows, routes.width // 2, down))
        details = {"stack": gate_up, "stack2": down, "moe": struct, "activation": activation, "keep": (experts,)}
        return self._emit("moe_ffn", x.rows, inputs, down.num_rows, **details)

    def _quantise(self, x: Value, form: int) -> Value:
        if (x, form) not in self._quantised:
            assert x.width % GROUP == 0, f"a quantised linear needs a multiple of {GROUP} inputs, got {x.width}"
            out = Value(x.rows, x.width, form)
            self._add("quantise", x.rows, (x,), out, x.width)
            self._quantised[x, form] = out
        return self._quantised[x, form]

    def _value(self, x: Any) -> Value:
        if isinstance(x, Value):
            return x
        if id(x) not in self._inputs:
            array = np.ascontiguousarray(x, np.float32)
            assert array.ndim == 2, array.shape
            self._inputs[id(x)] = Value(TOKEN_ROWS, array.shape[1], array=array)
        return self._inputs[id(x)]

    def _emit(self, kind: str, rows: int, inputs: Sequence[Value | None], width: int, **details: Any) -> Value:
        out = Value(rows, width)
        self._add(kind, rows, inputs, out, width, **details)
        return out

    def _add(
        self, kind: str, rows: int, inputs: Sequence[Value | None], out: Value | None, width: int, **details: Any
    ) -> None:
        first, second, third = (*inputs, None, None, None)[:3]
        self.operations.append(Operation(kind, rows, (first, second, third), out, width, **details))


def _struct_of(latent: LatentGeometry) -> LatentStruct:
    return LatentStruct(latent.num_heads, latent.nope_dim, latent.rope_dim, latent.latent_dim, latent.value_dim)


def _state_struct(state: StateGeometry) -> StateStruct:
    return StateStruct(
        conv_width=state.conv_width,
        taps=state.taps,
        num_heads=state.num_heads,
        num_key_heads=state.num_key_heads,
        key_dim=state.key_dim,
        value_dim=state.value_dim,
        is_delta=state.is_delta,
        decay=(BY_HEAD, BY_KEY, BY_VALUE).index(state.decay),
    )


_SCORES = {SOFTMAX: 0, SOFTMAX_CHOSEN: 1, SIGMOID: 2, SPARSE_MIXER: 3}
_ACTIVATIONS = {"silu": SILU, "gelu": GELU, "swiglu": 3, "relu2": RELU2}


def routing_struct(routing: Routing, bias_E: np.ndarray | None) -> MoeStruct:
    """Of moe_route. The bias must live as long."""
    return MoeStruct(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        score=_SCORES[routing.score],
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        group_score=routing.group_score,
        normalise=routing.normalise,
        floor=routing.floor,
        scale=routing.scale,
        min_share=routing.min_share,
        margin=routing.margin,
        bias=_address(bias_E, np.float32, (routing.num_experts,)),
    )


def experts_struct(experts: Experts, top_k: int) -> tuple[MoeStruct, int]:
    """Of moe_ffn, and the number of its activation. The arrays must live as long."""
    num_experts, width, inner = experts.down.num_matrices, experts.down.num_rows, experts.down.num_cols
    num_rows = inner if experts.activation.kind == "relu2" else 2 * inner
    assert (experts.gate_up.num_matrices, experts.gate_up.num_rows) == (num_experts, num_rows), experts
    struct = MoeStruct(
        num_experts=num_experts,
        top_k=top_k,
        limit=experts.activation.limit,
        alpha=experts.activation.alpha,
        gate_up_bias=_address(experts.gate_up_bias, np.float32, (num_experts, 2 * inner)),
        down_bias=_address(experts.down_bias, np.float32, (num_experts, width)),
        tally=_address(experts.tally, np.int64, (num_experts,)),
    )
    return struct, _ACTIVATIONS[experts.activation.kind]


def inner_values(rows: int, top_k: int, down: NativeStack) -> Value:
    """Room for what `down` takes, of every row and each of its experts. Codes take up to twice as many places, so that
    rows of one expert lie in as few panels as they can."""
    if down.form == F32:
        return Value(rows, top_k * down.num_cols)
    return Value(rows, 2 * top_k * down.num_cols, QUANTISED)


def _address(array: np.ndarray | None, dtype: type[np.generic], shape: tuple[int, ...]) -> int | None:
    if array is None:
        return None
    assert array.dtype == dtype and array.shape == shape and array.flags.c_contiguous, (array.dtype, array.shape, shape)
    return int(array.ctypes.data)
