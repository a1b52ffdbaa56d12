"""Layers that keep a state in place of keys and values: what a family declares of them, their shape, and their part of
the forward pass.

    SHORT_CONV   LFM2's: b * x through a convolution over a few positions, times c
    GATED_DELTA  Qwen3-Next's and Qwen3.5's gated delta networks (Yang, Kautz and Hatamizadeh, arXiv 2412.06464)
    MAMBA        Mamba's selective scan (Gu and Dao, arXiv 2312.00752), also with Jamba's norms
    MAMBA2       Mamba-2's (Dao and Gu, arXiv 2405.21060)

    T tokens  D model width  W channels of the convolution  H heads  X columns of keys or of values  r channels that
    steps are made of  K channels of keys
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.errors import BadCheckpoint
from ..ops.api import BY_VALUE, Array, StateGeometry, Weight
from ..ops.forward import ForwardOps
from .fields import Fields

SHORT_CONV, GATED_DELTA, MAMBA, MAMBA2 = "short_conv", "gated_delta", "mamba", "mamba2"

KEY_EPS = 1e-6
"""Of the norms that queries and keys of a gated delta network have."""

_INFINITY = {"{'__float__': 'Infinity'}": math.inf, "inf": math.inf, "Infinity": math.inf}
"""How transformers writes it."""

_MAMBA_KEYS = {
    "heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "head_dim": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "groups": ("mamba_n_groups", "n_groups"),
    "state": ("mamba_d_state", "ssm_state_size", "state_size"),
    "taps": ("mamba_d_conv", "conv_kernel"),
    "expand": ("mamba_expand", "expand"),
}
"""Names of one setting, of which a type reads one, or none where it follows from others."""
OLDER_KEYS = ("mamba_n_groups", "mamba_d_conv", "mamba_dt_min", "mamba_conv_bias")
"""That go before the names which Nemotron-H has now."""

STEP_NORMS = ("mixer_dt_norm", "mixer_b_norm", "mixer_c_norm")
"""Of what steps are made of, of B and of C."""

GATED, PLAIN, UNNORMED = "gated", "plain", ""
"""What MAMBA2 norms: what the recurrence gives times its gate, or before, or nothing."""

ROLES: Mapping[str, tuple[str, ...]] = {
    SHORT_CONV: ("mixer_in", "conv"),
    GATED_DELTA: ("mixer_qkv", "mixer_z", "mixer_b", "mixer_a", "conv", "dt_bias", "a_log", "mixer_norm"),
    MAMBA: ("mixer_in", "conv", "mixer_x", "mixer_dt", "a_log", "skip", *STEP_NORMS),
    MAMBA2: ("mixer_in", "conv", "dt_bias", "a_log", "skip", "mixer_norm"),
}
"""Roles of a layer's tensors, beside its output's and those that all layers have."""


@dataclass(frozen=True, slots=True)
class MixerConfig:
    """kind        SHORT_CONV, GATED_DELTA, MAMBA or MAMBA2
    state       what a layer keeps
    eps         of the norm of what the recurrence gives, or of STEP_NORMS
    limits      of the steps of MAMBA2
    group       columns that are normed together
    normed      GATED, PLAIN or UNNORMED
    scales      of MAMBA2: what gates, values, B, C and what steps are made of are multiplied by; empty: by 1
    rank        of MAMBA: channels that steps are made of
    step_norms  of MAMBA: "" none, "weights", or "plain" without weights
    """

    kind: str
    state: StateGeometry
    eps: float = 0.0
    limits: tuple[float, float] = (0.0, math.inf)
    group: int = 0
    normed: str = GATED
    scales: tuple[float, ...] = ()
    rank: int = 0
    step_norms: str = ""

    @property
    def roles(self) -> tuple[str, ...]:
        """Of ROLES, those that a layer has."""
        without = (() if self.normed else ("mixer_norm",)) + (() if self.step_norms == "weights" else STEP_NORMS)
        return tuple(role for role in ROLES[self.kind] if role not in without)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of what the layer's input becomes, part by part: of SHORT_CONV b, c and x; of GATED_DELTA what is
        convolved, gates, factors and steps; of MAMBA what is convolved, and gates; of MAMBA2 gates, what is convolved,
        and steps."""
        state = self.state
        if self.kind == SHORT_CONV:
            return (state.conv_width,) * 3
        if self.kind == GATED_DELTA:
            return state.conv_width, state.values_width, state.num_heads, state.num_heads
        if self.kind == MAMBA:
            return state.conv_width, state.values_width
        return state.values_width, state.conv_width, state.num_heads

    @property
    def out_width(self) -> int:
        """Inputs of the layer's last linear."""
        return self.state.conv_width if self.kind == SHORT_CONV else self.state.values_width

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """Role -> shape of its weight."""
        state, heads = self.state, (self.state.num_heads,)
        shapes: dict[str, tuple[int, ...]] = {
            "mixer_in": (sum(self.widths), width),
            "conv": (state.conv_width, 1, state.taps),
            "mixer_out": (width, self.out_width),
            "dt_bias": heads,
            "a_log": heads,
            "skip": heads,
            "mixer_norm": (state.value_dim,) if self.kind == GATED_DELTA else (state.values_width,),
        }
        if self.kind == GATED_DELTA:
            qkv, z, b, a = self.widths
            rows = {
                "mixer_qkv": qkv,
                "mixer_z": z,
                "mixer_b": b,
                "mixer_a": a,
                "mixer_qkvz": qkv + z,
                "mixer_ba": b + a,
            }
            shapes |= {name: (count, width) for name, count in rows.items()}
        if self.kind == MAMBA:
            values, keys = state.values_width, state.key_dim
            shapes |= {"mixer_x": (self.rank + 2 * keys, values), "mixer_dt": (values, self.rank)}
            shapes |= {"a_log": (values, keys), "skip": (values,)}
            shapes |= {role: (size,) for role, size in zip(STEP_NORMS, (self.rank, keys, keys), strict=True)}
        return shapes


@dataclass(frozen=True, slots=True)
class BranchScales:
    """What a layer's branches are multiplied by: what attention and a mixer are given and give; of an FFN the gates,
    before their activation, and what it gives."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_in: float = 1.0
    mixer_out: float = 1.0
    gate: float = 1.0
    ffn_out: float = 1.0


def hf_branches(fields: Fields) -> BranchScales:
    """From config.json. Raises BadCheckpoint."""
    ffn = fields.numbers("mlp_multipliers") if fields.get("mlp_multipliers") is not None else (1.0, 1.0)
    if len(ffn) != 2:
        raise BadCheckpoint(f"{fields.where}: mlp_multipliers must be two numbers.")
    return BranchScales(
        attention_in=fields.number("attention_in_multiplier", 1.0),
        attention_out=fields.number("attention_out_multiplier", 1.0),
        mixer_in=fields.number("ssm_in_multiplier", 1.0),
        mixer_out=fields.number("ssm_out_multiplier", 1.0),
        gate=ffn[0],
        ffn_out=ffn[1],
    )


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """conv      [taps, W]
    conv_bias    [W], where it has one
    rates        [H], of the decay, all negative; of MAMBA [K, W]
    dt_bias      [H], of MAMBA [W]
    skip         [H], of MAMBA2; of MAMBA [W]
    keys_norm    [2 * keys], of GATED_DELTA: what makes rms_norm of a query or key its division by its length, and of a
                 query the scale of scores beside
    norm         [values]
    x, dt        of MAMBA: the linears to what steps are made of, B and C, and to steps
    step_norms   weights of STEP_NORMS
    """

    conv: Array
    conv_bias: Array | None = None
    rates: Array | None = None
    dt_bias: Array | None = None
    skip: Array | None = None
    keys_norm: Array | None = None
    norm: Array | None = None
    x: Weight | None = None
    dt: Weight | None = None
    step_norms: tuple[Array, ...] = ()


def keys_norm(state: StateGeometry) -> np.ndarray:
    """See MixerWeights: x / sqrt(sum(x^2) + eps) is rms_norm of x with eps / key_dim, times key_dim^-1/2."""
    scale = state.key_dim**-0.5
    return np.repeat(np.array([scale * scale, scale], np.float32), state.keys_width)


def mix(
    ops: ForwardOps, mixer: MixerConfig, weights: MixerWeights, layer_kv: tuple[Any, int], batch: Any, mixed_TX: Array
) -> Array:
    """[T, out_width] from what the layer's input became (MixerConfig.widths)."""
    starts = np.cumsum((0, *mixer.widths)).tolist()
    parts = [ops.columns(mixed_TX, first, width) for first, width in zip(starts, mixer.widths, strict=False)]
    makers: Mapping[str, Callable[..., Array]] = {
        SHORT_CONV: _short_conv,
        GATED_DELTA: _gated_delta,
        MAMBA: _mamba,
        MAMBA2: _mamba2,
    }
    return makers[mixer.kind](ops, mixer, weights, layer_kv, batch, *parts)


def _short_conv(
    ops: ForwardOps,
    mixer: MixerConfig,
    weights: MixerWeights,
    layer_kv: tuple[Any, int],
    batch: Any,
    b_TW: Array,
    c_TW: Array,
    x_TW: Array,
) -> Array:
    inputs_TW = ops.multiply(b_TW, x_TW)
    return ops.multiply(
        c_TW, ops.causal_conv(*layer_kv, inputs_TW, weights.conv, weights.conv_bias, batch, mixer.state)
    )


def _gated_delta(
    ops: ForwardOps,
    mixer: MixerConfig,
    weights: MixerWeights,
    layer_kv: tuple[Any, int],
    batch: Any,
    qkv_TW: Array,
    z_TX: Array,
    b_TH: Array,
    a_TH: Array,
) -> Array:
    state = mixer.state
    qkv_TW = ops.causal_conv(*layer_kv, qkv_TW, weights.conv, weights.conv_bias, batch, state, silu=True)
    keys_TX = ops.columns(qkv_TW, 0, 2 * state.keys_width)
    keys_TX = ops.norm_groups(keys_TX, weights.keys_norm, state.key_dim, KEY_EPS / state.key_dim)
    values_TX = ops.columns(qkv_TW, 2 * state.keys_width, state.values_width)
    gates_T2H = ops.scan_gates(a_TH, b_TH, weights.rates, weights.dt_bias, state)
    out_TX = ops.state_scan(*layer_kv, keys_TX, values_TX, gates_T2H, batch, state)
    out_TX = ops.norm_groups(out_TX, weights.norm, mixer.group, mixer.eps)
    return ops.multiply(out_TX, ops.silu(z_TX))


def _mamba(
    ops: ForwardOps,
    mixer: MixerConfig,
    weights: MixerWeights,
    layer_kv: tuple[Any, int],
    batch: Any,
    x_TW: Array,
    z_TX: Array,
) -> Array:
    state, keys = mixer.state, mixer.state.key_dim
    assert weights.x is not None and weights.dt is not None
    x_TW = ops.causal_conv(*layer_kv, x_TW, weights.conv, weights.conv_bias, batch, state, silu=True)
    made_TX = ops.linear(x_TW, weights.x)
    places = ((0, mixer.rank), (mixer.rank, keys), (mixer.rank + keys, keys))
    dt_Tr, b_TK, c_TK = (ops.columns(made_TX, first, width) for first, width in places)
    if weights.step_norms:
        dt_Tr, b_TK, c_TK = (
            ops.rms_norm(part, norm, mixer.eps)
            for part, norm in zip((dt_Tr, b_TK, c_TK), weights.step_norms, strict=True)
        )
    steps_TX = ops.scan_gates(ops.linear(dt_Tr, weights.dt), None, None, weights.dt_bias, state)
    keys_TX = ops.join_columns([c_TK, b_TK])
    out_TX = ops.state_scan(*layer_kv, keys_TX, x_TW, steps_TX, batch, state, skip=weights.skip, rates_KX=weights.rates)
    return ops.multiply(out_TX, ops.silu(z_TX))


def _mamba2(
    ops: ForwardOps,
    mixer: MixerConfig,
    weights: MixerWeights,
    layer_kv: tuple[Any, int],
    batch: Any,
    z_TX: Array,
    xbc_TW: Array,
    dt_TH: Array,
) -> Array:
    state = mixer.state
    if mixer.scales:  # of what is convolved they are in the weights of the convolution
        z_TX, dt_TH = ops.scale(z_TX, mixer.scales[0]), ops.scale(dt_TH, mixer.scales[-1])
    xbc_TW = ops.causal_conv(*layer_kv, xbc_TW, weights.conv, weights.conv_bias, batch, state, silu=True)
    values_TX = ops.columns(xbc_TW, 0, state.values_width)
    b_TX, c_TX = (
        ops.columns(xbc_TW, state.values_width + place * state.keys_width, state.keys_width) for place in (0, 1)
    )
    gates_T2H = ops.scan_gates(dt_TH, None, weights.rates, weights.dt_bias, state, limits=mixer.limits)
    keys_TX = ops.join_columns([c_TX, b_TX])
    out_TX = ops.state_scan(*layer_kv, keys_TX, values_TX, gates_T2H, batch, state, skip=weights.skip)
    if mixer.normed == PLAIN:
        out_TX = ops.norm_groups(out_TX, weights.norm, mixer.group, mixer.eps)
    out_TX = ops.multiply(out_TX, ops.silu(z_TX))
    return ops.norm_groups(out_TX, weights.norm, mixer.group, mixer.eps) if mixer.normed == GATED else out_TX


def conv_scales(mixer: MixerConfig) -> np.ndarray | None:
    """[W], which the weights of MAMBA2's convolution are multiplied by."""
    if not mixer.scales:
        return None
    state = mixer.state
    widths = (state.values_width, state.keys_width, state.keys_width)
    return np.repeat(np.array(mixer.scales[1:4], np.float32), widths)


def hf_mixer(fields: Fields, kind: str, width: int, eps: float) -> MixerConfig:
    """From config.json. Raises BadCheckpoint."""
    act = fields.get("mamba_hidden_act" if fields.reads("mamba_hidden_act") else "hidden_act", "silu")
    if kind != SHORT_CONV and act not in ("silu", "swish"):
        raise BadCheckpoint(f"{fields.where}: activation {act!r} of a mixer is not supported (supported: silu).")
    if kind == SHORT_CONV:
        return _checked(MixerConfig(kind, StateGeometry(width, fields.count("conv_L_cache"))), fields)
    if kind == GATED_DELTA:
        state = StateGeometry(
            conv_width=0,
            taps=fields.count("linear_conv_kernel_dim"),
            num_heads=fields.count("linear_num_value_heads"),
            num_key_heads=fields.count("linear_num_key_heads"),
            key_dim=fields.count("linear_key_head_dim"),
            value_dim=fields.count("linear_value_head_dim"),
            is_delta=True,
        )
        return _checked(MixerConfig(kind, _with_width(state), eps, group=state.value_dim), fields)
    return _mamba_config(fields, width, eps) if kind == MAMBA else _mamba2_config(fields, width, eps)


def _mamba_config(fields: Fields, width: int, eps: float) -> MixerConfig:
    key = {what: next(filter(fields.reads, names), "") for what, names in _MAMBA_KEYS.items()}
    values = fields.count(key["expand"]) * width
    rank_key = next(filter(fields.reads, ("mamba_dt_rank", "time_step_rank")))
    if rank_key == "time_step_rank":  # of a model without FFNs
        values = fields.count("intermediate_size", values)
    rank = -(-width // 16) if fields.get(rank_key) == "auto" else fields.count(rank_key)
    state = StateGeometry(values, fields.count(key["taps"]), 1, 1, fields.count(key["state"]), values, decay=BY_VALUE)
    if fields.reads("mixer_rms_eps"):
        eps, norms = fields.number("mixer_rms_eps"), "plain"
    else:
        norms = "weights" if rank_key == "mamba_dt_rank" else ""
    return _checked(MixerConfig(MAMBA, state, eps, rank=rank, step_norms=norms), fields)


def _mamba2_config(fields: Fields, width: int, eps: float) -> MixerConfig:
    key = {what: next(filter(fields.reads, names), "") for what, names in _MAMBA_KEYS.items()}
    is_older = fields.reads("mamba_num_heads")
    older = [name for name in OLDER_KEYS if is_older and name in fields.metadata]
    if older:
        raise BadCheckpoint(f"{fields.where}: older names of settings are not supported: {', '.join(older)}.")
    heads, groups = fields.count(key["heads"]), fields.count(key["groups"])
    values = fields.count(key["expand"]) * width if key["expand"] else heads * fields.count(key["head_dim"])
    if fields.get("mamba_d_ssm") is not None:
        values = fields.count("mamba_d_ssm")
    head_dim = values // heads if fields.get(key["head_dim"]) == "auto" else fields.count(key["head_dim"])
    if heads * head_dim != values or values % groups:
        raise BadCheckpoint(
            f"{fields.where}: {heads} heads of {head_dim} in {groups} groups are not {values} channels."
        )
    state = StateGeometry(
        conv_width=0,
        taps=fields.count(key["taps"]),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=fields.count(key["state"]),
        value_dim=head_dim,
    )
    mixer = MixerConfig(MAMBA2, _with_width(state), eps, _step_limits(fields), values // groups)
    if fields.reads("mamba_rms_norm"):
        normed = PLAIN if fields.flag("mamba_norm_before_gate") else GATED
        mixer = replace(mixer, normed=normed if fields.flag("mamba_rms_norm") else UNNORMED)
    if fields.get("ssm_multipliers") is not None:
        mixer = replace(mixer, scales=fields.numbers("ssm_multipliers"))
        if len(mixer.scales) != 5:
            raise BadCheckpoint(f"{fields.where}: ssm_multipliers must be five numbers.")
    return _checked(mixer, fields)


def gguf_mixer(fields: Fields, kind: str, width: int, eps: float) -> MixerConfig:
    """From a GGUF file's keys. Raises BadCheckpoint."""
    if kind == SHORT_CONV:
        return _checked(MixerConfig(kind, StateGeometry(width, fields.count("shortconv.l_cache"))), fields)
    values, heads = fields.count("ssm.inner_size"), fields.count("ssm.time_step_rank")
    groups = fields.count("ssm.group_count")
    if values % heads or values % groups:
        raise BadCheckpoint(f"{fields.where}: {heads} heads in {groups} groups are not {values} channels.")
    state = StateGeometry(
        conv_width=0,
        taps=fields.count("ssm.conv_kernel"),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=fields.count("ssm.state_size"),
        value_dim=values // heads,
        is_delta=kind == GATED_DELTA,
    )
    normed = state.value_dim if state.is_delta else values // groups
    return _checked(MixerConfig(kind, _with_width(state), eps, group=normed), fields)


def gguf_state_layers(fields: Fields, kind: str, num_layers: int) -> frozenset[int]:
    """Which layers keep a state, of a GGUF file of a family with a mixer: of gated delta networks those that it lists,
    or all but each n-th; of others those without heads of keys. Raises BadCheckpoint."""
    if kind == GATED_DELTA:
        every = fields.count("full_attention_interval", 4)
        listed = fields.get("attention.recurrent_layers", [(layer + 1) % every for layer in range(num_layers)])
    else:
        counts = fields.get("attention.head_count_kv")
        listed = [not count for count in counts] if isinstance(counts, list) else counts
    if not isinstance(listed, list) or len(listed) < num_layers:
        raise BadCheckpoint(f"{fields.where}: which of {num_layers} layers attend is not listed.")
    layers = frozenset(layer for layer in range(num_layers) if listed[layer])
    if len(layers) == num_layers:
        raise BadCheckpoint(f"{fields.where}: models without a layer of attention are not supported.")
    return layers


def _step_limits(fields: Fields) -> tuple[float, float]:
    if not fields.reads("time_step_limit"):
        return fields.number("time_step_min"), math.inf
    given = fields.get("time_step_limit", (0.0, math.inf))
    limits: list[Any] = [_INFINITY.get(str(each), each) for each in given] if isinstance(given, (list, tuple)) else []
    if (
        len(limits) != 2
        or not all(isinstance(each, (int, float)) for each in limits)
        or not 0 <= limits[0] <= limits[1]
    ):
        raise BadCheckpoint(f"{fields.where}: time_step_limit must be two numbers, got {given!r}.")
    return float(limits[0]), float(limits[1])


def _with_width(state: StateGeometry) -> StateGeometry:
    """Queries, keys and values go through the convolution."""
    return replace(state, conv_width=2 * state.keys_width + state.values_width)


def _checked(mixer: MixerConfig, fields: Fields) -> MixerConfig:
    state = mixer.state
    if not 1 <= state.taps <= 16:
        raise BadCheckpoint(f"{fields.where}: a convolution over {state.taps} positions is not supported (1 to 16).")
    if state.num_heads and (state.num_heads % state.num_key_heads or state.key_dim % 4 or state.value_dim % 16):
        raise BadCheckpoint(
            f"{fields.where}: {state.num_heads} heads of states with {state.num_key_heads} of keys, [{state.key_dim},"
            f" {state.value_dim}], are not supported (keys in fours, values in sixteens, heads that divide)."
        )
    return mixer
