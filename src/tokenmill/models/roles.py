"""Which tensors a layer has, by role, with their names and shapes.

    attention over heads       q, k, v (or qkv); attn_gate where gates have a matrix of their own
    latent attention           q_a, q_a_norm, q_b (or q), kv_a, kv_a_norm, kv_b (or k_b and v_b)
    low-rank queries           q_a, q_a_norm, q_b, k, v
    all of these               output; q_norm, k_norm, sinks where the family has them
    mixer                      those of MixerConfig.roles, mixer_out
    FFN                        gate, up (or gate_up), down
    mixture of experts         router, choice_bias; router_norm, experts_norm, experts_post_norm, shared_post_norm,
                               expert_scales; expert_gate, expert_up (or expert_gate_up), expert_down;
                               shared_gate, shared_up (or shared_gate_up), shared_down,
                               shared_mix
    norms                      attn_norm, attn_post_norm, ffn_norm, ffn_post_norm
    inputs by layer            input_gate, input_up, input_norm
    residual stream            layer_scale

Shapes are outermost first: of a matrix (outputs, inputs), of an expert's matrices stored as one tensor (experts,
outputs, inputs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .config import LayerConfig, ModelConfig
from .family import HEADS, LATENT_HEADS, LOW_RANK, ONE_NORM
from .moe import MERGED, ONE_BY_ONE, PAIRED, SPLIT
from .tensor_names import LAYER_NAMES, SPLIT_NAMES, WHOLE_NAMES, global_names

NORMS = frozenset({
    "attn_norm", "ffn_norm", "attn_post_norm", "ffn_post_norm", "input_norm", "experts_norm", "experts_post_norm",
    "shared_post_norm",
})  # fmt: skip
"""Roles of norms over the model's width, which have the tensors that the family's norms do."""

OWN_NORMS = ("router_norm", "expert_scales", "experts_norm", "experts_post_norm", "shared_post_norm")
"""Roles of a mixture of experts whose parts have norms of their own."""

EXPERT_ROLES = ("expert_gate", "expert_up", "expert_gate_up", "expert_down")
"""Roles that have a matrix for each expert."""

_STACKED = {
    "qkv": ("q_a", "q", "attn_gate", "k", "v", "kv_a"),
    "mixer_in": ("mixer_qkv", "mixer_z", "mixer_qkvz", "mixer_b", "mixer_a", "mixer_ba"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "expert_gate_up": ("expert_gate", "expert_up"),
}

_FUSED = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
    "mixer_qkvz": ("mixer_qkv", "mixer_z"),
    "mixer_ba": ("mixer_b", "mixer_a"),
}
"""Role of Family.fused -> those that it stands for."""


def layer_roles(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Roles that this layer has a tensor for."""
    family, kind = config.family, config.layers[layer]
    roles: tuple[str, ...] = ()
    if kind.attends:
        roles += (*_attention_roles(config, kind), "output")
        roles += ("sinks",) if family.sinks else ()
        norms = ("q_norm", "k_norm") if kind.kv_layer is None else ("q_norm",)
        roles += norms if config.qk_norm and not family.bare_qk_norm else ()
    if kind.keeps_state:
        assert config.mixer is not None
        roles += (*config.mixer.roles, "mixer_out")
    if kind.is_moe:
        roles += _moe_roles(config)
    elif kind.has_ffn:
        roles += ("gate", "up", "down") if family.gated else ("up", "down")
    for norm, is_there in (("attn", kind.mixes), ("ffn", kind.has_ffn and config.residual != ONE_NORM)):
        roles += (f"{norm}_norm",) if family.pre_norm and is_there else ()
        roles += (f"{norm}_post_norm",) if family.post_norm and is_there else ()
    roles += ("input_gate", "input_up", "input_norm") if config.input_width else ()
    roles += ("layer_scale",) if family.layer_scales else ()
    wholes = {part: whole for whole in family.fused for part in _FUSED[whole]}
    return tuple(dict.fromkeys(wholes.get(role, role) for role in roles))


def _attention_roles(config: ModelConfig, layer: LayerConfig) -> tuple[str, ...]:
    kind = config.family.attention
    if layer.kv_layer is not None:
        return ("q",)
    if layer.keys_are_values:
        return ("q", "k")
    if kind == HEADS:
        return ("q", "attn_gate", "k", "v") if config.family.own_gates else ("q", "k", "v")
    queries = ("q_a", "q_a_norm", "q_b") if config.query_rank else ("q",)
    if kind == LOW_RANK:
        return (*queries, "k", "v")
    assert kind == LATENT_HEADS, kind
    return (*queries, "kv_a", "kv_a_norm", *(("k_b", "v_b") if config.is_absorbed else ("kv_b",)))


def _moe_roles(config: ModelConfig) -> tuple[str, ...]:
    moe = config.moe
    assert moe is not None
    roles: tuple[str, ...] = ("router",) + (("choice_bias",) if moe.choice_bias else ())
    gate = ("gate",) if config.family.gated else ()
    roles += ("expert_gate_up",) if moe.form in (MERGED, PAIRED) else tuple(f"expert_{each}" for each in (*gate, "up"))
    roles += ("expert_down",)
    if moe.shared_width:
        roles += tuple(f"shared_{each}" for each in (*gate, "up", "down"))
    roles += ("shared_mix",) if moe.shared_mix else ()
    return roles + (OWN_NORMS if moe.own_norms else ())


def layer_names(kind: str, config: ModelConfig, layer: int) -> dict[str, str]:
    """Role -> what its tensors' names begin with, less '.weight' and '.bias'; of WHOLE_NAMES the name itself. Names of
    experts that are stored one by one still have `{e}` for the expert's number."""
    names = LAYER_NAMES[kind] | dict(config.family.names)
    if kind == "gguf" and config.moe is not None and config.moe.form == SPLIT:
        names |= SPLIT_NAMES
    return {role: names[role].format(layer, e="{e}") for role in layer_roles(config, layer)}


def stacked_roles(config: ModelConfig, linear: str, layer: int) -> tuple[str, ...]:
    """The roles whose matrices, one upon the other, make one of a layer's linears."""
    roles = layer_roles(config, layer)
    return tuple(part for part in _STACKED.get(linear, ()) if part in roles) or (linear,)


def role_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Role -> shape of its weight in a layer; of experts that are stored one by one, of one of them."""
    c, own, ffn = config, config.heads_of(layer), config.ffn_width_of(layer)
    q_width, kv_width = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q": ((2 if c.family.gated_attention and not c.family.own_gates else 1) * q_width, c.width),
        "attn_gate": (q_width, c.width),
        "k": (kv_width, c.width),
        "v": (kv_width, c.width),
        "qkv": (q_width + 2 * kv_width, c.width),
        "q_a": (c.query_rank, c.width),
        "q_a_norm": (c.query_rank,),
        "q_b": (q_width, c.query_rank),
        "output": (c.width, q_width),
        "sinks": (c.num_heads,),
        "gate": (ffn, c.width),
        "up": (ffn, c.width),
        "gate_up": (2 * ffn, c.width),
        "down": (c.width, ffn),
        "input_gate": (c.input_width, c.width),
        "input_up": (c.width, c.input_width),
        "layer_scale": (1,),
        "q_norm": _head_norm_shape(c, own.num_heads, own.head_dim),
        "k_norm": _head_norm_shape(c, own.num_kv_heads, own.head_dim),
    }
    shapes |= {role: (c.width,) for role in NORMS}
    if c.latent is not None:
        heads, latent = c.num_heads, c.latent
        shapes |= {
            "kv_a": (latent.key_dim, c.width),
            "kv_a_norm": (latent.latent_dim,),
            "kv_b": (heads * (latent.nope_dim + latent.value_dim), latent.latent_dim),
            "k_b": (heads, latent.latent_dim, latent.nope_dim),
            "v_b": (heads, latent.value_dim, latent.latent_dim),
            "output": (c.width, heads * latent.value_dim),
        }
    if c.mixer is not None:
        shapes |= c.mixer.shapes(c.width)
    if c.moe is not None:
        experts, width, shared = c.moe.routing.num_experts, c.moe.expert_width, c.moe.shared_width
        together = () if c.moe.form in ONE_BY_ONE else (experts,)
        shapes |= {
            "router": (experts, c.width),
            "choice_bias": (experts,),
            "expert_gate": (*together, width, c.width),
            "expert_up": (*together, width, c.width),
            "expert_gate_up": (*together, 2 * width, c.width),
            "expert_down": (*together, c.width, width),
            "shared_gate": (shared, c.width),
            "shared_up": (shared, c.width),
            "shared_gate_up": (2 * shared, c.width),
            "shared_down": (c.width, shared),
            "shared_mix": (1, c.width),
            "router_norm": (c.width,),
            "expert_scales": (experts,),
        }
    return shapes


def _head_norm_shape(config: ModelConfig, num_heads: int, head_dim: int) -> tuple[int, ...]:
    if config.family.qk_norm == "width":
        return (num_heads * head_dim,)
    is_one = config.family.qk_norm == "own" and "q_norm" not in config.family.names  # else a head's is by itself
    return (num_heads, head_dim) if is_one else (head_dim,)


def expected_shapes(kind: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this kind and shape must have."""
    names = global_names(kind, config.family.names)
    shapes: dict[str, tuple[int, ...]] = {f"{names['embed']}.weight": (config.vocab_size, config.width)}
    if not config.tied_embeddings:
        shapes[f"{names['head']}.weight"] = (config.vocab_size, config.width)
    if "head" in config.biases:
        shapes[f"{names['head']}.bias"] = (config.vocab_size,)
    shapes |= dict(_tensors(config, names["final_norm"], "attn_norm", (config.width,)))
    if config.input_width:
        wide = config.num_layers * config.input_width
        shapes[f"{names['layer_embed']}.weight"] = (config.input_vocab, wide)
        shapes[f"{names['layer_inputs']}.weight"] = (wide, config.width)
        shapes[f"{names['layer_inputs_norm']}.weight"] = (config.input_width,)
    for layer in range(config.num_layers):
        by_role = role_shapes(config, layer)
        for role, name in layer_names(kind, config, layer).items():
            for one in expert_names(config, role, name):
                shapes |= dict(_tensors(config, one, role, by_role[role]))
    return shapes


def expert_names(config: ModelConfig, role: str, name: str) -> list[str]:
    """The names that `name` of layer_names stands for: one, or one for each expert, or for each head."""
    if role in ("q_norm", "k_norm"):
        num_heads = config.num_heads if role == "q_norm" else config.num_kv_heads
        return list(dict.fromkeys(name.format(e=head) for head in range(num_heads)))
    if config.moe is None or config.moe.form not in ONE_BY_ONE or role not in EXPERT_ROLES:
        return [name]
    return [name.format(e=expert) for expert in range(config.moe.routing.num_experts)]


def active_share(config: ModelConfig) -> float:
    """Of the model's parameters, what a token goes through: of routed experts as many as it chooses. Biases do not
    count."""
    moe = config.moe
    if moe is None:
        return 1.0
    copies = moe.routing.num_experts if moe.form in ONE_BY_ONE else 1
    total, routed = config.vocab_size * config.width * (1 if config.tied_embeddings else 2), 0
    for layer in range(config.num_layers):
        shapes = role_shapes(config, layer)
        for role in layer_roles(config, layer):
            count = math.prod(shapes[role]) * (copies if role in EXPERT_ROLES else 1)
            total += count
            routed += count if role in EXPERT_ROLES else 0
    return 1 - routed / total * (1 - moe.routing.top_k / moe.routing.num_experts)


def _tensors(
    config: ModelConfig, name: str, role: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    if role in WHOLE_NAMES:
        yield name, shape
        return
    if role in NORMS:
        yield from ((f"{name}.{tensor}", shape) for tensor in config.family.norm_tensors)
        return
    yield f"{name}.weight", shape
    if role in config.biases:
        yield f"{name}.bias", shape[:1] if role == "conv" or len(shape) == 1 else shape[:-1]
