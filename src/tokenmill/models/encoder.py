"""The encoder's forward pass: BERT and its kin, in the plain functions of the kernel interface.

A sequence runs whole in one step and nothing of it is kept: the K and V of one layer at a time lie in a pool that the
next layer writes again. Every token sees all of its own sequence, or what lies within a window to both sides. Learned
positions and the types of a pair's two texts are one table, looked up by the batch's places; or positions turn q and k.
Norms follow the residual additions, or come before attention and FFN. A classifier's head is a pass of its own, on what
was pooled.

Weights: names become roles, shapes are checked, neighbours are stacked.

    T tokens  L rows that are wanted  D model width  W fused qkv width  F FFN width  S pooled sequences  N outputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import Tensor
from ..ops.api import Array, Ops, RawTensor, Weight
from ..ops.forward import ForwardOps
from .encoder_config import EncoderConfig
from .weights import Linear, Norm, Progress, as_run, listed, quantization_of_ends

_NORMS = ("embed_norm", "attn_norm", "ffn_norm", "final_norm", "head_norm")
_WHOLE = {"qkv": (), "output": (), "up": ("gate_up", "up_gate"), "down": ()}
"""Roles of what is stored as one where its parts are not, by another order."""
_STACKED = {"qkv": ("q", "k", "v"), "up": ("gate", "up")}
_UNUSED = (
    "pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids", "head.", "decoder.", "generator_",
)  # fmt: skip
"""Beginnings of tensors that hidden states do without: poolers, heads of language models, and a buffer."""


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """up: gate and up, one upon the other, where there is a gate."""

    qkv: Linear
    output: Linear
    attn_norm: Norm | None
    up: Linear
    down: Linear
    ffn_norm: Norm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """places: the vectors of a position and a type, added: row type * num_places + position; None where there are
    neither. final_norm: of the last states. head: two linears, with a norm before the second or None, or no head."""

    embed: Weight
    places: Weight | None
    embed_norm: Norm
    layers: tuple[EncoderLayer, ...]
    final_norm: Norm | None
    head: tuple[Linear, Norm | None, Linear] | None
    num_bytes: int


def load_encoder_weights(
    checkpoint: Checkpoint,
    config: EncoderConfig,
    ops: Ops,
    *,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> EncoderWeights:
    """Pack every tensor, holding one matrix at a time beside what is packed. `quantization`: as for decoders; the
    position table and the head stay as they are. Raises BadCheckpoint naming what is missing, unexpected or
    misshaped."""
    check_tensors(checkpoint, config)
    return _Loader(checkpoint, config, ops, quantization, progress or (lambda done, total: None)).load()


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: EncoderConfig, ops: Ops, quantization: str | None, progress: Progress
    ) -> None:
        self._tensors = checkpoint.tensors
        self._config = config
        self._ops = ops
        self._quantization = quantization
        self._progress = progress
        self._bytes_in_all = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
        self._bytes_read = 0
        self._num_bytes = 0

    def load(self) -> EncoderWeights:
        config, names = self._config, role_names(self._config)
        layers = tuple(
            self._layer(layer, {role: name.format(layer) for role, name in names.items()})
            for layer in range(config.num_layers)
        )
        ends = quantization_of_ends(self._quantization)
        head = None
        if config.has_head:
            norm = self._norm("head_norm", names["head_norm"]) if "head_norm" in names else None
            head = self._linear(names, ("head",), None), norm, self._linear(names, ("score",), None)
        return EncoderWeights(
            embed=self._pack([self._matrix(names["embed"], ends)]),
            places=self._pack([self._places(names)]) if config.num_places else None,
            embed_norm=self._norm("embed_norm", names["embed_norm"]),
            layers=layers,
            final_norm=self._norm("final_norm", names["final_norm"]) if "final_norm" in names else None,
            head=head,
            num_bytes=self._num_bytes,
        )

    def _layer(self, layer: int, at: dict[str, str]) -> EncoderLayer:
        def linear(role: str) -> Linear:
            parts = tuple(part for part in _STACKED.get(role, (role,)) if part in at)
            return self._linear(at, parts or (next(n for n in (role, *_WHOLE[role]) if n in at),), self._quantization)

        return EncoderLayer(
            qkv=linear("qkv"),
            output=linear("output"),
            attn_norm=self._norm("attn_norm", at["attn_norm"]) if has_norm(self._config, layer) else None,
            up=linear("up"),
            down=linear("down"),
            ffn_norm=self._norm("ffn_norm", at["ffn_norm"]),
        )

    def _places(self, names: dict[str, str]) -> RawTensor:
        config = self._config
        table = np.zeros((1, config.width), np.float32)
        if "positions" in names:
            table = self._values(f"{names['positions']}.weight").reshape(-1, config.width)[config.first_position :]
        if "types" in names:
            types = self._values(f"{names['types']}.weight").reshape(-1, 1, config.width)
            table = (types + table).reshape(-1, config.width)
        return RawTensor("f32", len(table), config.width, np.ascontiguousarray(table).view(np.uint8).reshape(-1))

    def _linear(self, at: dict[str, str], roles: tuple[str, ...], quantization: str | None) -> Linear:
        parts = [part for role in roles for part in self._parts(role, at[role], quantization)]
        weight = self._pack(parts)
        if not self._config.biases.union({"score"}).intersection(roles):
            return Linear(weight, None)
        return Linear(weight, self._keep(np.concatenate([self._values(f"{at[role]}.bias") for role in roles])))

    def _parts(self, role: str, name: str, quantization: str | None) -> list[RawTensor]:
        """The matrix, of which the gate comes first."""
        whole = self._matrix(name, quantization)
        if role != "up_gate":
            return [whole]
        up, gate = whole.data.reshape(2, -1)
        return [replace(whole, num_rows=whole.num_rows // 2, data=half) for half in (gate, up)]

    def _norm(self, role: str, name: str) -> Norm:
        has_bias = role in self._config.biases
        bias = self._values(f"{name}.bias") if has_bias else np.zeros(self._config.width, np.float32)
        return Norm(self._keep(self._values(f"{name}.weight")), self._keep(bias))

    def _matrix(self, name: str, quantization: str | None) -> RawTensor:
        tensor = self._tensors[f"{name}.weight"]
        raw = as_run(tensor, self._ops, quantization)
        self._bytes_read += tensor.data.nbytes
        self._progress(self._bytes_read, self._bytes_in_all)
        return raw

    def _pack(self, parts: list[RawTensor]) -> Weight:
        weight = self._ops.pack(parts)
        self._num_bytes += weight.num_bytes
        return weight

    def _keep(self, values: np.ndarray) -> Array:
        self._num_bytes += values.nbytes
        return self._ops.vector(values)

    def _values(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        return dequantise(tensor.kind, tensor.data, tensor.num_values)


def role_names(config: EncoderConfig) -> dict[str, str]:
    """Role -> name of its tensors in this file, less '.weight' and '.bias'; those of layers have a place for the
    layer's number. Of a classifier also "head" and "score", its two linears, and "head_norm" where there is one."""
    family = config.family
    names = {role: config.prefix + name for role, name in family.names.items()}
    if config.has_head:
        dense, out = (name.format(config.prefix) for name in family.head)
        names |= {"head": dense, "score": out} | ({"head_norm": family.head_norm} if family.head_norm else {})
    return names


def has_norm(config: EncoderConfig, layer: int) -> bool:
    """Whether a layer's attention has a norm: the first one follows that of the embeddings where norms come before."""
    return layer > 0 or not config.family.pre_norm


def expected_shapes(config: EncoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(role, tensor name, shape) of every tensor that the model has."""
    c = config
    square = (c.width, c.width)
    matrices = {
        "embed": (c.vocab_size, c.width),
        "positions": (c.first_position + c.num_places, c.width),
        "types": (c.num_types, c.width),
        **dict.fromkeys(("q", "k", "v", "output", "head"), square),
        "qkv": (3 * c.width, c.width),
        **dict.fromkeys(("gate", "up"), (c.ffn_width, c.width)),
        **dict.fromkeys(("gate_up", "up_gate"), (2 * c.ffn_width, c.width)),
        "down": (c.width, c.ffn_width),
        "score": (c.output_width, c.width),
    }
    for role, pattern in role_names(config).items():
        for layer in range(c.num_layers if "{}" in pattern else 1):
            if role == "attn_norm" and not has_norm(c, layer):
                continue
            name, shape = pattern.format(layer), (c.width,) if role in _NORMS else matrices[role]
            yield role, f"{name}.weight", shape
            if role in c.biases or role == "score":
                yield role, f"{name}.bias", shape[:1]


def check_tensors(checkpoint: Checkpoint, config: EncoderConfig) -> None:
    expected = {name: shape for _, name, shape in expected_shapes(config)}
    tensors = checkpoint.tensors
    found = [
        ("is missing", [name for name in expected if name not in tensors]),
        ("has unexpected", [name for name in tensors if name not in expected and not _is_unused(name, config)]),
        ("has misshaped", [_shapes(tensors[n], s) for n, s in expected.items() if _is_misshaped(tensors.get(n), s)]),
    ]
    problems = [f"{verb} {listed(names)}" for verb, names in found if names]
    if problems:
        raise BadCheckpoint(f"{checkpoint.path} ({config.architecture}) {'; '.join(problems)}.")


def _is_unused(name: str, config: EncoderConfig) -> bool:
    return name.removeprefix(config.prefix).startswith(_UNUSED)


def _is_misshaped(tensor: Tensor | QuantisedTensor | None, shape: tuple[int, ...]) -> bool:
    return tensor is not None and tuple(tensor.shape) != shape


def _shapes(tensor: Tensor | QuantisedTensor, expected: tuple[int, ...]) -> str:
    return f"{tensor.name} {tuple(tensor.shape)} instead of {expected}"


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
