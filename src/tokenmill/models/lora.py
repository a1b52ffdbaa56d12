"""LoRA on a model: which module of an adapter changes which stacked matrix of which linear, with shapes checked.

A model that takes adapters has a table (see Ops.lora_table) beside each of its linears and its embedding; filling one
slot of all tables is loading an adapter. Modules are known by the last part of their name in Hugging Face's models, so
an adapter fits the same model in GGUF too. Rows of b move as rows of the weights do where q and k are stored for
interleaved RoPE pairs. Of an adapter of a model that also reads images, the modules that do are left out.

DoRA gives the rows of a changed matrix W + scale * b @ a lengths of its own: what scales them is computed here once,
from the weights that the model computes with, quantised ones too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.adapter import Adapter, LoraModule
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.tensor import Tensor
from ..ops.api import LowRank, Ops, RawTensor
from ..ops.reference_weights import dequantise as values_of
from .config import ModelConfig
from .mixer import GATED_DELTA, MAMBA2, SHORT_CONV
from .roles import layer_names, role_shapes, stacked_roles
from .row_order import inputs_in_order, parts_in_order, rows_in_order
from .tensor_names import global_names
from .weights import LayerWeights, Linear, ModelWeights, as_run, quantization_of_ends

HEAD, EMBED = "head", "embed"
ENDS = -1
"""Stands for the number of a layer where the head and the embedding are meant."""
LINEARS = ("qkv", "q_up", "output", "mixer_in", "mixer_out", "gate_up", "down")
"""Fields of LayerWeights. In a layer that is a mixture of experts, those of attention alone can be changed."""
_ROLES = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.qkv_proj": "qkv",
    "self_attn.q_a_proj": "q_a", "self_attn.q_b_proj": "q_b", "self_attn.kv_a_proj_with_mqa": "kv_a",
    "self_attn.gate_proj": "attn_gate", "self_attn.o_proj": "output", "mlp.gate_proj": "gate", "mlp.up_proj": "up",
    "mlp.gate_up_proj": "gate_up", "mlp.down_proj": "down",
}  # fmt: skip
_UNGATED = {"mlp.c_fc": "up", "mlp.c_proj": "down"}
_BESIDE_MIXERS: Mapping[str, Mapping[str, str]] = {
    SHORT_CONV: {
        "self_attn.out_proj": "output", "feed_forward.w1": "gate", "feed_forward.w3": "up", "feed_forward.w2": "down",
        "conv.in_proj": "mixer_in", "conv.out_proj": "mixer_out",
    },
    GATED_DELTA: {
        **{f"linear_attn.in_proj_{part}": f"mixer_{part}" for part in ("qkv", "z", "qkvz", "b", "a", "ba")},
        "linear_attn.out_proj": "mixer_out",
    },
    MAMBA2: {
        "mamba.in_proj": "mixer_in", "mamba.out_proj": "mixer_out", "feed_forward.gate_proj": "gate",
        "feed_forward.up_proj": "up", "feed_forward.down_proj": "down", "shared_mlp.input_linear": "gate_up",
        "shared_mlp.output_linear": "down",
        "mixer.in_proj": "mixer_in", "mixer.out_proj": "mixer_out",
        **{f"mixer.{role}_proj": role for role in ("q", "k", "v", "up", "down")}, "mixer.o_proj": "output",
    },
}  # fmt: skip
"""Kind of mixer -> modules of the families that have it."""
_LANGUAGE = r"(?:(?:language_|text_)?model\.)*"
_IN_A_LAYER = re.compile(_LANGUAGE + r"(?:backbone\.)?layers\.(\d{1,5})\.(\w+\.\w+)")
_ENDS = {"lm_head": HEAD, "embed_tokens": EMBED}
_END = re.compile(_LANGUAGE + r"(lm_head|embed_tokens)")
_OF_IMAGES = re.compile(
    r"(?:model\.)*(?:vision_model|vision_tower|visual|multi_modal_projector|connector|image_newline)\..*"
)
_ROWS_AT_ONCE = 1024

Changes = Mapping[tuple[int, str], tuple[LowRank | None, ...]]
"""(layer, linear) -> the change of each of its stacked matrices; head and embedding are (ENDS, HEAD), (ENDS, EMBED)."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """max_loras: most adapters loaded at once. max_rank: the highest rank one may have."""

    max_loras: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class Base:
    """The model that adapters change: its checkpoint, whose tensors must stay open, and how it was loaded."""

    checkpoint: Checkpoint
    config: ModelConfig
    ops: Ops
    quantization: str | None = None

    def matrix(self, layer: int, role: str) -> RawTensor:
        """The matrix of a role as it is computed with; the embedding is [V, D]."""
        checkpoint, config = self.checkpoint, self.config
        if layer == ENDS:
            of_head = role == HEAD and not config.tied_embeddings
            name = global_names(checkpoint.kind, config.family.names)["head" if of_head else "embed"]
            quantization = quantization_of_ends(self.quantization)
        else:
            name = layer_names(checkpoint.kind, config, layer)[role]
            quantization = self.quantization
        raw = as_run(checkpoint.tensors[f"{name}.weight"], self.ops, quantization)
        return inputs_in_order(config, role, rows_in_order(config, role, raw))

    def in_order(self, role: str, raw: RawTensor) -> RawTensor:
        """Rows of an adapter, which are in the order of Hugging Face's models, in the one that is computed with. That
        of RoPE pairs and of a mixer's heads is the file's own there; a GGUF file has another."""
        is_own = self.checkpoint.kind == "hf" or self.config.latent is not None  # of the latter all files have the same
        return (rows_in_order if is_own else parts_in_order)(self.config, role, raw)


def with_tables(weights: ModelWeights, config: ModelConfig, ops: Ops, limits: LoraLimits) -> ModelWeights:
    """The same weights, with an empty table beside each linear, the head and the embedding."""

    def add(linear: Linear, shapes: list[tuple[int, ...]]) -> Linear:
        table = ops.lora_table(limits.max_loras, limits.max_rank, shapes[0][1], [shape[0] for shape in shapes])
        return replace(linear, lora=table)

    def taking(index: int, layer: LayerWeights) -> LayerWeights:
        shapes = role_shapes(config, index)
        linears = changed_linears(config, index).items()
        added = {name: add(getattr(layer, name), [shapes[role] for role in roles]) for name, roles in linears}
        return _with_linears(layer, added)

    layers = tuple(taking(index, layer) for index, layer in enumerate(weights.layers))
    head = ops.lora_table(limits.max_loras, limits.max_rank, config.width, [config.vocab_size])
    embed = ops.lora_table(limits.max_loras, limits.max_rank, config.vocab_size, [config.width], by_token=True)
    return replace(weights, layers=layers, head_lora=head, embed_lora=embed)


def _with_linears(layer: LayerWeights, linears: Mapping[str, Any]) -> LayerWeights:
    return replace(layer, **linears)


def changed_linears(config: ModelConfig, layer: int) -> dict[str, tuple[str, ...]]:
    """The linears of a layer that adapters may change, with the roles that are stacked in each."""
    kind = config.layers[layer]
    names: tuple[str, ...] = ("qkv", "output") if kind.attends else ()
    names += ("mixer_in", "mixer_out") if kind.keeps_state else ()
    names += ("gate_up", "down") if kind.has_ffn and not kind.is_moe else ()
    found = {name: stacked_roles(config, name, layer) for name in names}
    return found | ({"q_up": ("q_b",)} if config.query_rank and kind.attends else {})


def most_bytes(config: ModelConfig, limits: LoraLimits) -> int:
    """Memory that adapters take where all places hold one that changes everything at the highest rank, in float32."""
    places: list[tuple[int, ...]] = []
    for layer in range(config.num_layers):
        shapes = role_shapes(config, layer)
        places += [shapes[role] for roles in changed_linears(config, layer).values() for role in roles]
    places += [(config.vocab_size, config.width)] * 2
    values = sum(limits.max_rank * (num_rows + num_cols) + num_rows for num_rows, num_cols in places)
    return 4 * values * limits.max_loras


def is_of_images(name: str) -> bool:
    """Whether a module of this name reads images, so that no text depends on it."""
    return _OF_IMAGES.fullmatch(name) is not None


def changes_of(adapter: Adapter, base: Base, limits: LoraLimits) -> Changes:
    """What the adapter does to the model. Raises BadCheckpoint, naming the first module that does not fit."""
    config = base.config
    ends = {HEAD: (config.vocab_size, config.width), EMBED: (config.width, config.vocab_size)}
    found: dict[tuple[int, str], list[LowRank | None]] = {}
    modules = [module for module in adapter.modules if not is_of_images(module.name)]
    if not modules:
        raise BadCheckpoint(f"{adapter.path} changes only how images are read, and this model is served for text.")
    for name, copied in adapter.copied.items():
        if _END.fullmatch(name) is None or copied != ends[HEAD]:
            raise BadCheckpoint(
                f"{adapter.path}: the adapter was made for a model whose {name} is of shape {copied}; this model's is"
                f" {ends[HEAD]}."
            )
    for module in modules:
        layer, role = _place(adapter, module, config)
        shape = ends[role] if layer == ENDS else role_shapes(config, layer)[role]
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
        linear: str = role
        stacked: tuple[str, ...] = (role,)
        if layer != ENDS:
            linears = changed_linears(config, layer)
            linear, stacked = next((name, roles) for name, roles in linears.items() if role in roles)
        changes = found.setdefault((layer, linear), [None] * len(stacked))
        if changes[stacked.index(role)] is not None:
            raise BadCheckpoint(f"{adapter.path}: {module.name} changes what another module does already.")
        changes[stacked.index(role)] = _change(module, layer, role, base)
    return {place: tuple(changes) for place, changes in found.items()}


def fill_slot(weights: ModelWeights, ops: Ops, slot: int, changes: Changes) -> int:
    """Put an adapter's changes into a slot of every table, or clear it where there are none; the bytes they take."""
    num_bytes = 0
    for index, layer in enumerate(weights.layers):
        for name in LINEARS:
            linear = getattr(layer, name)
            if linear is not None and linear.lora is not None:
                num_bytes += _fill(ops, linear.lora, slot, changes.get((index, name)))
    num_bytes += _fill(ops, weights.head_lora, slot, changes.get((ENDS, HEAD)))
    return num_bytes + _fill(ops, weights.embed_lora, slot, changes.get((ENDS, EMBED)))


def _fill(ops: Ops, table: Any, slot: int, changes: tuple[LowRank | None, ...] | None) -> int:
    return ops.set_lora(table, slot, changes or (None,) * len(table.widths))


def _place(adapter: Adapter, module: LoraModule, config: ModelConfig) -> tuple[int, str]:
    """(layer, role) of a module; (ENDS, role) for the head and the embedding."""
    end = _END.fullmatch(module.name)
    if end is not None and (_ENDS[end[1]] == EMBED) == module.of_tokens:
        return ENDS, _ENDS[end[1]]
    found = _IN_A_LAYER.fullmatch(module.name)
    names = {**_ROLES, **({} if config.family.gated else _UNGATED), **_BESIDE_MIXERS.get(config.family.mixer, {})}
    layer = min(int(found[1]) if found else 0, config.num_layers - 1)
    roles = {role for stacked in changed_linears(config, layer).values() for role in stacked}
    known = {name: role for name, role in names.items() if role in roles}
    if found is None or found[2] not in known or module.of_tokens:
        raise BadCheckpoint(
            f"{adapter.path}: module {module.name[:200]!r} cannot be adapted in {config.architecture}; these can:"
            f" {', '.join(known)}, {', '.join(_ENDS)}."
        )
    if int(found[1]) >= config.num_layers:
        raise BadCheckpoint(f"{adapter.path}: {module.name} is beyond this model's {config.num_layers} layers.")
    return int(found[1]), known[found[2]]


def _change(module: LoraModule, layer: int, role: str, base: Base) -> LowRank:
    a, b = _raw(module.a), _raw(module.b)
    magnitude = None if module.magnitude is None else _column(_values(module.magnitude))
    b = base.in_order(role, b)
    magnitude = None if magnitude is None else base.in_order(role, magnitude)
    factors = None
    if magnitude is not None:
        weight, scaled_Nr = base.matrix(layer, role), values_of(b) * np.float32(module.scale)
        a_rK = values_of(a) if weight.order is None else values_of(a)[:, weight.order]
        squares_N = _squares(weight, scaled_Nr, a_rK, module.of_tokens)
        factors = np.zeros(len(squares_N))
        np.divide(values_of(magnitude)[:, 0], np.sqrt(squares_N), out=factors, where=squares_N > 0)
        factors = factors.astype(np.float32)
    if module.of_tokens:
        turned = np.ascontiguousarray(values_of(a).T)
        a = RawTensor("f32", len(turned), module.rank, turned.reshape(-1).view(np.uint8))
    return LowRank(a, b, module.scale, factors)


def _squares(weight: RawTensor, b_Nr: np.ndarray, a_rK: np.ndarray, of_tokens: bool) -> np.ndarray:
    """float64 [N]: the squared lengths of the rows of W + b @ a, some rows of the stored matrix at a time. That of the
    embedding is stored [K, N]."""
    squares_N, stored = np.zeros(len(b_Nr)), weight.data.reshape(-1)
    for first in range(0, weight.num_rows, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, weight.num_rows - first)
        rows, size = slice(first, first + count), weight.row_bytes
        part = values_of(replace(weight, num_rows=count, data=stored[first * size : (first + count) * size]))
        if of_tokens:
            squares_N += np.square(part + a_rK[:, rows].T @ b_Nr.T, dtype=np.float64).sum(axis=0)
        else:
            squares_N[rows] = np.square(part + b_Nr[rows] @ a_rK, dtype=np.float64).sum(axis=1)
    return squares_N


def _column(values: np.ndarray) -> RawTensor:
    return RawTensor("f32", len(values), 1, values.view(np.uint8))


def _values(tensor: Tensor) -> np.ndarray:
    """float32, in the tensor's shape."""
    return dequantise(tensor.kind, tensor.data, tensor.num_values).reshape(tensor.shape)


def _raw(tensor: Tensor) -> RawTensor:
    """The matrix in a kind that meets float32 inputs as they are: bf16 would have them rounded, so it is widened."""
    num_rows, num_cols = tensor.shape
    if tensor.kind != "bf16":
        return RawTensor(tensor.kind, num_rows, num_cols, np.frombuffer(tensor.data, np.uint8))
    return RawTensor("f32", num_rows, num_cols, dequantise("bf16", tensor.data, tensor.num_values).view(np.uint8))
