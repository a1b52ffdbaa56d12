"""A model's shape, read from a checkpoint's metadata.

Whatever a file says that the declared families (families.py) cannot express is refused here by name, so that no model
runs almost right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.ggml import dequantise
from ..formats.language import ARCHITECTURES
from ..ops.api import HeadGeometry
from .families import GGUF_FAMILIES, GLOBAL_NAMES, HF_FAMILIES, LAYER_NAMES, Family
from .fields import Fields

MAX_LAYERS = 10_000
"""More than any model has; a damaged count must not be turned into a list of that length."""

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
"""Names in config.json -> what the decoder calls them: gelu is the tanh form."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Angles of rotary embeddings: pair i of R/2 turns by position * base^(-2i/R), scaled.

    none      as it is
    linear    every frequency is divided by `factor`
    dynamic   the base grows with the longest context served, beyond `original_context` (NTK-aware)
    yarn      frequencies that turn less than `slow_turns` times in `original_context` are divided by `factor`, those
              that turn more than `fast_turns` times are kept, and between them is a ramp over the pairs
    longrope  frequencies are divided by `short_divisors`, or by `long_divisors` where more than `original_context`
              positions are served
    llama3    as yarn, by wavelength against `original_context` / (low, high)_freq_factor

    cos_scale  multiplies cosines and sines
    divisors   a checkpoint's own table, by which frequencies are divided whatever the scaling
    """

    base: float
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_pairs: bool = True  # yarn: the ramp begins and ends at whole pairs
    cos_scale: float = 1.0
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """window: positions a token sees, its own included; 0 for all. rope: None for a layer without positions."""

    window: int
    rope: RopeConfig | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """rotary_dim: channels of each head that turn. biases: roles that have one. Scales are 1 and caps 0 for none."""

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
    attention_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> HeadGeometry:
        return HeadGeometry(self.num_heads, self.num_kv_heads, self.head_dim)


def config_from_checkpoint(checkpoint: Checkpoint) -> ModelConfig:
    """The shape of the model in `checkpoint`. Raises BadCheckpoint, naming the architecture or key at fault."""
    return _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_hf(checkpoint)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    fields = Fields(checkpoint.metadata, str(checkpoint.path))
    architecture = fields.text("general.architecture", "")
    family = _family(GGUF_FAMILIES, architecture, fields)
    fields = replace(fields, defaults=family.defaults, prefix=f"{architecture}.")
    table = checkpoint.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise BadCheckpoint(f"{fields.where} has no matrix token_embd.weight.")
    width, num_layers = fields.count("embedding_length"), fields.count("block_count", most=MAX_LAYERS)
    num_heads = fields.count("attention.head_count")
    head_dim = fields.count("attention.key_length", width // num_heads)
    fields.must_equal("attention.value_length", head_dim)
    max_context = fields.count("context_length")
    rope = _gguf_rope(checkpoint, fields, max_context)
    local_base = fields.number("rope.freq_base_swa", 10000.0 if architecture == "gemma3" else rope.base)
    windows = _gguf_windows(fields, family, num_layers)
    names = LAYER_NAMES["gguf"] | dict(family.names)
    biases = {role for role, name in names.items() if f"{name.format(0)}.bias" in checkpoint.tensors}
    norm_key = "layer_norm_epsilon" if family.norm == "layer" else "layer_norm_rms_epsilon"
    return _checked(
        ModelConfig(
            architecture=architecture,
            family=family,
            layers=_layers(family, windows, rope, RopeConfig(local_base), None),
            width=width,
            ffn_width=fields.count("feed_forward_length"),
            vocab_size=table.shape[0],
            num_heads=num_heads,
            num_kv_heads=fields.count("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rotary_dim=fields.count("rope.dimension_count", head_dim),
            norm_eps=fields.number(f"attention.{norm_key}"),
            max_context=max_context,
            tied_embeddings="output.weight" not in checkpoint.tensors,
            activation=family.activation or "silu",
            biases=frozenset(biases.intersection(family.layer_roles()) | set(family.biases)),
            attention_scale=_gguf_attention_scale(fields, architecture, num_layers, width, num_heads, head_dim),
            attention_cap=fields.number("attn_logit_softcapping", 0.0),
            logit_cap=fields.number("final_logit_softcapping", 0.0),
            embed_scale=math.sqrt(width) if family.scaled_embeddings else fields.number("embedding_scale", 1.0),
            residual_scale=fields.number("residual_scale", 1.0),
            logit_scale=1 / fields.number("logit_scale", 1.0, positive=True),
        ),
        fields,
    )


_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""(architecture, layers) of the 27B models, whose queries are scaled by width / heads, which no key of a file says."""


def _gguf_attention_scale(
    fields: Fields, architecture: str, num_layers: int, width: int, num_heads: int, head_dim: int
) -> float:
    per_head = width / num_heads if (architecture, num_layers) in _LARGEST_GEMMAS else head_dim
    return fields.number("attention.scale", 0.0) or per_head**-0.5


def _gguf_rope(checkpoint: Checkpoint, fields: Fields, max_context: int) -> RopeConfig:
    """Divisors of Llama 3.x and Phi come as tensors."""
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
            cos_scale=cos_scale * (1 + 0.1 * math.log(factor)),
        )
    raise BadCheckpoint(
        f"{fields.where}: RoPE scaling {scaling!r} is not supported (supported: none, linear, yarn, longrope)."
    )


def _gguf_windows(fields: Fields, family: Family, num_layers: int) -> list[int]:
    window = fields.count("attention.sliding_window", 0, least=0)
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and window:
        if len(pattern) < num_layers:
            raise BadCheckpoint(f"{fields.where}: attention.sliding_window_pattern is shorter than the layers.")
        return [window if pattern[layer] else 0 for layer in range(num_layers)]
    return _window_pattern(family, window, num_layers)


# ---- config.json -----------------------------------------------------------------------------------------------------


def _from_hf(checkpoint: Checkpoint) -> ModelConfig:
    fields = Fields(checkpoint.metadata, str(checkpoint.path))
    names = checkpoint.metadata.get("architectures") or [ARCHITECTURES.get(fields.text("model_type", ""), "")]
    architecture = str(names[0]) if isinstance(names, list) else ""
    family = _family(HF_FAMILIES, architecture, fields)
    fields = replace(fields, defaults=family.defaults)
    width, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    head_dim = fields.count("head_dim", width // num_heads)
    max_positions = fields.count("max_position_embeddings")
    rope, local_rope, fraction, max_context = _hf_ropes(fields, family, max_positions)
    head = GLOBAL_NAMES["hf"]["head"] + ".weight"
    biases = set(family.biases).union(*(roles for key, roles in family.bias_keys.items() if fields.get(key)))
    return _checked(
        ModelConfig(
            architecture=architecture,
            family=family,
            layers=_layers(family, _hf_windows(fields, family, num_layers), rope, local_rope, _hf_no_rope(fields)),
            width=width,
            ffn_width=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rotary_dim=int(head_dim * fraction),
            norm_eps=fields.number(_norm_key(fields)),
            max_context=max_context,
            tied_embeddings=bool(fields.get("tie_word_embeddings", head not in checkpoint.tensors)),
            activation=family.activation or _hf_activation(fields),
            biases=frozenset(biases.intersection(family.layer_roles())),
            attention_scale=fields.number("attention_multiplier", 0.0)
            or fields.number("query_pre_attn_scalar", float(head_dim), positive=True) ** -0.5,
            attention_cap=fields.number("attn_logit_softcapping", 0.0),
            logit_cap=fields.number("final_logit_softcapping", 0.0),
            embed_scale=math.sqrt(width) if family.scaled_embeddings else fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0, positive=True),
        ),
        fields,
    )


def _norm_key(fields: Fields) -> str:
    return next((key for key in ("norm_epsilon", "layer_norm_eps") if fields.get(key) is not None), "rms_norm_eps")


def _hf_activation(fields: Fields) -> str:
    name = fields.text("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise BadCheckpoint(
            f"{fields.where}: activation {name!r} is not supported (supported: {', '.join(ACTIVATIONS)})."
        )
    return ACTIVATIONS[name]


def _hf_windows(fields: Fields, family: Family, num_layers: int) -> list[int]:
    window = fields.count("sliding_window", 0, least=0)
    if fields.get("use_sliding_window") is False or family.window_every is None:
        window = 0
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        unknown = set(map(str, kinds)) - {"sliding_attention", "full_attention"}
        if unknown:
            raise BadCheckpoint(f"{fields.where}: layer_types has {sorted(unknown)}, which are not supported.")
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if fields.get("max_window_layers") is not None:
        first = fields.count("max_window_layers", least=0)
        return [window if layer >= first else 0 for layer in range(num_layers)]
    every = fields.get("sliding_window_pattern")
    if isinstance(every, int) and not isinstance(every, bool) and every > 0 and family.window_every is not None:
        return _window_pattern(replace(family, window_every=every), window, num_layers)
    return _window_pattern(family, window, num_layers)


def _hf_no_rope(fields: Fields) -> set[int] | None:
    """Layers that `no_rope_layers` marks with 0; None where the file has no such list."""
    flags = fields.get("no_rope_layers")
    if not isinstance(flags, list):
        return None
    return {layer for layer, has_rope in enumerate(flags) if not has_rope}


def _hf_ropes(fields: Fields, family: Family, max_positions: int) -> tuple[RopeConfig, RopeConfig, float, int]:
    """-> (RoPE, RoPE of windowed layers, fraction of each head that turns, longest context).

    `rope_parameters` holds everything, by layer type where these differ; older files have `rope_theta` beside an
    optional `rope_scaling`.
    """
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise BadCheckpoint(f"{fields.where}: rope_parameters must be an object, got {type(given).__name__}.")
    local: Mapping[str, Any] = {"rope_theta": fields.number("rope_local_base_freq", fields.number("rope_theta", 1e4))}
    if isinstance(given.get("full_attention"), Mapping):
        local, given = given.get("sliding_attention") or local, given["full_attention"]
    fraction = Fields(given, fields.where).number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rope, longest = _hf_rope(fields, given, max_positions)
    if not family.local_rope:
        return rope, rope, fraction, longest
    return rope, _hf_rope(fields, local, max_positions)[0], fraction, max_positions


def _hf_rope(fields: Fields, given: Mapping[str, Any], max_positions: int) -> tuple[RopeConfig, int]:
    """-> (one layer type's RoPE, the longest context it was scaled for)"""
    rope = Fields(given, f"{fields.where} (rope)")
    base = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    scaling = rope.text("rope_type", rope.text("type", "default"))
    if scaling in ("default", "mrope"):  # mrope: parts of a head turn by a position's row and column in an image
        return RopeConfig(base), max_positions
    original = rope.count(
        "original_max_position_embeddings", fields.count("original_max_position_embeddings", max_positions)
    )
    if scaling in ("longrope", "su"):
        return _longrope(rope, base, original, max_positions), max_positions
    factor = rope.number("factor", positive=True)
    longest = max(max_positions, round(factor * original))
    if scaling == "linear":
        return RopeConfig(base, scaling, factor), longest
    if scaling == "dynamic":
        return RopeConfig(base, scaling, factor, original_context=max_positions), longest
    if scaling == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeConfig(base, scaling, factor, low, high, original), max_positions
    if scaling == "yarn":
        return _yarn(rope, base, factor, original), longest
    raise BadCheckpoint(
        f"{rope.where}: scaling {scaling!r} is not supported (supported: default, linear, dynamic, yarn, longrope,"
        " llama3)."
    )


def _yarn(rope: Fields, base: float, factor: float, original: int) -> RopeConfig:
    def stretch(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0

    over, under = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    inferred = stretch(over) / stretch(under) if over and under else stretch(1.0)
    return RopeConfig(
        base,
        "yarn",
        factor,
        original_context=original,
        fast_turns=rope.number("beta_fast", 32.0),
        slow_turns=rope.number("beta_slow", 1.0),
        whole_pairs=bool(rope.get("truncate", True)),
        cos_scale=rope.number("attention_factor", inferred),
    )


def _longrope(rope: Fields, base: float, original: int, max_positions: int) -> RopeConfig:
    factor = rope.number("factor", max_positions / original)
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeConfig(
        base,
        "longrope",
        factor,
        original_context=original,
        cos_scale=rope.number("attention_factor", inferred),
        short_divisors=rope.numbers("short_factor"),
        long_divisors=rope.numbers("long_factor"),
    )


# ---- both ------------------------------------------------------------------------------------------------------------


def _family(families: Mapping[str, Family], architecture: str, fields: Fields) -> Family:
    family = families.get(architecture)
    if family is None:
        known = ", ".join(sorted(families))
        raise BadCheckpoint(f"{fields.where}: architecture {architecture!r} is not supported (supported: {known}).")
    for key, meaning in family.refused:
        if fields.metadata.get(key):
            raise BadCheckpoint(f"{fields.where}: {key} = {fields.metadata[key]!r}: {meaning} are not supported.")
    return family


def _window_pattern(family: Family, window: int, num_layers: int) -> list[int]:
    every = family.window_every
    if every is None:
        return [0] * num_layers
    return [0 if every and (layer + 1) % every == 0 else window for layer in range(num_layers)]


def _layers(
    family: Family, windows: list[int], rope: RopeConfig, local_rope: RopeConfig, no_rope: set[int] | None
) -> tuple[LayerConfig, ...]:
    if no_rope is None or not family.no_rope_every:
        every = family.no_rope_every
        no_rope = {layer for layer in range(len(windows)) if every and (layer + 1) % every == 0}
    if family.no_rope_on_full and any(windows):
        no_rope = {layer for layer, window in enumerate(windows) if not window}
    return tuple(
        LayerConfig(window, None if layer in no_rope else local_rope if window and family.local_rope else rope)
        for layer, window in enumerate(windows)
    )


def _checked(config: ModelConfig, fields: Fields) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise BadCheckpoint(
            f"{fields.where}: {config.num_heads} heads do not divide into {config.num_kv_heads} KV heads."
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise BadCheckpoint(f"{fields.where}: head size {config.head_dim} must be even for RoPE.")
    if not 2 <= config.rotary_dim <= config.head_dim or config.rotary_dim % 2:
        raise BadCheckpoint(
            f"{fields.where}: RoPE on {config.rotary_dim} of {config.head_dim} channels is not supported."
        )
    scales = [config.embed_scale, config.residual_scale, config.logit_scale, config.attention_scale]
    if min(config.norm_eps, config.attention_cap, config.logit_cap) < 0 or not all(map(math.isfinite, scales)):
        raise BadCheckpoint(f"{fields.where}: the norm epsilon and soft caps must not be negative, and scales finite.")
    for rope in {layer.rope for layer in config.layers if layer.rope is not None}:
        if not (rope.base > 1 and rope.factor > 0):
            raise BadCheckpoint(f"{fields.where}: the RoPE base must be above 1 and its factor positive.")
        if not (rope.fast_turns > 0 and rope.slow_turns > 0 and rope.high_freq_factor > rope.low_freq_factor > 0):
            raise BadCheckpoint(f"{fields.where}: the borders of RoPE's fast and slow pairs do not fit each other.")
        if rope.scaling == "dynamic" and rope.factor < 1:
            raise BadCheckpoint(f"{fields.where}: dynamic RoPE needs a factor of at least 1, got {rope.factor}.")
        for divisors in (rope.divisors, rope.short_divisors, rope.long_divisors):
            if divisors and (len(divisors) != config.rotary_dim // 2 or not np.all(np.array(divisors) > 0)):
                raise BadCheckpoint(
                    f"{fields.where}: RoPE needs {config.rotary_dim // 2} positive factors, got {len(divisors)}."
                )
        if rope.scaling == "longrope" and not (rope.short_divisors and rope.long_divisors):
            raise BadCheckpoint(f"{fields.where}: longrope needs short and long factors.")
    return config
