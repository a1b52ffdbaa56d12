"""A recorder with the seam's functions: running a forward pass on it gives a flat list of operations on values.

Every value is written once, but that add_lora goes on writing into the one it is given. Rows of a value are the step's
tokens or its logit rows; how many there are is known only when a step runs. Quantising the input of a quantised linear
is an operation of its own here, made once per input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.block import KVGroup
from ..api import GROUP, HeadGeometry
from .library import KVStruct, LoraStruct, LowRankStruct, PartStruct, WeightStruct

SILU, GELU, GELU_ERF = 0, 1, 2

TOKEN_ROWS, LOGIT_ROWS = 0, 1
F32, QUANTISED, WIDE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """Packed parts and the C structs that describe them. `form`: how parts that are not dense take their inputs, F32
    where there is none; `dense`: whether any part is; `on_tiles`: all of them meet in tiles. `order`: see RawTensor."""

    num_rows: int
    num_cols: int
    num_bytes: int
    form: int
    dense: bool
    on_tiles: bool
    struct: WeightStruct
    parts: Any  # the C array of PartStruct
    data: tuple[np.ndarray, ...]
    order: np.ndarray | None = None

    def part(self, index: int) -> PartStruct:
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class NativeKV:
    """A bound pool: the C struct, and the array it points into."""

    struct: KVStruct
    pool: np.ndarray
    group: KVGroup


@dataclass(frozen=True, slots=True)
class NativeLora:
    """Low-rank changes of one linear: the C structs, and by slot the arrays they point into. `max_rank` is rounded up
    to whole tiles."""

    num_slots: int
    max_rank: int
    num_cols: int
    widths: tuple[int, ...]
    struct: LoraStruct
    columns: np.ndarray
    changes: Any  # the C array of LowRankStruct, slot by slot
    data: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def change(self, slot: int, index: int) -> LowRankStruct:
        """The struct of matrix `index` in a slot (from 1)."""
        return self.changes[(slot - 1) * len(self.widths) + index]


@dataclass(eq=False, slots=True)
class Value:
    """What a forward pass sees of an array. `array`: set for an input that lives outside the program."""

    rows: int
    width: int
    form: int = F32
    array: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class Operation:
    """kind: its name in the tables of native/src/op_*.cpp."""

    kind: str
    rows: int
    inputs: tuple[Value | None, Value | None, Value | None]
    out: Value | None
    width: int
    value: float = 0.0
    weight: NativeWeight | None = None
    vector: np.ndarray | None = None
    vector2: np.ndarray | None = None
    activation: int = SILU
    window: int = 0
    by_place: bool = False
    whole: bool = False
    cap: float = 0.0
    kv: NativeKV | None = None
    layer: int = 0
    heads: HeadGeometry | None = None
    lora: NativeLora | None = None
    order: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class SymbolicBatch:
    """Stands for the StepBatch of every step to come; its fields can only be handed back to the recorder."""

    tokens_T: object = field(default_factory=object)
    positions_T: object = field(default_factory=object)
    row_starts_S1: object = field(default_factory=object)
    context_lens_S: object = field(default_factory=object)
    block_tables_SB: object = field(default_factory=object)
    logit_rows_L: object = field(default_factory=object)
    adapters_T: object = field(default_factory=object)
    adapters_L: object = field(default_factory=object)
    places_T: object = field(default_factory=object)


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

    def gelu(self, x_TF: Any) -> Value:
        return self._activated(x_TF, GELU)

    def gelu_erf(self, x_TF: Any) -> Value:
        return self._activated(x_TF, GELU_ERF)

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
    ) -> Value:
        x = self._value(qkv_TW)
        assert batch is self.batch and x.width == heads.width, (x.width, heads)
        width = heads.num_heads * heads.head_dim
        limits = {"value": scale, "window": window, "cap": soft_cap, "whole": not causal}
        return self._emit("attention", x.rows, (x,), width, kv=kv, layer=layer, heads=heads, **limits)

    def gather_rows(self, x_TD: Any, rows_L: object) -> Value:
        x = self._value(x_TD)
        assert rows_L is self.batch.logit_rows_L, "gather_rows takes the step's own logit rows"
        return self._emit("gather", LOGIT_ROWS, (x,), x.width)

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
