"""What a checkpoint holds and what it will take, found without reading a weight."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..core.block import KVGroup
from ..core.experts import touched
from ..formats.checkpoint import Checkpoint
from ..formats.quantised import QuantisedTensor, stored_bytes
from ..formats.tensor import Tensor
from ..ops.api import BLOCK_BYTES, GROUP, block_of
from .config import ModelConfig, config_from_checkpoint
from .encoder import check_tensors as check_encoder_tensors
from .encoder import expected_shapes as encoder_shapes
from .encoder_config import EncoderConfig, is_encoder
from .kv_groups import kv_groups
from .moe import MoeConfig
from .repack import DENSE_KINDS, packed_kind
from .roles import EXPERT_ROLES, expected_shapes, expert_names, layer_names
from .tensor_names import WHOLE_NAMES, global_names
from .vectors import body_of, is_bare_decoder, vector_config
from .weights import check_tensors

_DENSE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_AS_STORED = "places and head"
_EMBEDDINGS, _LAYER_EMBEDDINGS, _EXPERTS = "embeddings", "embeddings by layer", "experts"
_LAYER_INPUTS = "inputs by layer"
_PARTS = {
    "attention": ("q", "k", "v", "qkv", "attn_gate", "q_a", "q_b", "kv_a", "output"),
    "mixers": ("mixer_in", "mixer_qkv", "mixer_z", "mixer_qkvz", "mixer_b", "mixer_a", "mixer_ba", "mixer_out"),
    "latent space": ("kv_b", "k_b", "v_b"),
    "FFN": ("gate", "up", "gate_up", "up_gate", "down"),
    "shared experts": ("shared_gate", "shared_up", "shared_gate_up", "shared_down"),
    "router": ("router", "shared_mix"),
    _LAYER_INPUTS: ("input_gate", "input_up"),
    _EXPERTS: EXPERT_ROLES,
}


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one part of the model stored as one kind. `packed`: the kernels' kind, with `packed_bytes`."""

    part: str
    stored: str
    packed: str
    num_tensors: int
    num_values: int
    stored_bytes: int
    packed_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """num_parameters counts every tensor that the model has, tied embeddings once. kv_groups: for the model's whole
    context; none where it keeps no KV."""

    config: ModelConfig | EncoderConfig
    groups: tuple[TensorGroup, ...]
    kv_groups: tuple[KVGroup, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a token that every layer sees."""
        return sum(group.bytes_per_token for group in self.kv_groups)

    def kv_bytes(self, num_tokens: int) -> int:
        """KV that a sequence of `num_tokens` holds: of layers with a window, as much as they see."""
        return sum(g.bytes_per_token * min(num_tokens, g.window or num_tokens) for g in self.kv_groups)

    @property
    def state_bytes(self) -> int:
        """What layers that keep a state keep of a sequence, however long."""
        return sum(group.bytes_per_block for group in self.kv_groups if group.state_values)

    @property
    def num_parameters(self) -> int:
        return sum(group.num_values for group in self.groups)

    @property
    def num_active_parameters(self) -> int:
        """Those that a token goes through: of routed experts as many as it chooses."""
        moe = self._moe
        chosen = 1.0 if moe is None else moe.routing.top_k / moe.routing.num_experts
        return sum(round(g.num_values * chosen) if g.part == _EXPERTS else g.num_values for g in self.groups)

    @property
    def packed_bytes(self) -> int:
        return sum(group.packed_bytes for group in self.groups)

    def bytes_read(self, num_rows: int = 1) -> int:
        """Of packed weights, by a step of so many rows whose logits are all wanted: all of them once, but of routed
        experts those that are chosen, if rows choose evenly and by themselves, and of embeddings that are not the head
        as well a row for each."""
        return round(sum(group.packed_bytes * self._share_read(group.part, num_rows) for group in self.groups))

    def _share_read(self, part: str, num_rows: int) -> float:
        moe = self._moe
        if part == _EXPERTS and moe is not None:
            return touched(moe.routing.num_experts, moe.routing.top_k, num_rows) / moe.routing.num_experts
        if part == _LAYER_EMBEDDINGS and isinstance(self.config, ModelConfig):
            return min(1.0, num_rows / self.config.input_vocab)
        if part == _EMBEDDINGS and not (isinstance(self.config, ModelConfig) and self.config.tied_embeddings):
            return min(1.0, num_rows / self.config.vocab_size)
        return 1.0

    @property
    def _moe(self) -> MoeConfig | None:
        return self.config.moe if isinstance(self.config, ModelConfig) else None


def shape_of(checkpoint: Checkpoint) -> ModelConfig | EncoderConfig:
    """The shape of the model, of whatever kind. Raises BadCheckpoint for one that cannot be read, naming its
    architecture or the key at fault."""
    if is_encoder(checkpoint) or is_bare_decoder(checkpoint):
        return vector_config(checkpoint)
    return config_from_checkpoint(checkpoint)


def model_summary(
    checkpoint: Checkpoint,
    *,
    quantization: str | None = None,
    kv_dtype: str = "f16",
    replaced: Mapping[str, str] = MappingProxyType({}),
) -> ModelSummary:
    """replaced: kinds in place of which these kernels take others. Raises BadCheckpoint for an architecture that cannot
    be read."""
    config = shape_of(checkpoint)
    if isinstance(config, EncoderConfig):
        return ModelSummary(config, _groups(checkpoint, _encoder_parts(config), quantization, replaced), ())
    if is_bare_decoder(checkpoint):
        checkpoint = body_of(checkpoint)
    parts = _parts(checkpoint.kind, config)
    groups = _groups(checkpoint, parts, quantization, replaced, _turned(checkpoint.kind, config))
    return ModelSummary(config, groups, kv_groups(config, dtype=kv_dtype) if config.is_causal else ())


def check(checkpoint: Checkpoint) -> None:
    """Raises BadCheckpoint, naming them, for tensors that are missing, misshaped or unexpected."""
    config = shape_of(checkpoint)
    if isinstance(config, EncoderConfig):
        check_encoder_tensors(checkpoint, config)
    else:
        check_tensors(body_of(checkpoint) if is_bare_decoder(checkpoint) else checkpoint, config)


def imagine(checkpoint: Checkpoint) -> Checkpoint:
    """The same with the tensors that its settings ask for, stored as they say (`dtype`) and without values: for sizes.
    Quantised ones count as they were before. Raises BadCheckpoint."""
    config = shape_of(checkpoint)
    if isinstance(config, EncoderConfig):
        shapes = {name: shape for _, name, shape in encoder_shapes(config)}
    else:
        shapes = expected_shapes(checkpoint.kind, config)
    said = str(checkpoint.metadata.get("dtype") or checkpoint.metadata.get("torch_dtype"))
    kind = _DTYPES.get(said.removeprefix("torch."), "bf16")
    sizes = {name: math.prod(shape) * _DENSE_BYTES[kind] for name, shape in shapes.items()}
    with tempfile.TemporaryFile() as hole:  # of any size, for it is never read
        hole.truncate(max(sizes.values()))
        view = memoryview(mmap.mmap(hole.fileno(), 0, access=mmap.ACCESS_READ))
    tensors = {name: Tensor(name, kind, shape, view[: sizes[name]]) for name, shape in shapes.items()}
    return replace(checkpoint, tensors=dict(tensors))


def _groups(
    checkpoint: Checkpoint,
    parts: Iterable[tuple[str, str]],
    quantization: str | None,
    replaced: Mapping[str, str],
    turned: Mapping[str, float] = MappingProxyType({}),
) -> tuple[TensorGroup, ...]:
    """The tensors of the checkpoint by part and kind. `parts`: (part, tensor name). turned: of tensors that hold keys
    and values of latents, the share of keys, which are turned round."""
    found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for part, name in parts:
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            continue
        kind = _kind_in_memory(part, tensor, quantization)
        packed = replaced.get(kind, kind)
        num_bytes = _bytes_in_memory(packed, tensor.num_values)
        if name in turned and packed not in DENSE_KINDS:  # see stacks.latent_matrices
            keys = round(tensor.num_values * turned[name])
            num_bytes = _bytes_in_memory("f16", keys) + _bytes_in_memory(packed, tensor.num_values - keys)
            packed = f"f16 and {packed}"
        sums = found[part, tensor.kind, packed]
        for place, count in enumerate((1, tensor.num_values, stored_bytes(tensor), num_bytes)):
            sums[place] += count
    return tuple(TensorGroup(*key, *sums) for key, sums in found.items())


def _parts(kind: str, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """(part, tensor name) of everything the model has."""
    names = global_names(kind, config.family.names)
    part_of = {f"{names['embed']}.weight": _EMBEDDINGS, f"{names['head']}.weight": "head"}
    part_of[f"{names['layer_embed']}.weight"] = _LAYER_EMBEDDINGS
    part_of[f"{names['layer_inputs']}.weight"] = _LAYER_INPUTS
    for layer in range(config.num_layers):
        for role, name in layer_names(kind, config, layer).items():
            part = next((part for part, roles in _PARTS.items() if role in roles), None)
            if part is not None and role not in WHOLE_NAMES:
                part_of |= {f"{one}.weight": part for one in expert_names(config, role, name)}
    for name in expected_shapes(kind, config):
        yield part_of.get(name, "norms and biases"), name


def _turned(kind: str, config: ModelConfig) -> dict[str, float]:
    """See _groups."""
    latent = config.latent
    if latent is None or config.is_absorbed:
        return {}
    share = latent.nope_dim / (latent.nope_dim + latent.value_dim)
    return {f"{layer_names(kind, config, layer)['kv_b']}.weight": share for layer in range(config.num_layers)}


def _encoder_parts(config: EncoderConfig) -> Iterator[tuple[str, str]]:
    """As _parts. Positions, types and the head are never quantised."""
    part_of = {"embed": _EMBEDDINGS, "positions": _AS_STORED, "types": _AS_STORED}
    part_of |= {"head": _AS_STORED, "score": _AS_STORED}
    part_of |= {role: part for part, roles in _PARTS.items() for role in roles}
    for role, name, shape in encoder_shapes(config):
        yield part_of.get(role, "norms and biases") if len(shape) > 1 else "norms and biases", name


def _kind_in_memory(part: str, tensor: Tensor | QuantisedTensor, quantization: str | None) -> str:
    if part == "norms and biases":
        return "f32"
    packed = packed_kind(tensor)
    if quantization is None or packed not in DENSE_KINDS or part in (_AS_STORED, "router"):
        return packed
    if quantization in ("q4_0", "q4_1") and part in (_EMBEDDINGS, _LAYER_EMBEDDINGS, "head"):
        quantization = "q8_0"
    return quantization if tensor.shape[-1] % GROUP == 0 or quantization not in BLOCK_BYTES else packed


def _bytes_in_memory(kind: str, num_values: int) -> int:
    if kind in _DENSE_BYTES:
        return num_values * _DENSE_BYTES[kind]
    blocks = [block_of(part) for part in kind.split(" or ")]
    return max(num_values // block_values * block_bytes for block_values, block_bytes in blocks)
