"""From a checkpoint's tensors to packed weights: names to roles, shapes checked, neighbours stacked.

q, k, v become one matrix and gate, up another, so that a layer has four linears. Rows of q and k that are ordered for
interleaved RoPE pairs are put back in half-split order by moving raw rows: no value changes. How stored kinds become
those of the kernels is told in repack.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.quantised import QuantisedTensor
from ..formats.release import release
from ..formats.tensor import Tensor
from ..ops.api import BLOCK_BYTES, GROUP, Array, Ops, RawTensor, Weight, same_order
from .config import ModelConfig
from .families import GLOBAL_NAMES, LAYER_NAMES
from .repack import DENSE_KINDS, in_input_order, raw_matrix

_NAMED_IN_ERRORS = 6

_READ_WITH_THE_CONFIG = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.k_scale", "attn.v_scale")
"""Buffers of old exporters that follow from the config, and scales of an 8-bit KV cache."""
_NORMS = {"attn_norm", "ffn_norm", "attn_post_norm", "ffn_post_norm"}
_STACKED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclass(frozen=True, slots=True)
class Norm:
    """bias: of a layer norm; None for an RMS norm."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Linear:
    """lora: the table of adapters' changes (Ops.lora_table), where the model takes adapters."""

    weight: Weight
    bias: Array | None
    lora: Any = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a family lacks is None. gate_up: the up matrix alone where nothing is gated."""

    attn_norm: Norm | None
    qkv: Linear
    q_norm: Array | None
    k_norm: Array | None
    output: Linear
    attn_post_norm: Norm | None
    ffn_norm: Norm | None
    gate_up: Linear
    down: Linear
    ffn_post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`head` is `embed` itself where the embeddings are tied. head_lora, embed_lora: see Linear."""

    embed: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Weight
    num_bytes: int
    head_lora: Any = None
    embed_lora: Any = None


Progress = Callable[[int, int], None]
"""Called now and then with (bytes so far, bytes in all)."""


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    ops: Ops,
    *,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> ModelWeights:
    """Pack every tensor of `checkpoint`, reading each byte once and holding one matrix at a time beside what is packed.

    quantization: one of ops.api.QUANTISATIONS for matrices that are stored dense and whose rows divide into groups;
    with 4 bits, embeddings and head get 8. Raises BadCheckpoint naming every missing, unexpected or misshaped tensor.
    """
    _check_tensors(checkpoint, config)
    return _Loader(checkpoint, config, ops, quantization, progress or (lambda done, total: None)).load()


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, quantization: str | None, progress: Progress
    ) -> None:
        self._tensors = checkpoint.tensors
        self._quantization = quantization
        self._progress = progress
        self._bytes_read = 0
        self._bytes_in_all = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
        self._names = layer_names(checkpoint.kind, config)
        self._global_names = GLOBAL_NAMES[checkpoint.kind]
        self._config = config
        self._ops = ops
        self._num_bytes = 0
        self._read: list[memoryview] = []  # matrices that are not packed yet

    def load(self) -> ModelWeights:
        config, names = self._config, self._global_names
        # The largest matrices come first, while little else is held.
        ends = quantization_of_ends(self._quantization)
        embed = self._pack(self._matrix(f"{names['embed']}.weight", ends))
        head = embed if config.tied_embeddings else self._pack(self._matrix(f"{names['head']}.weight", ends))
        layers = tuple(self._layer(layer) for layer in range(config.num_layers))
        return ModelWeights(embed, layers, self._norm(names["final_norm"]), head, self._num_bytes)

    def _layer(self, layer: int) -> LayerWeights:
        at = {role: pattern.format(layer) for role, pattern in self._names.items()}
        roles = self._config.family.layer_roles()

        def norm(role: str) -> Norm | None:
            return self._norm(at[role]) if role in roles else None

        def head_norm(role: str) -> Array | None:
            return self._vector(f"{at[role]}.weight", self._config.family.norm_offset) if role in roles else None

        return LayerWeights(
            attn_norm=norm("attn_norm"),
            qkv=self._linear(at, "qkv"),
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            output=self._linear(at, "output"),
            attn_post_norm=norm("attn_post_norm"),
            ffn_norm=norm("ffn_norm"),
            gate_up=self._linear(at, "gate_up"),
            down=self._linear(at, "down"),
            ffn_post_norm=norm("ffn_post_norm"),
        )

    def _linear(self, at: dict[str, str], role: str) -> Linear:
        """One matrix of a role, or of the roles stacked to make it, with their biases."""
        parts = stacked_roles(self._config, role)
        biased = self._config.biases.intersection(parts)
        quantization = self._quantization
        matrices = [self._rows(part, self._matrix(f"{at[part]}.weight", quantization)) for part in parts]
        if not same_order(matrices):
            matrices = [in_input_order(matrix) for matrix in matrices]
        weight = self._pack(*matrices)
        if not biased:
            return Linear(weight, None)
        columns = [self._bias(part, f"{at[part]}.bias", f"{at[part]}.weight") for part in parts]
        return Linear(weight, self._keep(np.concatenate(columns)))

    def _bias(self, role: str, name: str, weight_name: str) -> np.ndarray:
        if role not in self._config.biases:
            return np.zeros(self._tensors[weight_name].shape[0], np.float32)
        values = _values(self._tensors[name])
        rows = self._rows(role, RawTensor("f32", len(values), 1, values.view(np.uint8)))
        return rows.data.view(np.float32)

    def _rows(self, role: str, part: RawTensor) -> RawTensor:
        """The role's rows in half-split order."""
        config = self._config
        if not config.family.interleaved_heads or role not in ("q", "k"):
            return part
        return half_split(part, config.num_heads if role == "q" else config.num_kv_heads, config.rotary_dim)

    def _norm(self, name: str) -> Norm:
        weight = self._vector(f"{name}.weight", self._config.family.norm_offset)
        return Norm(weight, self._vector(f"{name}.bias") if self._config.family.norm == "layer" else None)

    def _vector(self, name: str, offset: float = 0.0) -> Array:
        values = _values(self._tensors[name])
        return self._keep(values + np.float32(offset) if offset else values)

    def _keep(self, values: np.ndarray) -> Array:
        self._num_bytes += values.nbytes
        return self._ops.vector(values)

    def _matrix(self, name: str, quantization: str | None) -> RawTensor:
        tensor = self._tensors[name]
        raw = as_run(tensor, self._ops, quantization)
        self._read.append(tensor.data)
        self._bytes_read += tensor.data.nbytes
        self._progress(self._bytes_read, self._bytes_in_all)
        return raw

    def _pack(self, *parts: RawTensor) -> Weight:
        weight = self._ops.pack(parts)
        while self._read:
            release(self._read.pop())
        self._num_bytes += weight.num_bytes
        return weight


def as_run(tensor: Tensor | QuantisedTensor, ops: Ops, quantization: str | None) -> RawTensor:
    """A stored matrix as the one that is computed with: `quantization` is for dense ones whose rows divide."""
    raw = raw_matrix(tensor, ops)
    fits = raw.num_cols % GROUP == 0 or quantization not in BLOCK_BYTES
    if quantization is not None and raw.kind in DENSE_KINDS and raw.kind != quantization and fits:
        raw = ops.quantise(raw, quantization)
    return raw


def quantization_of_ends(quantization: str | None) -> str | None:
    """What embeddings and head become where the other matrices become `quantization`."""
    return "q8_0" if quantization in ("q4_0", "q4_1") else quantization


def layer_names(kind: str, config: ModelConfig) -> dict[str, str]:
    """Role -> pattern of its tensors' names, less '.weight' and '.bias'."""
    names = LAYER_NAMES[kind] | dict(config.family.names)
    return {role: names[role] for role in config.family.layer_roles()}


def stacked_roles(config: ModelConfig, linear: str) -> tuple[str, ...]:
    """The roles whose matrices, one upon the other, make one of a layer's linears."""
    roles = config.family.layer_roles()
    return tuple(part for part in _STACKED.get(linear, ()) if part in roles) or (linear,)


def role_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Role -> shape of its weight in a layer."""
    c = config
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return {
        "q": (q_width, c.width),
        "k": (kv_width, c.width),
        "v": (kv_width, c.width),
        "qkv": (q_width + 2 * kv_width, c.width),
        "output": (c.width, q_width),
        "gate": (c.ffn_width, c.width),
        "up": (c.ffn_width, c.width),
        "gate_up": (2 * c.ffn_width, c.width),
        "down": (c.width, c.ffn_width),
        "q_norm": (q_width if c.family.qk_norm == "width" else c.head_dim,),
        "k_norm": (kv_width if c.family.qk_norm == "width" else c.head_dim,),
    } | {role: (c.width,) for role in _NORMS}


def expected_shapes(kind: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this kind and shape must have."""
    c, family, by_role = config, config.family, role_shapes(config)
    names = GLOBAL_NAMES[kind]
    shapes: dict[str, tuple[int, ...]] = {f"{names['embed']}.weight": (c.vocab_size, c.width)}
    if not c.tied_embeddings:
        shapes[f"{names['head']}.weight"] = (c.vocab_size, c.width)

    def expect(name: str, role: str, shape: tuple[int, ...]) -> None:
        shapes[f"{name}.weight"] = shape
        if role in c.biases or (role in _NORMS and family.norm == "layer"):
            shapes[f"{name}.bias"] = shape[:1]

    expect(names["final_norm"], "attn_norm", (c.width,))
    for layer in range(c.num_layers):
        for role, pattern in layer_names(kind, config).items():
            expect(pattern.format(layer), role, by_role[role])
    return shapes


def _check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    expected, tensors = expected_shapes(checkpoint.kind, config), checkpoint.tensors
    optional: dict[str, tuple[int, ...]] = {}
    if config.tied_embeddings:  # some exporters write the tied matrix twice
        optional[f"{GLOBAL_NAMES[checkpoint.kind]['head']}.weight"] = (config.vocab_size, config.width)
    missing = [name for name in expected if name not in tensors]
    ignored = expected.keys() | optional.keys() | _READ_WITH_THE_CONFIG
    extra = [name for name in tensors if name not in ignored and not _may_be_ignored(tensors[name])]
    misshaped = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in (expected | optional).items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = [("is missing", missing), ("has unexpected", extra), ("has misshaped", misshaped)]
    found = [f"{verb} {listed(names)}" for verb, names in problems if names]
    if found:
        raise BadCheckpoint(f"{checkpoint.path} ({config.architecture}) {'; '.join(found)}.")


def _may_be_ignored(tensor: Tensor | QuantisedTensor) -> bool:
    """Quantisers write biases of zeros where a family has none."""
    if tensor.name.endswith(".bias"):
        return not np.frombuffer(tensor.data, np.uint8).any()
    return tensor.name.endswith(_IGNORED_SUFFIXES)


def listed(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _values(tensor: Tensor | QuantisedTensor) -> np.ndarray:
    """float32, flat."""
    return dequantise(tensor.kind, tensor.data, tensor.num_values)


def half_split(part: RawTensor, num_heads: int, num_turned: int) -> RawTensor:
    """Within each head, row 2i + h of the R that turn goes to row h * R/2 + i: pair members move from neighbours to
    half of them apart."""
    rows = part.data.reshape(num_heads, -1, part.row_bytes)
    turned = rows[:, :num_turned].reshape(num_heads, -1, 2, part.row_bytes).swapaxes(1, 2)
    moved = np.concatenate([turned.reshape(num_heads, num_turned, -1), rows[:, num_turned:]], axis=1)
    return replace(part, data=moved.reshape(-1))
