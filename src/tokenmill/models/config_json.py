"""The settings of config.json that have several spellings: windows, RoPE, activations.

RoPE settings stand in `rope_parameters`, by layer type where these differ; older files have `rope_theta` and its like
beside an optional `rope_scaling`. Where a file has both, what counts is what transformers takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.config_key import UNBOUNDED_CONTEXT, Key
from .family import ONE_NORM, PARALLEL, SEQUENTIAL, Family
from .fields import Fields
from .rope import RopeConfig

_NORM_KEYS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
"""Of which a type reads at most one."""

MAX_LAYERS = 10_000
"""More than any model has; a damaged count must not be turned into a list of that length."""

_CONTEXT_KEYS = ("max_position_embeddings", "max_position_embedding")

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu": "gelu_erf",
    "relu2": "relu2",
}  # fmt: skip
"""Names in config.json -> what the decoder calls them: gelu is the tanh form, relu2 the square of what is positive."""

_ACTIVATION_KEYS = ("hidden_activation", "mlp_hidden_act", "hidden_act")
_GATED, _UNGATED, _NOT_OF_EXPERTS = ("silu", "gelu"), ("gelu", "relu2"), ("silu", "gelu_erf")
"""Of which there are kernels."""

_SLIDING, _FULL, _CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
_LINEAR, _MLP, _MOE = "linear_attention", "mlp", "moe"
_INDEXED = "indexed_attention"
"""What layers of a family with an indexer are called."""
_OLDER_KINDS = {"mamba": _LINEAR, "attention": _FULL}
"""What layer_types of older files call them."""

PROPORTIONAL = "proportional"
"""A RoPE scaling: see RopeConfig."""

_SUBLAYERS = {"M": _LINEAR, "*": _FULL, "-": _MLP, "E": _MOE, **_OLDER_KINDS}
"""Signs of `hybrid_override_pattern`, and older names -> what a layer has alone."""

ROPE_KEYS = {
    "rope_type": Key(None, False),
    "type": Key("default", False),
    "rope_theta": Key(None, False),
    "partial_rotary_factor": Key(None, False),
    "factor": Key(None, True),
    "attention_factor": Key(None, True),
    "beta_fast": Key(None, True),
    "beta_slow": Key(None, True),
    "mscale": Key(None, True),
    "mscale_all_dim": Key(None, True),
    "truncate": Key(True, True),
    "original_max_position_embeddings": Key(None, False),
    "low_freq_factor": Key(None, False),
    "high_freq_factor": Key(None, False),
    "short_factor": Key(None, False),
    "long_factor": Key(None, False),
}
QUERY_BETA = "llama_4_scaling_beta"
"""Beside them, of families with scaled queries."""
ROPE_ALPHA = "alpha"
"""Beside them, of families with Family.rope_alpha."""
ROPE_MSCALES = ("short_mscale", "long_mscale")
"""Beside them, of families with Family.rope_mscales."""


@dataclass(frozen=True, slots=True)
class Ropes:
    """full, windowed: of layers without and with a window. fraction: of each head that turns. max_context: the longest
    that the positions are made for, or that is seen whole."""

    full: RopeConfig
    windowed: RopeConfig
    fraction: float
    max_context: int


def read_activation(fields: Fields, family: Family) -> str:
    key = fields.named(next(filter(fields.reads, _ACTIVATION_KEYS), "hidden_act"))
    if family.activation is not None:
        return family.activation
    name = fields.text(key, "")
    known = _ACTIVATIONS | {"gelu": "gelu"} if family.legacy_gelu else _ACTIVATIONS
    done = (_GATED if family.gated else _UNGATED) + (() if family.moe is not None else _NOT_OF_EXPERTS)
    known = {name: kind for name, kind in known.items() if kind in done}
    if name not in known:
        raise BadCheckpoint(
            f"{fields.where}: activation {name!r} ({key}) is not supported (supported: {', '.join(known)})."
        )
    return known[name]


def read_norm_eps(fields: Fields, family: Family) -> float:
    key = next(filter(fields.reads, _NORM_KEYS), None)
    return family.norm_eps if key is None else fields.number(key)


def read_residual(fields: Fields, family: Family) -> str:
    norms = "num_ln_in_parallel_attn"  # Falcon's, which says more
    if fields.reads(norms):
        is_new, is_parallel = fields.flag("new_decoder_architecture"), fields.flag("parallel_attn")
        if not (is_new or is_parallel):
            return SEQUENTIAL
        num_norms = fields.count(norms, 2 if is_new else 1)
        if not is_parallel or num_norms > 1 + is_new:
            raise BadCheckpoint(f"{fields.where}: {norms} and parallel_attn do not fit new_decoder_architecture.")
        return PARALLEL if num_norms == 2 else ONE_NORM
    is_sequential = bool(family.residual_key) and not fields.flag(family.residual_key)
    return SEQUENTIAL if is_sequential else family.residual


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """Each layer's window, 0 for none; layers without positions; those that keep a state, that do not attend, that have
    no FFN. are_chunks: windows are."""

    windows: list[int]
    without_rope: frozenset[int]
    with_state: frozenset[int] = frozenset()
    without_attention: frozenset[int] = frozenset()
    without_ffn: frozenset[int] = frozenset()
    are_chunks: bool = False


def read_num_layers(fields: Fields, family: Family) -> int:
    return len(read_sublayers(fields)) if family.one_sublayer else fields.count("num_hidden_layers", most=MAX_LAYERS)


def read_sublayers(fields: Fields) -> list[str]:
    """What each layer has, of a family whose layers have one thing alone: "linear_attention", "full_attention", "mlp"
    or "moe"."""
    if not fields.reads("layers_block_type"):
        return [_LINEAR] * fields.count("num_hidden_layers", most=MAX_LAYERS)
    listed = fields.get("layers_block_type")
    if listed is None:
        listed = list(fields.text("hybrid_override_pattern", "ME*-"))
    kinds = [_SUBLAYERS.get(str(kind), str(kind)) for kind in listed] if isinstance(listed, list) else []
    if not kinds or not set(kinds) <= {_LINEAR, _FULL, _MLP, _MOE}:
        raise BadCheckpoint(f"{fields.where}: layer_types {listed!r} of such layers are not supported.")
    if fields.get("num_hidden_layers", len(kinds)) != len(kinds):
        raise BadCheckpoint(f"{fields.where}: num_hidden_layers is not the number of layer_types, {len(kinds)}.")
    return kinds


def read_layers(fields: Fields, family: Family, num_layers: int) -> LayerKinds:
    key = "attention_chunk_size" if family.chunks else "sliding_window"
    has_window = fields.get(key) is not None
    if fields.reads("use_sliding_window") and not fields.flag("use_sliding_window"):
        has_window = False
    window = fields.count(key) if has_window else 0
    no_rope = _no_rope(fields, family, num_layers)
    kinds = fields.get("layer_types")
    if kinds is None:
        kinds = _kinds(fields, family, has_window, no_rope, num_layers)
        listed = fields.metadata.get("layer_types", kinds)
        if listed not in (kinds, None):
            raise BadCheckpoint(f"{fields.where}: layer_types of a {family.title} that differ are not supported.")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise BadCheckpoint(f"{fields.where}: layer_types must be a list of {num_layers}.")
    older = {_INDEXED: _FULL} if family.indexed else _OLDER_KINDS
    if family.chunks:
        older = {_CHUNKED: _SLIDING, _SLIDING: ""}
    kinds = [older.get(str(kind), kind) for kind in kinds]
    if family.full_last:
        kinds = [*kinds[:-1], _FULL]
    with_state = frozenset(layer for layer, kind in enumerate(kinds) if family.mixer and kind == family.mixer_layers)
    known = {_SLIDING, _FULL, *([family.mixer_layers] if family.mixer else ())}
    known |= {_MLP, _MOE} if family.one_sublayer else set()
    if unknown := set(map(str, kinds)) - known:
        raise BadCheckpoint(f"{fields.where}: layer_types has {sorted(unknown)}, which are not supported.")
    if _SLIDING in kinds and not has_window:
        raise BadCheckpoint(f"{fields.where}: layers of sliding_attention need a {key}; there is none.")
    if family.no_rope_on_full and has_window:
        no_rope = frozenset(layer for layer, kind in enumerate(kinds) if kind == _FULL)
    if not family.rope or (family.rope_if and fields.get(family.rope_if[0]) != family.rope_if[1]):
        no_rope = frozenset(range(num_layers))
    windows = [window if kind == _SLIDING else 0 for kind in kinds]
    if family.mixer_beside:
        return LayerKinds(windows, no_rope, frozenset(range(num_layers)))
    if not family.one_sublayer:
        return LayerKinds(windows, no_rope, with_state, with_state, are_chunks=family.chunks)
    attending, mixing = (
        {layer for layer, kind in enumerate(kinds) if kind in some} for some in ((_FULL,), (_FULL, _LINEAR))
    )
    return LayerKinds(windows, no_rope, with_state, frozenset(range(num_layers)) - attending, frozenset(mixing))


def read_ffn_width(fields: Fields, width: int) -> int:
    """Falcon's is four times the model's where it is not said. LFM2's may follow from another number, by SwiGLU's two
    thirds, a factor, and a multiple to round up to."""
    if fields.reads("block_ff_dim") and "block_ff_dim" in fields.metadata:
        width = fields.count("block_ff_dim")
    elif fields.reads("mamba_n_heads") and fields.reads("shared_intermediate_size"):  # Granite 4, without experts too
        shared = fields.count("shared_intermediate_size")
        return fields.count("intermediate_size") if fields.count("num_local_experts", least=0) else shared
    elif fields.reads("intermediate_size_mlp"):
        width = fields.count("intermediate_size_mlp")
    else:  # where all layers have experts there may be no other width; a model may have no FFN
        key = next(filter(fields.reads, ("intermediate_size", "moe_intermediate_size")), "")
        width = fields.count(key, 4 * width, least=0) if key else 0
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if fields.get("block_ffn_dim_multiplier") is not None:
        multiple = fields.count("block_multiple_of")
        width = -(-int(fields.number("block_ffn_dim_multiplier") * width) // multiple) * multiple
    return width


def read_tied(fields: Fields) -> bool:
    """Whether the head is the embeddings; LFM2's own key for it goes before the common one."""
    return fields.flag("tie_word_embeddings" if fields.get("tie_embedding") is None else "tie_embedding")


def _no_rope(fields: Fields, family: Family, num_layers: int) -> frozenset[int]:
    if not family.no_rope_every:
        return frozenset()
    flags = fields.get("no_rope_layers")
    if flags is None:
        every = fields.count("no_rope_layer_interval")
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % every == 0)
    if not isinstance(flags, list) or len(flags) < num_layers:
        raise BadCheckpoint(f"{fields.where}: no_rope_layers must be a list of {num_layers}.")
    return frozenset(layer for layer in range(num_layers) if not flags[layer])


def _kinds(fields: Fields, family: Family, has_window: bool, no_rope: frozenset[int], num_layers: int) -> list[str]:
    """The kind of each layer, of a file that does not list them."""
    layers = range(num_layers)
    if family.mixer:
        return _mixer_kinds(fields, family, num_layers)
    for key in filter(fields.reads, ("sliding_window_pattern", "global_attn_every_n_layers")):
        every = fields.count(key)
        return [_SLIDING if (layer + 1) % every else _FULL for layer in layers]
    if family.window_every:
        return [_SLIDING if family.has_window(layer) else _FULL for layer in layers]
    if not has_window:
        return [_FULL] * num_layers
    if family.chunks:
        return [_FULL if layer in no_rope else _CHUNKED for layer in layers]
    if family.window_on_no_rope:
        return [_SLIDING if layer in no_rope else _FULL for layer in layers]
    first = fields.count("max_window_layers", 0, least=0)
    return [_SLIDING if layer >= first else _FULL for layer in layers]


def _mixer_kinds(fields: Fields, family: Family, num_layers: int) -> list[str]:
    """Which layers attend, of a file that says so by their numbers or by their distance; else none does, or all."""
    if family.mixer_beside:
        return [_FULL] * num_layers
    if family.one_sublayer:
        return read_sublayers(fields)
    if fields.reads("attn_layer_period"):
        every, first = read_period(fields, "attn_layer")
        return [_FULL if layer % every == first else family.mixer_layers for layer in range(num_layers)]
    for key in ("full_attn_idxs", "attn_layer_indices"):
        if fields.reads(key):
            listed = fields.get(key, None if key == "full_attn_idxs" else [])
            attending = set(range(num_layers)) if listed is None else set(listed)
            return [_FULL if layer in attending else family.mixer_layers for layer in range(num_layers)]
    if fields.reads("full_attention_interval"):
        every = fields.count("full_attention_interval")
        return [family.mixer_layers if (layer + 1) % every else _FULL for layer in range(num_layers)]
    return [family.mixer_layers] * num_layers


def read_period(fields: Fields, what: str) -> tuple[int, int]:
    """-> (n, the first) of every n-th layer. Raises BadCheckpoint."""
    every, first = fields.count(f"{what}_period"), fields.count(f"{what}_offset", least=0)
    if first >= every:
        raise BadCheckpoint(f"{fields.where}: {what}_offset must be below {what}_period, {every}.")
    return every, first


def read_ropes(fields: Fields, family: Family) -> Ropes:
    context_key = next(filter(fields.reads, _CONTEXT_KEYS), None)
    max_positions = UNBOUNDED_CONTEXT if context_key is None else fields.count(context_key)
    if not family.rope:
        return Ropes(RopeConfig(10000.0), RopeConfig(10000.0), 1.0, max_positions)
    parameters, scaling = read_object(fields, "rope_parameters"), read_object(fields, "rope_scaling")
    if fields.get("rope_parameters") is None:
        parameters = family.rope_default
    if family.local_rope:
        if fields.get("rope_scaling") is not None:
            _check_mixed(fields, parameters, scaling)
        full = {**_nested(fields, parameters, _FULL), **scaling}
        local = _nested(fields, parameters, _SLIDING)
        base = local_base = None
        if fields.reads("rope_theta"):
            base = fields.number("rope_theta")
            local_base = fields.number("rope_local_base_freq", fields.meaning_of_missing("rope_theta"))
        rope, fraction, _ = _read_rope(fields, family, full, base, max_positions)
        windowed, _, _ = _read_rope(fields, family, local, local_base, max_positions)
        return Ropes(rope, windowed, fraction, max_positions)
    given = scaling or parameters
    if any(isinstance(value, Mapping) for value in given.values()):
        raise BadCheckpoint(f"{fields.where}: rope_parameters by layer type of a {family.title} are not supported.")
    rope, fraction, longest = _read_rope(fields, family, given, fields.number("rope_theta"), max_positions)
    if family.scaled_queries:
        rope = _with_scaled_queries(fields, given, rope)
    if family.indexed:
        longest = min(longest, fields.count("index_topk"))
    return Ropes(rope, rope, fraction, longest)


def read_inputs(fields: Fields) -> tuple[int, int]:
    """As ModelConfig.input_width and input_vocab. Raises BadCheckpoint."""
    if not fields.reads("hidden_size_per_layer_input"):
        return 0, 0
    vocab, least = fields.count("vocab_size_per_layer_input"), fields.count("vocab_size")
    width = fields.count("hidden_size_per_layer_input", least=0)
    if width and vocab < least:
        raise BadCheckpoint(f"{fields.where}: vocab_size_per_layer_input = {vocab} is not supported below {least}.")
    return width, vocab if width else 0


def read_still(fields: Fields) -> RopeConfig | None:
    """Of layers whose queries and keys do not turn: how queries grow with their position all the same, of Llama 4."""
    if not fields.reads("attn_temperature_tuning") or not fields.flag("attn_temperature_tuning"):
        return None
    beta, context = fields.number("attn_scale"), fields.count("floor_scale")
    return RopeConfig(1e4, PROPORTIONAL, share=0.0, query_beta=beta, original_context=context, query_first=1)


def _with_scaled_queries(fields: Fields, given: Mapping[str, Any], rope: RopeConfig) -> RopeConfig:
    original = "original_max_position_embeddings"
    read = Fields(given, f"{fields.where} (rope)", {QUERY_BETA: Key(None, False), original: ROPE_KEYS[original]})
    context = rope.original_context if rope.scaling == "yarn" else read.count(original)
    return replace(rope, query_beta=read.number(QUERY_BETA), original_context=context)


def _check_mixed(fields: Fields, parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    """Old and new spelling in one file, of a model whose layer types differ."""
    if ("type" in scaling and "rope_type" not in scaling) or (
        fields.get("rope_parameters") is not None and not parameters.get(_FULL)
    ):
        raise BadCheckpoint(f"{fields.where}: this rope_scaling of a model with two kinds of layer is not supported.")


def read_object(fields: Fields, key: str) -> Mapping[str, Any]:
    """Empty where there is none. Raises BadCheckpoint for what is no object."""
    value = fields.get(key, {})
    if not isinstance(value, Mapping):
        raise BadCheckpoint(f"{fields.where}: {key} must be an object, got {type(value).__name__}.")
    return value


def _nested(fields: Fields, parameters: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The settings of one kind of layer; empty where there are none."""
    value = parameters.get(kind)
    if value is not None and not isinstance(value, Mapping):
        raise BadCheckpoint(f"{fields.where}: rope_parameters.{kind} must be an object, got {type(value).__name__}.")
    return value or {}


def _read_rope(
    fields: Fields, family: Family, given: Mapping[str, Any], base: float | None, max_positions: int
) -> tuple[RopeConfig, float, int]:
    """-> (one layer type's RoPE, the fraction of a head that turns, the longest context it was scaled for). `base`:
    where `given` has none; None: it must have one."""
    rope = Fields(given, f"{fields.where} (rope)", ROPE_KEYS)
    base = rope.number("rope_theta", base)
    name = rope.text("rope_type", rope.text("type", ""))
    scaling = family.rope_names.get(name, "") if family.rope_names else name
    if scaling == PROPORTIONAL and family.local_rope:
        share = rope.number("partial_rotary_factor", 1.0)
        return RopeConfig(base, scaling, rope.number("factor", 1.0), share=share), 1.0, max_positions
    fraction = _fraction(fields, family, rope)
    if scaling == "dynamic" and family.rope_alpha and given.get(ROPE_ALPHA):
        rope.number("factor")  # which must be there, and does nothing
        alpha = replace(rope, keys={ROPE_ALPHA: Key(None, False)}).number(ROPE_ALPHA, positive=True)
        return RopeConfig(base, "ntk", alpha), fraction, max_positions
    if scaling in ("default", "mrope"):  # mrope: parts of a head turn by a position's row and column in an image
        return RopeConfig(base), fraction, max_positions
    original = _original(fields, family, rope, max_positions)
    if scaling == "longrope":
        longrope = _longrope(rope, base, original, max_positions)
        return _with_mscale(rope, longrope) if family.rope_mscales else longrope, fraction, max_positions
    if scaling not in ("linear", "dynamic", "llama3", "yarn"):
        raise BadCheckpoint(
            f"{rope.where}: scaling {name!r} is not supported (supported: default, linear, dynamic, yarn, longrope,"
            " llama3)."
        )
    factor = rope.number("factor", positive=True)
    longest = max(max_positions, round(factor * original))
    if scaling == "linear":
        return RopeConfig(base, scaling, factor), fraction, longest
    if scaling == "dynamic":
        return RopeConfig(base, scaling, factor, original_context=max_positions), fraction, longest
    if scaling == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        return RopeConfig(base, scaling, factor, low, high, original), fraction, max_positions
    return _yarn(rope, base, factor, original), fraction, longest


def _fraction(fields: Fields, family: Family, rope: Fields) -> float:
    key = "partial_rotary_factor"
    if fields.reads(key):
        turned = fields.get("rotary_dim")
        says_channels = turned is not None and key not in fields.metadata
        share = fields.count("rotary_dim") / fields.count("head_dim") if says_channels else fields.number(key)
        return rope.number(key, share)
    for given in (rope, fields):
        if given.metadata.get(key, 1) not in ((1,) if given is rope else (None, 1)):
            raise BadCheckpoint(f"{given.where}: {key} = {given.metadata[key]!r} of a {family.title} is not supported.")
    return 1.0


def _original(fields: Fields, family: Family, rope: Fields, max_positions: int) -> int:
    """The context before scaling. What stands beside the RoPE settings goes before what stands in them, unless these
    differ by layer type."""
    key = "original_max_position_embeddings"
    if fields.get(key) is not None and not family.local_rope:
        return fields.count(key)
    return rope.count(key, max_positions)


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
        fast_turns=rope.number("beta_fast", 0.0) or 32.0,
        slow_turns=rope.number("beta_slow", 0.0) or 1.0,
        whole_pairs=bool(rope.get("truncate", False)),
        cos_scale=rope.number("attention_factor", inferred),
    )


def _with_mscale(rope: Fields, longrope: RopeConfig) -> RopeConfig:
    scales = replace(rope, keys=dict.fromkeys(ROPE_MSCALES, Key(None, False)))
    short, long = map(scales.number, ROPE_MSCALES)
    if short != long:
        raise BadCheckpoint(f"{rope.where}: {' and '.join(ROPE_MSCALES)} that differ are not supported.")
    return replace(longrope, cos_scale=short)


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
