"""LoRA on a model: which module of an adapter changes which stacked matrix of which linear, with shapes checked.

A model that takes adapters has a table (see Ops.lora_table) beside each of its linears; filling one slot of all tables
is loading an adapter. Modules are known by the last part of their name in Hugging Face's models, so an adapter fits the
same model in GGUF too. Rows of b move as rows of the weights do where q and k are stored for interleaved RoPE pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.adapter import Adapter, LoraModule
from ..formats.ggml import dequantise
from ..formats.tensor import Tensor
from ..ops.api import LowRank, Ops, RawTensor
from .config import ModelConfig
from .weights import Linear, ModelWeights, half_split, role_shapes, stacked_roles

HEAD = "head"
LINEARS = ("qkv", "output", "gate_up", "down")
_ROLES = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.qkv_proj": "qkv",
    "self_attn.o_proj": "output", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
}  # fmt: skip
_UNGATED = {"mlp.c_fc": "up", "mlp.c_proj": "down"}
_IN_A_LAYER = re.compile(r"(?:(?:language_)?model\.)*layers\.(\d{1,5})\.(\w+\.\w+)")
_OF_HEAD = re.compile(r"(?:(?:language_)?model\.)*lm_head")

Changes = Mapping[tuple[int, str], tuple[LowRank | None, ...]]
"""(layer, linear) -> the change of each of its stacked matrices; the head is (-1, HEAD)."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """max_loras: most adapters loaded at once. max_rank: the highest rank one may have."""

    max_loras: int
    max_rank: int


def with_tables(weights: ModelWeights, config: ModelConfig, ops: Ops, limits: LoraLimits) -> ModelWeights:
    """The same weights, with an empty table beside each linear and the head."""
    shapes = role_shapes(config)

    def add(linear: Linear, name: str) -> Linear:
        stacked = stacked_roles(config, name)
        table = ops.lora_table(
            limits.max_loras, limits.max_rank, shapes[stacked[0]][1], [shapes[r][0] for r in stacked]
        )
        return replace(linear, lora=table)

    layers = tuple(
        replace(
            layer,
            qkv=add(layer.qkv, "qkv"),
            output=add(layer.output, "output"),
            gate_up=add(layer.gate_up, "gate_up"),
            down=add(layer.down, "down"),
        )
        for layer in weights.layers
    )
    head = ops.lora_table(limits.max_loras, limits.max_rank, config.width, [config.vocab_size])
    return replace(weights, layers=layers, head_lora=head)


def most_bytes(config: ModelConfig, limits: LoraLimits) -> int:
    """Memory that adapters take where all places hold one that changes every linear at the highest rank, in float32."""
    shapes = role_shapes(config)
    places = [shapes[role] for name in LINEARS for role in stacked_roles(config, name)] * config.num_layers
    places.append((config.vocab_size, config.width))
    values = sum(limits.max_rank * (num_rows + num_cols) for num_rows, num_cols in places)
    return 4 * values * limits.max_loras


def changes_of(adapter: Adapter, config: ModelConfig, kind: str, limits: LoraLimits) -> Changes:
    """What the adapter does to a model of this config, read from a checkpoint of `kind`. Raises BadCheckpoint, naming
    the first module that does not fit."""
    shapes = role_shapes(config)
    found: dict[tuple[int, str], list[LowRank | None]] = {}
    for module in adapter.modules:
        layer, role = _place(adapter, module, config)
        shape = (config.vocab_size, config.width) if role == HEAD else shapes[role]
        if (module.b.shape[0], module.a.shape[1]) != shape:
            raise BadCheckpoint(
                f"{adapter.path}: {module.name} changes a matrix of {module.b.shape[0]} x {module.a.shape[1]}, but this"
                f" model's is {shape[0]} x {shape[1]}."
            )
        if module.rank > limits.max_rank:
            raise BadCheckpoint(
                f"{adapter.path}: {module.name} has rank {module.rank}, more than the {limits.max_rank} that are"
                " allowed; start with a larger --max-lora-rank."
            )
        linear = next((name for name in LINEARS if role in stacked_roles(config, name)), HEAD)
        stacked = (HEAD,) if role == HEAD else stacked_roles(config, linear)
        changes = found.setdefault((layer, linear), [None] * len(stacked))
        if changes[stacked.index(role)] is not None:
            raise BadCheckpoint(f"{adapter.path}: {module.name} changes what another module does already.")
        b = _raw(module.b)
        if kind == "hf" and config.family.interleaved_heads and role in ("q", "k"):
            b = half_split(b, config.num_heads if role == "q" else config.num_kv_heads, config.rotary_dim)
        changes[stacked.index(role)] = LowRank(_raw(module.a), b, module.scale)
    return {place: tuple(changes) for place, changes in found.items()}


def fill_slot(weights: ModelWeights, ops: Ops, slot: int, changes: Changes) -> int:
    """Put an adapter's changes into a slot of every table, or clear it where there are none; the bytes they take."""
    num_bytes = 0
    for index, layer in enumerate(weights.layers):
        for name in LINEARS:
            num_bytes += _fill(ops, getattr(layer, name).lora, slot, changes.get((index, name)))
    return num_bytes + _fill(ops, weights.head_lora, slot, changes.get((-1, HEAD)))


def _fill(ops: Ops, table: Any, slot: int, changes: tuple[LowRank | None, ...] | None) -> int:
    return ops.set_lora(table, slot, changes or (None,) * len(table.widths))


def _place(adapter: Adapter, module: LoraModule, config: ModelConfig) -> tuple[int, str]:
    """(layer, role) of a module; (-1, HEAD) for the head."""
    if _OF_HEAD.fullmatch(module.name):
        return -1, HEAD
    found = _IN_A_LAYER.fullmatch(module.name)
    names = _ROLES if config.family.gated else _ROLES | _UNGATED
    known = {name: role for name, role in names.items() if role in config.family.layer_roles()}
    if found is None or found[2] not in known:
        raise BadCheckpoint(
            f"{adapter.path}: module {module.name[:200]!r} cannot be adapted in {config.architecture}; these can:"
            f" {', '.join(known)}, lm_head."
        )
    if int(found[1]) >= config.num_layers:
        raise BadCheckpoint(f"{adapter.path}: {module.name} is beyond this model's {config.num_layers} layers.")
    return int(found[1]), known[found[2]]


def _raw(tensor: Tensor) -> RawTensor:
    """The matrix in a kind that meets float32 inputs as they are: bf16 would have them rounded, so it is widened."""
    num_rows, num_cols = tensor.shape
    if tensor.kind != "bf16":
        return RawTensor(tensor.kind, num_rows, num_cols, np.frombuffer(tensor.data, np.uint8))
    return RawTensor("f32", num_rows, num_cols, dequantise("bf16", tensor.data, tensor.num_values).view(np.uint8))
