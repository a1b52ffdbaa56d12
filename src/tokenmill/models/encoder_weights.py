"""From an encoder checkpoint's tensors to packed weights: names to roles, shapes checked, neighbours stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import Tensor
from ..ops.api import BLOCK_BYTES, GROUP, Array, Ops, RawTensor, Weight
from .encoder_config import EncoderConfig
from .repack import DENSE_KINDS, raw_matrix
from .weights import Linear, Norm, Progress, listed

_NORMS = ("embed_norm", "attn_norm", "ffn_norm")
_LINEARS = ("q", "k", "v", "output", "up", "down")
_UNUSED = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids")
"""Beginnings of tensors that hidden states do without: poolers, heads of language models, and a buffer."""


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Linear
    output: Linear
    attn_norm: Norm
    up: Linear
    down: Linear
    ffn_norm: Norm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """places: the vectors of a position and a type, added: row type * num_places + position. head: two linears with
    tanh between them, or None."""

    embed: Weight
    places: Weight
    embed_norm: Norm
    layers: tuple[EncoderLayer, ...]
    head: tuple[Linear, Linear] | None
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
    _check_tensors(checkpoint, config)
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
            self._layer({role: name.format(layer) for role, name in names.items()})
            for layer in range(config.num_layers)
        )
        ends = "q8_0" if self._quantization in ("q4_0", "q4_1") else self._quantization
        head = None
        if config.has_head:
            dense, out = (self._linear((name,), None) for name in config.family.head)
            head = dense, out
        return EncoderWeights(
            embed=self._pack([self._matrix(names["embed"], ends)]),
            places=self._pack([self._places(names)]),
            embed_norm=self._norm(names["embed_norm"]),
            layers=layers,
            head=head,
            num_bytes=self._num_bytes,
        )

    def _layer(self, at: dict[str, str]) -> EncoderLayer:
        return EncoderLayer(
            qkv=self._linear((at["q"], at["k"], at["v"]), self._quantization),
            output=self._linear((at["output"],), self._quantization),
            attn_norm=self._norm(at["attn_norm"]),
            up=self._linear((at["up"],), self._quantization),
            down=self._linear((at["down"],), self._quantization),
            ffn_norm=self._norm(at["ffn_norm"]),
        )

    def _places(self, names: dict[str, str]) -> RawTensor:
        config = self._config
        positions = self._values(f"{names['positions']}.weight").reshape(-1, config.width)
        table = positions[config.first_position :]
        if "types" in names:
            types = self._values(f"{names['types']}.weight").reshape(-1, 1, config.width)
            table = (types + table).reshape(-1, config.width)
        return RawTensor("f32", len(table), config.width, np.ascontiguousarray(table).view(np.uint8).reshape(-1))

    def _linear(self, names: tuple[str, ...], quantization: str | None) -> Linear:
        weight = self._pack([self._matrix(name, quantization) for name in names])
        return Linear(weight, self._keep(np.concatenate([self._values(f"{name}.bias") for name in names])))

    def _norm(self, name: str) -> Norm:
        return Norm(self._keep(self._values(f"{name}.weight")), self._keep(self._values(f"{name}.bias")))

    def _matrix(self, name: str, quantization: str | None) -> RawTensor:
        tensor = self._tensors[f"{name}.weight"]
        raw = raw_matrix(tensor, self._ops)
        fits = raw.num_cols % GROUP == 0 or quantization not in BLOCK_BYTES
        if quantization is not None and raw.kind in DENSE_KINDS and raw.kind != quantization and fits:
            raw = self._ops.quantise(raw, quantization)
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
    layer's number."""
    return {role: config.prefix + name for role, name in config.family.names.items()}


def expected_shapes(config: EncoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(role, tensor name, shape) of every tensor that the model has."""
    c, names = config, role_names(config)
    square = (c.width, c.width)
    matrices = {
        "embed": (c.vocab_size, c.width),
        "positions": (c.first_position + c.num_places, c.width),
        "types": (c.num_types, c.width),
        **dict.fromkeys(("q", "k", "v", "output"), square),
        "up": (c.ffn_width, c.width),
        "down": (c.width, c.ffn_width),
    }
    for role, pattern in names.items():
        for layer in range(c.num_layers if "{}" in pattern else 1):
            name = pattern.format(layer)
            if role not in _NORMS:
                yield role, f"{name}.weight", matrices[role]
            if role in _LINEARS:
                yield role, f"{name}.bias", matrices[role][:1]
            if role in _NORMS:
                yield role, f"{name}.weight", (c.width,)
                yield role, f"{name}.bias", (c.width,)
    if c.has_head:
        for name, num_rows in zip(c.family.head, (c.width, c.output_width), strict=True):
            yield "head", f"{name}.weight", (num_rows, c.width)
            yield "head", f"{name}.bias", (num_rows,)


def _check_tensors(checkpoint: Checkpoint, config: EncoderConfig) -> None:
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
