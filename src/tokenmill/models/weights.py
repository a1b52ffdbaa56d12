"""From a checkpoint's tensors to packed weights: names to roles, shapes checked, neighbours stacked.

q, k, v become one matrix and gate, up another, so that a layer has four linears. Rows that a file has in another order
are moved raw (row_order.py): no value changes. How stored kinds become those of the kernels is told in repack.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.mapping import release
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import Tensor
from ..ops.api import BLOCK_BYTES, GROUP, Array, Experts, Ops, RawTensor, Weight, same_order
from .config import ModelConfig
from .family import ONE_NORM
from .mixer import GATED_DELTA, MAMBA, STEP_NORMS, MixerConfig, MixerWeights, conv_scales, keys_norm
from .moe import ONE_BY_ONE
from .repack import DENSE_KINDS, as_matrix, expert_matrices, in_input_order, latent_matrices, of_one_kind, raw_matrix
from .roles import expected_shapes, expert_names, layer_names, stacked_roles
from .row_order import inputs_in_order, rows_in_order
from .tensor_names import global_names

_NAMED_IN_ERRORS = 6
_INTEGERS = {"i64": np.int64, "i32": np.int32}

_READ_WITH_THE_CONFIG = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
_AS_STORED = ("router", "shared_mix")
"""Small matrices that decide too much to be rounded further at load."""
_OF_HEADS = ("dt_bias", "a_log", "skip")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias", ".k_scale", ".v_scale")
"""Buffers of old exporters that follow from the config (causal masks among them), and scales of an 8-bit KV cache."""


@dataclass(frozen=True, slots=True)
class Norm:
    """bias: of a layer norm, zeros where the family's have none; None for an RMS norm."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True, slots=True)
class Linear:
    """lora: the table of adapters' changes (Ops.lora_table), where the model takes adapters."""

    weight: Weight
    bias: Array | None
    lora: Any = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Of latent attention: the norm of a token's latent, and of each head the matrices into and out of its space."""

    norm: Array
    k_up: Any
    v_up: Any


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """A layer's router and routed experts. mix: the shared experts' gate, if there is one. router_norm: of its input.
    scales: of the experts. norm, post_norm, shared_post_norm: of what the routed experts are given and give, and the
    shared ones give. spread: makes a row's one number as many as the model is wide.
    What a family lacks is None."""

    router: Linear
    choice_bias: Array | None
    experts: Experts
    mix: Linear | None
    router_norm: Array | None = None
    scales: Array | None = None
    norm: Norm | None = None
    post_norm: Norm | None = None
    shared_post_norm: Norm | None = None
    spread: Weight | None = None


@dataclass(frozen=True, slots=True)
class InputWeights:
    """Of what layers are given of a token beside the residual stream, for all layers side by side: by the token, by
    its embedding, and the norm of the latter."""

    embed: Weight
    linear: Weight
    norm: Array


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Layer norms of queries and keys, which have weights for each head. centring: the heads' matrices that take the
    mean of a head away."""

    weight: Array
    centring: Any


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a family or a layer lacks is None.

    qkv      all that attention makes of the layer's input: queries (or the fewer channels that they go through; gated
             ones with their gates), then keys and values (or latents)
    gate_up  the up matrix alone where nothing is gated; in a layer that is a mixture of experts, gate_up and down are
             of its shared experts
    mixer_in what a mixer makes of the layer's input (MixerConfig.widths)
    q_up     queries of those fewer channels, which are normed by q_up_norm before
    v_norm   ones, for each channel of the values
    input_.. what the layer does with its input beside the residual stream
    scale    what it multiplies the residual stream by
    """

    attn_norm: Norm | None
    qkv: Linear | None
    q_norm: Array | None
    k_norm: Array | None
    output: Linear | None
    attn_post_norm: Norm | None
    ffn_norm: Norm | None
    gate_up: Linear | None
    down: Linear | None
    ffn_post_norm: Norm | None
    q_up: Linear | None = None
    q_up_norm: Array | None = None
    latent: LatentWeights | None = None
    sinks: Array | None = None
    moe: MoeWeights | None = None
    mixer_in: Linear | None = None
    mixer_out: Linear | None = None
    mixer: MixerWeights | None = None
    v_norm: Array | None = None
    input_gate: Linear | None = None
    input_up: Linear | None = None
    input_norm: Norm | None = None
    scale: float = 1.0
    head_norms: HeadNorms | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`head` is `embed` itself where the embeddings are tied. inputs: what layers are given beside the residual stream.
    head_bias, head_lora, embed_lora: see Linear."""

    embed: Weight
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Weight
    num_bytes: int
    inputs: InputWeights | None = None
    head_bias: Array | None = None
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
    check_tensors(checkpoint, config)
    return _Loader(checkpoint, config, ops, quantization, progress or (lambda done, total: None)).load()


def load_layer(
    checkpoint: Checkpoint, config: ModelConfig, ops: Ops, *, quantization: str | None = None
) -> tuple[LayerWeights, int]:
    """The first layer alone, of tensors that have been compared; and what it takes, in bytes."""
    loader = _Loader(checkpoint, config, ops, quantization, lambda done, total: None)
    return loader.layer(0), loader.num_bytes


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, ops: Ops, quantization: str | None, progress: Progress
    ) -> None:
        self._tensors = checkpoint.tensors
        self._quantization = quantization
        self._progress = progress
        self._bytes_read = 0
        self._bytes_in_all = sum(tensor.data.nbytes for tensor in checkpoint.tensors.values())
        self._kind = checkpoint.kind
        self._global_names = global_names(checkpoint.kind, config.family.names)
        self._config = config
        self._ops = ops
        self.num_bytes = 0
        self._centring: Any = None  # of all layers
        self._read: list[memoryview] = []  # matrices that are not packed yet

    def load(self) -> ModelWeights:
        config, names = self._config, self._global_names
        # The largest matrices come first, while little else is held.
        ends = quantization_of_ends(self._quantization)
        embed = self._pack(self._matrix(f"{names['embed']}.weight", ends))
        head = embed if config.tied_embeddings else self._pack(self._matrix(f"{names['head']}.weight", ends))
        inputs = self._inputs(ends) if config.input_width else None
        layers = tuple(self.layer(layer) for layer in range(config.num_layers))
        norm = self._norm(names["final_norm"])
        bias = self._vector(f"{names['head']}.bias") if "head" in config.biases else None
        return ModelWeights(embed, layers, norm, head, self.num_bytes, inputs, bias)

    def _inputs(self, ends: str | None) -> InputWeights:
        config, names = self._config, self._global_names
        embed = self._pack(self._matrix(f"{names['layer_embed']}.weight", ends))
        linear = self._pack(self._matrix(f"{names['layer_inputs']}.weight", self._quantization))
        norm = _values(self._tensors[f"{names['layer_inputs_norm']}.weight"]) + np.float32(config.family.norm_offset)
        return InputWeights(embed, linear, self._keep(np.tile(norm, config.num_layers)))

    def layer(self, layer: int) -> LayerWeights:
        at = layer_names(self._kind, self._config, layer)
        kind = self._config.layers[layer]
        is_moe, attends, keeps_state = kind.is_moe, kind.attends, kind.keeps_state

        def norm(role: str) -> Norm | None:
            return self._norm(at[role]) if role in at else None

        attn_norm, has_own = norm("attn_norm"), self._config.qk_norm == "own"
        own: dict[str, str] = {role: at.pop(role) for role in ("q_norm", "k_norm") if has_own and role in at}

        def vector(role: str) -> Array | None:
            return self._vector(f"{at[role]}.weight", self._config.family.norm_offset) if role in at else None

        def linear(name: str) -> Linear:
            return self._linear(at, stacked_roles(self._config, name, layer))

        heads = self._config.heads_of(layer)
        has_bare = self._config.family.bare_qk_norm and self._config.has_qk_norm and self._config.turns(layer)
        bare = self._keep(np.ones(heads.head_dim, np.float32)) if has_bare else None
        norms_values = self._config.family.v_norm and "k" in at
        has_ffn = "down" in at or "shared_down" in at
        return LayerWeights(
            attn_norm=attn_norm,
            qkv=linear("qkv") if attends else None,
            q_norm=bare if bare is not None else vector("q_norm"),
            k_norm=bare if bare is not None else vector("k_norm"),
            head_norms=self._head_norms(own) if own else None,
            output=linear("output") if attends else None,
            attn_post_norm=norm("attn_post_norm"),
            ffn_norm=attn_norm if self._config.residual == ONE_NORM else norm("ffn_norm"),
            gate_up=linear("shared_gate_up" if is_moe else "gate_up") if has_ffn else None,
            down=linear("shared_down" if is_moe else "down") if has_ffn else None,
            ffn_post_norm=norm("ffn_post_norm"),
            q_up=linear("q_b") if "q_b" in at else None,
            q_up_norm=vector("q_a_norm"),
            latent=self._latent(at) if self._config.latent is not None and attends else None,
            sinks=self._vector(at["sinks"]) if "sinks" in at else None,
            moe=self._moe(at, layer) if is_moe else None,
            mixer_in=linear("mixer_in") if keeps_state else None,
            mixer_out=linear("mixer_out") if keeps_state else None,
            mixer=self._mixer(at) if keeps_state else None,
            v_norm=self._keep(np.ones(heads.num_kv_heads * heads.head_dim, np.float32)) if norms_values else None,
            input_gate=linear("input_gate") if "input_gate" in at else None,
            input_up=linear("input_up") if "input_up" in at else None,
            input_norm=norm("input_norm"),
            scale=float(_values(self._tensors[at["layer_scale"]])[0]) if "layer_scale" in at else 1.0,
        )

    def _mixer(self, at: dict[str, str]) -> MixerWeights:
        mixer = self._config.mixer
        assert mixer is not None
        if mixer.kind == MAMBA:
            return self._mamba(at, mixer)
        state, is_delta, norm = mixer.state, mixer.kind == GATED_DELTA, None
        heads = {role: self._channels(role, at[role], state.num_heads) for role in _OF_HEADS if role in at}
        values = {role: found.reshape(-1) for role, found in heads.items()}
        if "a_log" in values and self._kind == "hf":  # of which a GGUF file has the rates themselves
            values["a_log"] = -np.exp(values["a_log"])
        if "mixer_norm" in at:
            weight = _values(self._tensors[f"{at['mixer_norm']}.weight"])
            norm = np.tile(weight, mixer.out_width // len(weight))
        kept = (
            values.get("a_log"),
            values.get("dt_bias"),
            values.get("skip"),
            keys_norm(state) if is_delta else None,
            norm,
        )
        rates, dt_bias, skip, keys, normed = (None if each is None else self._keep(each) for each in kept)
        return MixerWeights(*self._convolution(at, mixer), rates, dt_bias, skip, keys, normed)

    def _convolution(self, at: dict[str, str], mixer: MixerConfig) -> tuple[Array, Array | None]:
        """Its weights [taps, W] and bias."""
        width, scales_W = mixer.state.conv_width, conv_scales(mixer)
        conv_KW = self._channels("conv", f"{at['conv']}.weight", width).T
        bias = self._bias("conv", f"{at['conv']}.bias", width) if "conv" in self._config.biases else None
        weight = self._keep(np.ascontiguousarray(conv_KW if scales_W is None else conv_KW * scales_W))
        return weight, None if bias is None else self._keep(bias)

    def _mamba(self, at: dict[str, str], mixer: MixerConfig) -> MixerWeights:
        """Of a selective scan."""
        state = mixer.state
        rates_KX = -np.exp(_values(self._tensors[at["a_log"]]).reshape(state.values_width, state.key_dim).T)
        norms: tuple[Array, ...] = ()
        if mixer.step_norms == "weights":
            norms = tuple(self._vector(f"{at[role]}.weight") for role in STEP_NORMS)
        elif mixer.step_norms:
            norms = tuple(self._keep(np.ones(size, np.float32)) for size in (mixer.rank, state.key_dim, state.key_dim))
        return MixerWeights(
            *self._convolution(at, mixer),
            rates=self._keep(np.ascontiguousarray(rates_KX)),
            dt_bias=self._keep(_values(self._tensors[f"{at['mixer_dt']}.bias"])),
            skip=self._keep(_values(self._tensors[at["skip"]])),
            x=self._linear(at, ("mixer_x",)).weight,
            dt=self._linear(at, ("mixer_dt",)).weight,
            step_norms=norms,
        )

    def _latent(self, at: dict[str, str]) -> LatentWeights:
        k_up, v_up = latent_matrices(self._config, lambda role: self._tensor(f"{at[role]}.weight"), self._as_run)
        stacks = self._pack_stack([[part] for part in k_up]), self._pack_stack([[part] for part in v_up])
        return LatentWeights(self._vector(f"{at['kv_a_norm']}.weight"), *stacks)

    def _moe(self, at: dict[str, str], layer: int) -> MoeWeights:
        moe = self._config.moe
        assert moe is not None
        gate_up_roles = stacked_roles(self._config, "expert_gate_up", layer)
        gate_up, down = self._experts(at, gate_up_roles), self._experts(at, ("expert_down",))
        experts = Experts(
            gate_up, down, moe.activation, self._expert_bias(at, gate_up_roles), self._expert_bias(at, ("expert_down",))
        )
        bias = self._vector(at["choice_bias"]) if "choice_bias" in at else None
        mix = self._linear(at, ("shared_mix",)) if "shared_mix" in at else None
        weights = MoeWeights(self._linear(at, ("router",)), bias, experts, mix)
        if moe.scaled_inputs:
            ones = np.tile(np.array([0, 1], np.float32), self._config.width)  # of an expert's id and weight
            spread = self._pack(RawTensor("f32", self._config.width, 2, ones.view(np.uint8)))
            weights = replace(weights, spread=spread)
        if not moe.own_norms:
            return weights
        router_norm = _values(self._tensors[at["router_norm"]]) * np.float32(self._config.width**-0.5)
        return replace(
            weights,
            router_norm=self._keep(router_norm),
            scales=self._vector(at["expert_scales"]),
            norm=self._norm(at["experts_norm"]),
            post_norm=self._norm(at["experts_post_norm"]),
            shared_post_norm=self._norm(at["shared_post_norm"]),
        )

    def _experts(self, at: dict[str, str], roles: tuple[str, ...]) -> Any:
        """The stack of every expert's matrices of these roles, one upon the other."""
        moe = self._config.moe
        assert moe is not None
        tensors = [expert_matrices(self._tensors, at[role], moe.routing.num_experts) for role in roles]
        for each in tensors:
            self._note(*each)

        def make() -> Sequence[Sequence[RawTensor]]:
            whole = ([self._as_run(tensor) for tensor in parts] for parts in zip(*tensors, strict=True))
            return of_one_kind([[*map(self._rows, roles, parts)] for parts in whole])

        return self._packed(self._ops.pack_experts(make))

    def _expert_bias(self, at: dict[str, str], roles: tuple[str, ...]) -> Array | None:
        """[E, outputs]"""
        if not self._config.biases.intersection(roles):
            return None
        columns = []
        for role in roles:
            names = expert_names(self._config, role, at[role])
            rows = [self._bias(role, f"{name}.bias", self._num_rows(name)) for name in names]
            assert self._config.moe is not None
            columns.append(np.concatenate(rows).reshape(self._config.moe.routing.num_experts, -1))
        return self._keep(np.concatenate(columns, axis=1))

    def _linear(self, at: dict[str, str], parts: tuple[str, ...]) -> Linear:
        """The matrices of these roles, one upon the other, with their biases."""
        biased = self._config.biases.intersection(parts)
        quantization = None if parts[0] in _AS_STORED else self._quantization

        def make() -> Sequence[RawTensor]:
            matrices = [self._rows(part, self._matrix(f"{at[part]}.weight", quantization)) for part in parts]
            matrices = [inputs_in_order(self._config, *pair) for pair in zip(parts, matrices, strict=True)]
            return matrices if same_order(matrices) else [in_input_order(matrix) for matrix in matrices]

        weight = self._packed(self._ops.pack_layer(make))
        if not biased:
            return Linear(weight, None)
        columns = [self._bias(part, f"{at[part]}.bias", self._num_rows(at[part])) for part in parts]
        return Linear(weight, self._keep(np.concatenate(columns)))

    def _num_rows(self, name: str) -> int:
        return math.prod(self._tensors[f"{name}.weight"].shape[:-1])

    def _head_norms(self, at: dict[str, str]) -> HeadNorms:
        config, parts = self._config, []
        for role, rows in (("q_norm", "q"), ("k_norm", "k")):
            names = expert_names(config, role, at[role])
            values = np.concatenate([_values(self._tensors[f"{name}.weight"]) for name in names])
            parts.append(
                self._rows(rows, RawTensor("f32", len(values), 1, values.view(np.uint8))).data.view(np.float32)
            )
        if self._centring is None:
            matrix = np.eye(config.head_dim, dtype=np.float32) - np.float32(1 / config.head_dim)
            raw = RawTensor("f32", len(matrix), len(matrix), matrix.reshape(-1).view(np.uint8))
            self._centring = self._pack_stack([[raw]] * (config.num_heads + config.num_kv_heads))
        return HeadNorms(self._keep(np.concatenate(parts)), self._centring)

    def _bias(self, role: str, name: str, num_rows: int) -> np.ndarray:
        if role not in self._config.biases:
            return np.zeros(num_rows, np.float32)
        return self._channels(role, name, self._tensors[name].num_values).reshape(-1)

    def _channels(self, role: str, name: str, num_rows: int) -> np.ndarray:
        """float32 [num_rows, values of each] in the order in which they are computed with."""
        values = _values(self._tensors[name]).reshape(num_rows, -1)
        rows = self._rows(role, RawTensor("f32", num_rows, values.shape[1], values.reshape(-1).view(np.uint8)))
        return rows.data.view(np.float32).reshape(values.shape)

    def _rows(self, role: str, part: RawTensor) -> RawTensor:
        return rows_in_order(self._config, role, part)

    def _norm(self, name: str) -> Norm:
        family, width = self._config.family, self._config.width
        has = family.norm_tensors
        weight = (
            self._vector(f"{name}.weight", family.norm_offset)
            if "weight" in has
            else self._keep(np.ones(width, np.float32))
        )
        if family.norm != "layer":
            return Norm(weight, None)
        return Norm(weight, self._vector(f"{name}.bias") if "bias" in has else self._keep(np.zeros(width, np.float32)))

    def _vector(self, name: str, offset: float = 0.0) -> Array:
        values = _values(self._tensors[name])
        return self._keep(values + np.float32(offset) if offset else values)

    def _keep(self, values: np.ndarray) -> Array:
        self.num_bytes += values.nbytes
        return self._ops.vector(values)

    def _tensor(self, name: str) -> Tensor | QuantisedTensor:
        self._note(self._tensors[name])
        return self._tensors[name]

    def _matrix(self, name: str, quantization: str | None) -> RawTensor:
        return as_run(as_matrix(self._tensor(name)), self._ops, quantization)

    def _as_run(self, tensor: Tensor | QuantisedTensor) -> RawTensor:
        return as_run(tensor, self._ops, self._quantization)

    def _note(self, *tensors: Tensor | QuantisedTensor) -> None:
        """These are read now, and are done with once they are packed."""
        for tensor in tensors:
            self._read.append(tensor.data)
            self._bytes_read += tensor.data.nbytes
        self._progress(self._bytes_read, self._bytes_in_all)

    def _pack_stack(self, matrices: Sequence[Sequence[RawTensor]]) -> Any:
        """A stack has one kind."""
        return self._packed(self._ops.pack_stack(of_one_kind(matrices)))

    def _pack(self, *parts: RawTensor) -> Weight:
        weight: Weight = self._packed(self._ops.pack(parts))
        return weight

    def _packed(self, weight: Any) -> Any:
        """What was read for it is not needed any more."""
        while self._read:
            release(self._read.pop())
        self.num_bytes += weight.num_bytes
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


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    tensors = checkpoint.tensors
    if config.moe is not None and config.moe.form in ONE_BY_ONE:
        count = config.moe.routing.num_experts * sum(layer.is_moe for layer in config.layers)
        if count > len(tensors):
            raise BadCheckpoint(
                f"{checkpoint.path} ({config.architecture}) has {len(tensors)} tensors and {count} experts."
            )
    optional: dict[str, tuple[int, ...]] = {}
    if config.tied_embeddings:  # some exporters write the tied matrix twice
        optional[f"{global_names(checkpoint.kind, config.family.names)['head']}.weight"] = (
            config.vocab_size,
            config.width,
        )
    compare_tensors(checkpoint, config, expected_shapes(checkpoint.kind, config), optional)


def compare_tensors(
    checkpoint: Checkpoint,
    config: ModelConfig,
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises BadCheckpoint where tensors are not these, naming each."""
    tensors = checkpoint.tensors
    missing = [name for name in expected if name not in tensors]
    ignored = expected.keys() | optional.keys() | _READ_WITH_THE_CONFIG
    extra = [
        name
        for name in tensors
        if name not in ignored and not name.startswith(config.unread) and not _may_be_ignored(tensors[name])
    ]
    misshaped = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in (*expected.items(), *optional.items())
        if name in tensors and not _fits(tuple(tensors[name].shape), shape)
    ]
    refuse_tensors(f"{checkpoint.path} ({config.architecture})", missing, extra, misshaped)


def refuse_tensors(where: str, missing: list[str], extra: list[str], misshaped: list[str]) -> None:
    """Raises BadCheckpoint where there are any, naming each."""
    problems = [("is missing", missing), ("has unexpected", extra), ("has misshaped", misshaped)]
    if found := "; ".join(f"{verb} {listed(names)}" for verb, names in problems if names):
        raise BadCheckpoint(f"{where} {found}.")


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether what should have `shape` may be stored so: sizes of 1 may be left out, and the values of a vector may
    stand in rows, as norms of groups do."""
    if len(shape) == 1:
        return math.prod(found) == shape[0]
    return found in (shape, tuple(size for size in shape if size != 1))


def _may_be_ignored(tensor: Tensor | QuantisedTensor) -> bool:
    """Quantisers write biases of zeros where a family has none."""
    if tensor.name.endswith(_IGNORED_SUFFIXES):
        return True
    return tensor.name.endswith(".bias") and not np.frombuffer(tensor.data, np.uint8).any()


def token_places(checkpoint: Checkpoint, name: str, vocab_size: int, *, are_offsets: bool = False) -> np.ndarray:
    """int32 [N]: which of vocab_size tokens each of a smaller vocabulary is, as a tensor of integers says: their ids,
    or how far each is from its own. Raises BadCheckpoint."""
    stored = checkpoint.tensors[name]
    if stored.kind not in _INTEGERS:
        raise BadCheckpoint(f"{checkpoint.path}: {name} must be of int64 or int32, not of {stored.kind}.")
    places = np.frombuffer(stored.data, _INTEGERS[stored.kind]).astype(np.int64)
    places += np.arange(len(places)) if are_offsets else 0
    if not 0 <= places.min() <= places.max() < vocab_size or len(np.unique(places)) < len(places):
        raise BadCheckpoint(
            f"{checkpoint.path}: {name} must lead each of its {len(places)} tokens to another one of {vocab_size}, and "
            f"leads to some from {places.min()} to {places.max()}."
        )
    return places.astype(np.int32)


def listed(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _values(tensor: Tensor | QuantisedTensor) -> np.ndarray:
    """float32, flat."""
    return dequantise(tensor.kind, tensor.data, tensor.num_values)
