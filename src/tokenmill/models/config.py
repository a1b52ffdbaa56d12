"""A model's shape, read from a checkpoint's metadata.

Whatever a file says that the declared families (families.py) cannot express is refused here by name, so that no model
runs almost right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_keys import ARCHITECTURES, CONFIG_KEYS, architecture_of, model_type_of
from ..formats.ggml import dequantise
from ..formats.tensor import Tensor
from ..ops.api import HeadGeometry, LatentGeometry
from .attention_config import gguf_attention, hf_attention, hf_layer_attention, hf_num_heads
from .config_json import (
    MAX_LAYERS,
    LayerKinds,
    read_activation,
    read_ffn_width,
    read_inputs,
    read_layers,
    read_norm_eps,
    read_num_layers,
    read_residual,
    read_ropes,
    read_still,
    read_tied,
)
from .families import HF_FAMILIES, gguf_family, hf_family
from .family import LATENT_HEADS, ONE_NORM, PARALLEL, SEQUENTIAL, Family
from .fields import Fields
from .missing import what_is_missing
from .mixer import GATED_DELTA, BranchScales, MixerConfig, gguf_mixer, gguf_state_layers, hf_branches, hf_mixer
from .moe import MoeConfig
from .moe_config import Mixtures, gguf_experts, hf_experts, num_mtp_layers
from .rope import RopeConfig
from .tensor_names import LAYER_NAMES, WHOLE_NAMES, global_names
from .unsupported_keys import refuse_what_is_not_done

_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What one layer is made of: attention or a mixer that keeps a state, or both side by side, then an FFN, each where
    it has one.

    window           positions a token sees, its own included; 0 for all
    rope             None for a layer without positions
    is_moe           its FFN is a mixture of experts
    keeps_state      it has a mixer
    attends          it has attention
    has_ffn          it has an FFN
    heads            None for those of most layers
    kv_layer         the layer whose keys and values it sees, in place of its own (KV sharing between layers, arXiv
                     2405.12981)
    is_chunked       of the window's positions a token sees those of its own chunk, of as many, alone (Llama 4)
    keys_are_values  its values are made of what its keys are made of
    ffn_width        0 for that of most layers
    """

    window: int
    rope: RopeConfig | None
    is_moe: bool = False
    keeps_state: bool = False
    attends: bool = True
    has_ffn: bool = True
    heads: HeadGeometry | None = None
    kv_layer: int | None = None
    is_chunked: bool = False
    keys_are_values: bool = False
    ffn_width: int = 0

    @property
    def mixes(self) -> bool:
        """Whether a token sees others here."""
        return self.attends or self.keeps_state

    @property
    def sees(self) -> int:
        """The window as Ops.paged_attention is told it."""
        return -self.window if self.is_chunked else self.window


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """num_heads..  of most layers, as head_dim and ffn_width: see LayerConfig
    rotary_dim   channels of each of these heads that turn; of other heads it is the same share
    biases       roles that have one, the head among them
    residual     SEQUENTIAL, PARALLEL or ONE_NORM
    scales       are 1 and caps 0 for none
    moe          of layers that are mixtures of experts
    mixer        of layers that keep a state
    latent       of a family with latent attention, whose head_dim is that of a query before it is taken into the latent
                 space
    is_absorbed  the file has matrices into and out of the latent space (k_b, v_b), not keys and values of it (kv_b)
    query_rank   channels that queries go through; 0: they do not
    inner_eps    the epsilon of the norms of those, and of latents; None: norm_eps
    input_width  of what each layer is given of the token beside the residual stream (per-layer embeddings); 0: nothing
    input_vocab  tokens that have such embeddings
    has_qk_norm  whether the family's norms of queries and keys are there
    unread       what names of tensors begin with that are there for guessing more than one token, for choosing among
                 more positions than are served, or for keys and values that no layer sees, and are not read
    is_causal    whether a token sees no more than those before it; else every one of its text, within a window so many
                 to each side
    """

    architecture: str
    family: Family
    layers: tuple[LayerConfig, ...]
    width: int
    ffn_width: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    max_context: int
    tied_embeddings: bool
    activation: str = "silu"
    biases: frozenset[str] = field(default_factory=frozenset)
    residual: str = SEQUENTIAL
    attention_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    branches: BranchScales = field(default_factory=BranchScales)
    moe: MoeConfig | None = None
    mixer: MixerConfig | None = None
    latent: LatentGeometry | None = None
    is_absorbed: bool = False
    query_rank: int = 0
    inner_eps: float | None = None
    input_width: int = 0
    input_vocab: int = 0
    has_qk_norm: bool = True
    unread: tuple[str, ...] = ()
    is_causal: bool = True

    @property
    def qk_norm(self) -> str:
        """As Family.qk_norm, where the model has them."""
        return self.family.qk_norm if self.has_qk_norm else ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> HeadGeometry:
        """Those of most layers."""
        return HeadGeometry(self.num_heads, self.num_kv_heads, self.head_dim)

    def heads_of(self, layer: int) -> HeadGeometry:
        return self.layers[layer].heads or self.heads

    def ffn_width_of(self, layer: int) -> int:
        return self.layers[layer].ffn_width or self.ffn_width

    def rope_of(self, layer: int) -> tuple[RopeConfig, int, int] | None:
        """A layer's RoPE, how many channels of its heads turn, and how many there are; None: it has no positions."""
        rope, head_dim = self.layers[layer].rope, self.heads_of(layer).head_dim
        return None if rope is None else (rope, head_dim * self.rotary_dim // self.head_dim, head_dim)

    def turns(self, layer: int) -> bool:
        """Whether the layer's queries and keys turn with their positions."""
        rope = self.layers[layer].rope
        return rope is not None and rope.share > 0

    @property
    def ropes(self) -> tuple[tuple[RopeConfig, int, int], ...]:
        """Of all layers, each once."""
        found = dict.fromkeys(map(self.rope_of, range(self.num_layers)))
        return tuple(which for which in found if which is not None)


def config_from_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of the model in `checkpoint`. Raises BadCheckpoint, naming the architecture or key at fault."""
    return _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_hf(checkpoint)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    fields = Fields(checkpoint.metadata, str(checkpoint.path))
    architecture = fields.text("general.architecture", "")
    family = _gguf_family(checkpoint, fields, architecture)
    refuse_what_is_not_done(fields, family)
    fields = replace(fields, defaults=family.defaults, prefix=f"{architecture}.")
    table = checkpoint.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise BadCheckpoint(f"{fields.where} has no matrix token_embd.weight.")
    width, num_blocks = fields.count("embedding_length"), fields.count("block_count", most=MAX_LAYERS)
    num_layers = num_blocks - num_mtp_layers(fields)
    if num_layers < 1:
        raise BadCheckpoint(f"{fields.where}: of {num_blocks} layers none is left beside nextn_predict_layers.")
    shape = gguf_attention(checkpoint, fields, family, width, num_layers)
    scales = gguf_scales(fields, family, width, num_layers)
    max_context = fields.count("context_length")
    rope = _gguf_rope(checkpoint, fields, family, max_context)
    local_base = fields.number("rope.freq_base_swa", 10000.0 if architecture == "gemma3" else rope.base)
    windowed_rope = RopeConfig(local_base) if family.local_rope else rope
    kinds = _gguf_kinds(fields, family, num_layers)
    family, residual = _gguf_residual(checkpoint, fields, family)
    names = LAYER_NAMES["gguf"] | dict(family.names)
    activation = family.activation or "silu"
    mixtures = gguf_experts(fields, family, checkpoint.tensors, num_layers, activation)
    eps = fields.number(f"attention.layer_norm_{'' if family.norm == 'layer' else 'rms_'}epsilon")
    return _checked(
        ModelConfig(
            architecture=architecture,
            family=family,
            layers=_layers(kinds, rope, windowed_rope, mixtures),
            width=width,
            ffn_width=fields.count("feed_forward_length", mixtures.moe.expert_width if mixtures.moe else None),
            vocab_size=table.shape[0],
            num_heads=fields.count("attention.head_count"),
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=shape.turned_dim,
            norm_eps=eps,
            max_context=max_context,
            tied_embeddings="output.weight" not in checkpoint.tensors,
            activation=activation,
            biases=_gguf_biases(checkpoint, names, num_layers) | frozenset(family.biases),
            residual=residual,
            attention_scale=shape.scale,
            attention_cap=fields.number("attn_logit_softcapping", 0.0),
            logit_cap=fields.number("final_logit_softcapping", 0.0),
            embed_scale=scales.embed,
            residual_scale=scales.residual,
            logit_scale=scales.logit,
            latent=shape.latent,
            is_absorbed=shape.is_absorbed,
            query_rank=shape.query_rank,
            inner_eps=shape.inner_eps,
            moe=mixtures.moe,
            mixer=gguf_mixer(fields, family.mixer, width, eps) if family.mixer else None,
            has_qk_norm=not family.may_lack_qk_norm or f"{names['q_norm'].format(0)}.weight" in checkpoint.tensors,
            unread=mixtures.unread,
        ),
        fields,
    )


def _gguf_family(checkpoint: Checkpoint, fields: Fields, architecture: str) -> Family:
    family = gguf_family(architecture) or _refuse(architecture, fields)
    if family.mixer == GATED_DELTA and f"{LAYER_NAMES['gguf']['mixer_qkvz'].format(0)}.weight" in checkpoint.tensors:
        return replace(family, fused=(*family.fused, "mixer_qkvz"))  # early files of Qwen3-Next
    return family


def _gguf_biases(checkpoint: Checkpoint, names: Mapping[str, str], num_layers: int) -> frozenset[str]:
    """Roles whose tensors have a bias in some layer."""
    return frozenset(
        role
        for role, name in names.items()
        for layer in range(num_layers)
        if role not in WHOLE_NAMES and f"{name.format(layer)}.bias" in checkpoint.tensors
    )


def _gguf_residual(checkpoint: Checkpoint, fields: Fields, family: Family) -> tuple[Family, str]:
    """The form of the residuals, with the family as it is where they have it. Whether a norm serves both attention and
    FFN, and whether queries, keys and values are one matrix, tensors tell."""

    def has(name: str) -> bool:
        return f"{name.format(0)}.weight" in checkpoint.tensors

    names, residual = LAYER_NAMES["gguf"] | dict(family.names), family.residual
    if residual == PARALLEL and family.residual_key and not fields.flag(family.residual_key):
        residual = SEQUENTIAL
    elif residual == ONE_NORM and family.parallel_names:
        residual = PARALLEL if has(family.parallel_names["attn_norm"]) else ONE_NORM
    elif residual == ONE_NORM and has(names["ffn_norm"]):
        residual = SEQUENTIAL
    if has(names["qkv"]) and not (family.mixer or "qkv" in family.fused):
        family = replace(family, fused=(*family.fused, "qkv"))
    return family.with_residual(residual), residual


def _gguf_rope(checkpoint: Checkpoint, fields: Fields, family: Family, max_context: int) -> RopeConfig:
    """Divisors of Llama 3.x and Phi come as tensors. YaRN of latent attention: see attention_config.py."""
    base = fields.number("rope.freq_base", 10000.0)
    scaling = fields.text("rope.scaling.type", "none")
    original = fields.count("rope.scaling.original_context_length", max_context)
    cos_scale = fields.number("rope.scaling.attn_factor", 1.0)
    tables = {}
    for name in ("rope_freqs", "rope_factors_short", "rope_factors_long"):
        tensor = checkpoint.tensors.get(f"{name}.weight")
        values = () if tensor is None else dequantise(tensor.kind, tensor.data, tensor.num_values).tolist()
        tables[name] = tuple(values)
    if tables["rope_factors_long"]:
        return RopeConfig(
            base,
            "longrope",
            cos_scale=cos_scale,
            original_context=original,
            short_divisors=tables["rope_factors_short"],
            long_divisors=tables["rope_factors_long"],
        )
    factor = fields.number("rope.scaling.factor", 1.0, positive=True)
    if scaling == "none":
        return RopeConfig(base, divisors=tables["rope_freqs"])
    if scaling == "linear":
        return RopeConfig(base, "linear", factor, divisors=tables["rope_freqs"])
    if scaling == "yarn":

        def stretch(weight: float) -> float:
            return 1 + 0.1 * weight * math.log(factor)

        over = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
        fast, slow = (
            fields.number(f"rope.scaling.yarn_beta_{name}", value) for name, value in (("fast", 32.0), ("slow", 1.0))
        )
        return RopeConfig(
            base,
            "yarn",
            factor,
            original_context=original,
            fast_turns=fast,
            slow_turns=slow,
            whole_pairs=family.whole_yarn_pairs,
            cos_scale=cos_scale * (1 if family.attention == LATENT_HEADS else stretch(1) / stretch(over)),
            query_beta=fields.number("attention.temperature_scale", 0.0) if family.scaled_queries else 0.0,
        )
    raise BadCheckpoint(
        f"{fields.where}: RoPE scaling {scaling!r} is not supported (supported: none, linear, yarn, longrope)."
    )


def _gguf_kinds(fields: Fields, family: Family, num_layers: int) -> LayerKinds:
    windows, with_state = _gguf_windows(fields, family, num_layers), frozenset[int]()
    if family.mixer:
        with_state = gguf_state_layers(fields, family.mixer, num_layers)
        windows = [0 if layer in with_state else window for layer, window in enumerate(windows)]
    without_rope = _gguf_no_rope(family, windows)
    if family.rope_if and fields.get(family.rope_if[0], family.rope_if[1]) != family.rope_if[1]:
        without_rope = frozenset(range(num_layers))
    return LayerKinds(windows, without_rope, with_state, with_state)


def _gguf_windows(fields: Fields, family: Family, num_layers: int) -> list[int]:
    window = fields.count("attention.sliding_window", 0, least=0)
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and window:
        if len(pattern) < num_layers:
            raise BadCheckpoint(f"{fields.where}: attention.sliding_window_pattern is shorter than the layers.")
        return [window if pattern[layer] else 0 for layer in range(num_layers)]
    return [window if family.has_window(layer) else 0 for layer in range(num_layers)]


def _gguf_no_rope(family: Family, windows: list[int]) -> frozenset[int]:
    if family.no_rope_on_full and any(windows):
        return frozenset(layer for layer, window in enumerate(windows) if not window)
    every = family.no_rope_every
    return frozenset(layer for layer in range(len(windows)) if every and (layer + 1) % every == 0)


# ---- config.json -----------------------------------------------------------------------------------------------------


def _from_hf(checkpoint: Checkpoint) -> ModelConfig:
    architecture = architecture_of(checkpoint.metadata)
    fields = Fields(checkpoint.metadata, str(checkpoint.path), {})
    family = hf_family(architecture) or _refuse(architecture, fields)
    kind = model_type_of(checkpoint.metadata)
    keys = family.keys or CONFIG_KEYS.get(kind)
    if keys is None or (architecture in HF_FAMILIES and ARCHITECTURES.get(kind) != architecture):
        raise BadCheckpoint(f"{fields.where}: {architecture} does not go with model_type {kind!r}.")
    fields = replace(fields, keys=keys, names=family.key_names)
    fields.check_nulls()
    refuse_what_is_not_done(fields, family)
    if fields.reads("rope_interleave") and not fields.flag("rope_interleave"):
        family = replace(family, interleaved_heads=False)
    width, num_heads = fields.count("hidden_size"), hf_num_heads(fields, family)
    num_layers, eps = read_num_layers(fields, family), read_norm_eps(fields, family)
    shape, scales = hf_attention(fields, family, width, num_heads), hf_scales(fields, family, width, num_layers)
    ropes, activation = read_ropes(fields, family), read_activation(fields, family)
    mixtures, residual = hf_experts(fields, family, num_layers, activation), read_residual(fields, family)
    family = family.with_residual(residual)
    layers = _layers(read_layers(fields, family, num_layers), ropes.full, ropes.windowed, mixtures, read_still(fields))
    layers = _hf_own_shapes(fields, layers, HeadGeometry(num_heads, shape.num_kv_heads, shape.head_dim))
    input_width, input_vocab = read_inputs(fields)
    biases = set(family.biases).union(*(roles for key, roles in family.bias_keys.items() if fields.flag(key)))
    return _checked(
        ModelConfig(
            architecture=architecture,
            family=family,
            layers=layers,
            width=width,
            ffn_width=read_ffn_width(fields, width),
            vocab_size=fields.count("vocab_size"),
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=int(shape.turned_dim * ropes.fraction),
            norm_eps=eps,
            max_context=ropes.max_context,
            tied_embeddings=read_tied(fields) and not _has_own_head(checkpoint, family),
            activation=activation,
            biases=frozenset(biases),
            residual=residual,
            attention_scale=shape.scale,
            attention_cap=fields.number("attn_logit_softcapping", 0.0),
            logit_cap=fields.number("final_logit_softcapping", 0.0),
            embed_scale=scales.embed,
            residual_scale=scales.residual,
            logit_scale=scales.logit,
            latent=shape.latent,
            query_rank=shape.query_rank,
            inner_eps=shape.inner_eps,
            moe=mixtures.moe,
            branches=hf_branches(fields),
            mixer=hf_mixer(fields, family.mixer, width, eps) if family.mixer else None,
            input_width=input_width,
            input_vocab=input_vocab,
            has_qk_norm=fields.flag("use_qk_norm") if fields.reads("use_qk_norm") else True,
            unread=(*mixtures.unread, *_without_use(layers)),
        ),
        fields,
    )


def _hf_own_shapes(fields: Fields, layers: tuple[LayerConfig, ...], heads: HeadGeometry) -> tuple[LayerConfig, ...]:
    """The layers, with what their attention and their FFN have of their own. heads: of the model."""
    wide = 0
    if fields.reads("use_double_wide_mlp") and fields.flag("use_double_wide_mlp"):
        wide = 2 * read_ffn_width(fields, fields.count("hidden_size"))
        if any(layer.is_moe for layer in layers):
            raise BadCheckpoint(f"{fields.where}: use_double_wide_mlp is not supported here beside experts.")
    found = hf_layer_attention(fields, [layer.window for layer in layers], heads)
    return tuple(
        replace(
            layer,
            heads=own.heads,
            kv_layer=own.kv_layer,
            keys_are_values=own.keys_are_values,
            ffn_width=wide if own.kv_layer is not None else 0,
        )
        for layer, own in zip(layers, found, strict=True)
    )


def _without_use(layers: tuple[LayerConfig, ...]) -> list[str]:
    """What the names of tensors begin with that make keys and values nobody sees."""
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    shared = [index for index, layer in enumerate(layers) if layer.kv_layer is not None]
    return [f"model.layers.{index}.self_attn.{part}." for index in shared for part in parts]


def _has_own_head(checkpoint: Checkpoint, family: Family) -> bool:
    """Whether the file holds a head that differs from its embeddings: though it says that they are tied, what it holds
    counts. Reads both where they begin alike."""
    names = global_names("hf", family.names)
    head, embed = (checkpoint.tensors.get(f"{names[name]}.weight") for name in ("head", "embed"))
    if head is None or embed is None:
        return False
    if (head.kind, head.shape) != (embed.kind, embed.shape) or not isinstance(head, Tensor):
        return True
    ours, theirs = (np.frombuffer(tensor.data, np.uint8) for tensor in (head, embed))
    parts = (slice(first, first + _COMPARED_BYTES) for first in range(0, len(ours), _COMPARED_BYTES))
    return not all(np.array_equal(ours[part], theirs[part]) for part in parts)


# ---- both ------------------------------------------------------------------------------------------------------------


def _refuse(architecture: str, fields: Fields) -> NoReturn:
    told = architecture or fields.metadata.get("model_type", "")
    missing = what_is_missing(architecture, fields.metadata)
    raise BadCheckpoint(
        f"{fields.where}: architecture {told!r} is not supported{missing and f': {missing}'}; docs/use/models.md lists "
        "those that are."
    )


def _layers(
    kinds: LayerKinds,
    rope: RopeConfig,
    windowed_rope: RopeConfig,
    mixtures: Mixtures,
    still: RopeConfig | None = None,
) -> tuple[LayerConfig, ...]:
    """still: of layers whose queries and keys do not turn."""

    def turns(layer: int, window: int) -> RopeConfig | None:
        if layer in kinds.without_attention:
            return None
        if layer in kinds.without_rope:
            return still
        return windowed_rope if window else rope

    return tuple(
        LayerConfig(
            window,
            turns(layer, window),
            is_moe=layer in mixtures.layers,
            keeps_state=layer in kinds.with_state,
            attends=layer not in kinds.without_attention,
            has_ffn=layer not in kinds.without_ffn,
            is_chunked=kinds.are_chunks and window > 0,
        )
        for layer, window in enumerate(kinds.windows)
    )


def _checked(config: ModelConfig, fields: Fields) -> ModelConfig:
    if config.num_heads:
        _check_heads(config, fields)
    scales = [config.embed_scale, config.residual_scale, config.logit_scale, config.attention_scale]
    if min(config.norm_eps, config.attention_cap, config.logit_cap) < 0 or not all(map(math.isfinite, scales)):
        raise BadCheckpoint(f"{fields.where}: the norm epsilon and soft caps must not be negative, and scales finite.")
    for rope, num_turned, _ in config.ropes:
        if not (rope.base > 1 and rope.factor > 0):
            raise BadCheckpoint(f"{fields.where}: the RoPE base must be above 1 and its factor positive.")
        if not (rope.fast_turns > 0 and rope.slow_turns > 0 and rope.high_freq_factor > rope.low_freq_factor > 0):
            raise BadCheckpoint(f"{fields.where}: the borders of RoPE's fast and slow pairs do not fit each other.")
        if rope.scaling == "dynamic" and rope.factor < 1:
            raise BadCheckpoint(f"{fields.where}: dynamic RoPE needs a factor of at least 1, got {rope.factor}.")
        for divisors in (rope.divisors, rope.short_divisors, rope.long_divisors):
            if divisors and (len(divisors) != num_turned // 2 or not np.all(np.array(divisors) > 0)):
                raise BadCheckpoint(
                    f"{fields.where}: RoPE needs {num_turned // 2} positive factors, got {len(divisors)}."
                )
        if rope.scaling == "longrope" and not (rope.short_divisors and rope.long_divisors):
            raise BadCheckpoint(f"{fields.where}: longrope needs short and long factors.")
    return config


def _check_heads(config: ModelConfig, fields: Fields) -> None:
    for heads in {config.heads_of(layer) for layer in range(config.num_layers)} | {config.heads}:
        if heads.num_heads % heads.num_kv_heads:
            raise BadCheckpoint(
                f"{fields.where}: {heads.num_heads} heads do not divide into {heads.num_kv_heads} KV heads."
            )
        if heads.head_dim < 2 or heads.head_dim % 2:
            raise BadCheckpoint(f"{fields.where}: head size {heads.head_dim} must be even for RoPE.")
    if not 2 <= config.rotary_dim <= config.head_dim or config.rotary_dim % 2:
        raise BadCheckpoint(
            f"{fields.where}: RoPE on {config.rotary_dim} of {config.head_dim} channels is not supported."
        )


@dataclass(frozen=True, slots=True)
class Scales:
    """residual: of what attention and FFN add."""

    embed: float
    residual: float
    logit: float


def hf_scales(fields: Fields, family: Family, width: int, num_layers: int) -> Scales:
    """From config.json. Raises BadCheckpoint."""
    if fields.reads("scale_depth"):  # MiniCPM's spelling
        depth = fields.number("scale_depth", math.sqrt(num_layers))
        base = fields.number("dim_model_base", width, positive=True)
        return Scales(fields.number("scale_emb"), depth / math.sqrt(num_layers), base / width)
    return Scales(
        math.sqrt(width)
        if family.scaled_embeddings or fields.flag("mup_enabled")
        else fields.number("embedding_multiplier", 1.0),
        fields.number("residual_multiplier", 1.0),
        next((fields.number(key) for key in ("logit_scale", "lm_head_multiplier") if fields.reads(key)), 1.0)
        / fields.number("logits_scaling", 1.0, positive=True),
    )


_MINICPM = Scales(12.0, 1.4, 256.0)
"""Of MiniCPM in GGUF, where keys say none: as in hf_scales, `scale_emb`, `scale_depth` and `dim_model_base`."""


def gguf_scales(fields: Fields, family: Family, width: int, num_layers: int) -> Scales:
    """From a GGUF file's keys. Raises BadCheckpoint."""
    embed, residual, logit = math.sqrt(width) if family.scaled_embeddings else 1.0, 1.0, 1.0
    if fields.prefix in ("minicpm.", "minicpm3."):
        embed, residual = _MINICPM.embed, _MINICPM.residual / math.sqrt(num_layers)
        logit = width / _MINICPM.logit
    logit = fields.number("logit_scale", logit, positive=True)
    return Scales(
        embed if family.scaled_embeddings else fields.number("embedding_scale", embed),
        fields.number("residual_scale", residual),
        logit if family.logits_multiplied else 1 / logit,
    )
