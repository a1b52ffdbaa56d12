"""How a checkpoint says what its mixtures of experts are: by the keys of its type, or by llama.cpp's.

What a router would do by a key that is not read is refused by name: a model that chooses experts almost right gives
words that look right. Routers of DeepSeek-V2 (arXiv 2405.04434): scores are a softmax, and a group's score is that of
its best expert. DeepSeek-V3 (arXiv 2412.19437) and Kimi-K2: scores are sigmoids, and a group's score is the sum of its
best two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import Tensor
from ..ops.api import SIGMOID, SOFTMAX, SOFTMAX_CHOSEN, SPARSE_MIXER, ExpertActivation, Routing
from .config_json import read_period, read_sublayers
from .family import LATENT_HEADS, Family
from .fields import Fields
from .moe import MERGED, SPLIT, STACKED, MoeConfig, MoeFamily
from .tensor_names import LAYER_NAMES

MAX_EXPERTS = 4096
"""More than any model has; a damaged count must not be turned into a list of that length."""

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_KS = ("num_experts_per_tok", "moe_k", "moe_top_k", "moe_topk", "top_k_experts")
_SCALES = ("routed_scaling_factor", "route_scale")
_NUM_DENSE = ("first_k_dense_replace", "num_dense_layers")
_SHARED_COUNTS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
    "moe_shared_expert_intermediate_size",
)
_NORMALISE = ("norm_topk_prob", "norm_expert_weight")
_MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")

_ROUTER_WORDS = ("expert", "router", "routed", "topk", "moe", "scoring", "score_func", "gating", "n_group")
_WITHOUT_EFFECT = frozenset({
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "router_z_loss_coef", "aux_loss_alpha",
    "moe_capacity", "moe_gate", "moe_use_aux_free", "moe_aux_loss_coef", "experts_implementation", "moe_layer_freq",
    "shared_moe_mode", "use_mixed_mlp_moe", "router_dtype", "moe_shared_expert_overlap",
})  # fmt: skip
"""Of training, or of how a pass is run; of these, `moe_gate` and `moe_layer_freq` only as _ONLY says."""
_ONLY: Mapping[str, tuple[Any, ...]] = {"moe_gate": ("topk", "top2", None), "moe_layer_freq": (1, None)}
_WITH_BIAS = "noaux_tc"
_METHODS = {"greedy": SOFTMAX, "group_limited_greedy": SOFTMAX, _WITH_BIAS: SIGMOID}
"""`topk_method` -> how scores are made."""
_SAID_ANYWAY: Mapping[str, Any] = {"n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1}
_SCORE_KEYS = ("scoring_func", "score_function", "score_func")
"""What a file may say by keys that its type does not read: what is so anyway."""
_SAID_TWICE = {"experts_per_token": "num_experts_per_tok"}
"""Keys that may say again what the one that is read says."""

_GATING = {1: SOFTMAX, 2: SIGMOID, 3: SOFTMAX_CHOSEN}
"""llama.cpp's numbers of scores; 0 says nothing."""
_GGUF_KEYS = frozenset({
    "expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_shared_count", "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_count",
    "expert_group_used_count",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mixtures:
    """moe: of the layers that are mixtures of experts; None where none is. unread: see ModelConfig."""

    moe: MoeConfig | None = None
    layers: frozenset[int] = frozenset()
    unread: tuple[str, ...] = ()


# ---- config.json -----------------------------------------------------------------------------------------------------


def hf_experts(fields: Fields, family: Family, num_layers: int, activation: str) -> Mixtures:
    """What a config.json says of experts. Raises BadCheckpoint, naming the key at fault."""
    if family.moe is None or (family.mixer and fields.get("num_local_experts") == 0):
        return Mixtures(unread=family.unread)
    if fields.reads("enable_moe_block") and not fields.flag("enable_moe_block"):
        return Mixtures(unread=family.unread)
    if fields.reads("expert_layer_period") and _count(fields, _COUNTS, most=MAX_EXPERTS) == 1:
        return Mixtures(unread=family.unread)
    if family.one_sublayer:
        layers = frozenset(layer for layer, kind in enumerate(read_sublayers(fields)) if kind == "moe")
    else:
        layers = frozenset(layer for layer in range(num_layers) if _has_experts(fields, family.moe, layer, num_layers))
    width = fields.count("moe_intermediate_size" if fields.reads("moe_intermediate_size") else "intermediate_size")
    _refuse_other_routers(fields, family.moe, width, [layer in layers for layer in range(num_layers)])
    routing = _routing(
        fields,
        num_experts=_count(fields, _COUNTS, most=MAX_EXPERTS),
        top_k=_count(fields, _TOP_KS),
        score=family.moe.scores[0],
        num_groups=fields.count("n_group", 1),
        top_groups=fields.count("topk_group", 1),
        group_score=family.moe.group_score,
        normalise=_normalise(fields) if family.moe.normalise is None else family.moe.normalise,
        floor=family.moe.floor,
        scale=fields.number(next(filter(fields.reads, _SCALES), _SCALES[0]), 1.0),
        margin=2 * fields.number("router_jitter_noise", 0.0),
    )
    if family.moe.scaled_inputs and routing.top_k != 1:
        raise BadCheckpoint(f"{fields.where}: num_experts_per_tok above 1 is not supported here.")
    if routing.score == SPARSE_MIXER and routing.top_k != 2:
        raise BadCheckpoint(f"{fields.where}: {routing.top_k} experts for a token are not the two of a sparse mixer.")
    if fields.number("moe_norm_min", 0.0) > 1e-9:
        raise BadCheckpoint(f"{fields.where}: moe_norm_min must be at most 1e-9, below any sum of weights.")
    mtp = _count(fields, _MTP_LAYERS, least=0) if any(map(fields.reads, _MTP_LAYERS)) else 0
    unread = tuple(f"model.layers.{num_layers + index}." for index in range(min(mtp, 16)))
    if family.indexed:
        unread += tuple(f"model.layers.{layer}.self_attn.indexer." for layer in range(num_layers))
    moe = MoeConfig(
        routing,
        expert_width=width,
        shared_width=_shared_width(fields, family.moe, width),
        shared_mix=family.moe.shared_mix,
        own_norms=family.moe.own_norms,
        scaled_inputs=family.moe.scaled_inputs,
        choice_bias=fields.flag("use_expert_bias") if fields.reads("use_expert_bias") else family.moe.choice_bias,
        activation=_hf_activation(fields, activation),
        form=family.moe.form,
    )
    if fields.reads("topk_method"):
        moe = with_hf_router(fields, moe)
    return Mixtures(moe if layers else None, layers, (*unread, *family.unread))


def _normalise(fields: Fields) -> bool:
    return fields.flag(next(filter(fields.reads, _NORMALISE), ""))


def _hf_activation(fields: Fields, activation: str) -> ExpertActivation:
    if not fields.reads("swiglu_limit"):
        return ExpertActivation(activation)
    limit, alpha = fields.number("swiglu_limit", positive=True), fields.number("swiglu_alpha")
    return ExpertActivation("swiglu", limit, alpha)


def _count(fields: Fields, names: tuple[str, ...], *, least: int = 1, most: int = 2**31 - 1) -> int:
    """The one number that the type has several names for."""
    known = [name for name in names if fields.reads(name)]
    said = [(name, fields.get(name)) for name in known if name in fields.metadata]
    for name, value in said:
        if value != said[0][1]:
            raise BadCheckpoint(f"{fields.where}: {said[0][0]} and {name} differ.")
    for name in known:  # looked at, so that a null is told of
        fields.get(name)
    name = (
        said[0][0] if said else next((name for name in known if fields.meaning_of_missing(name) is not None), known[0])
    )
    value = fields.get(name)
    if isinstance(value, list) and value:  # Hunyuan's, layer by layer
        if len(value) < fields.count("num_hidden_layers") or any(other != value[0] for other in value):
            raise BadCheckpoint(f"{fields.where}: {name} must be one number for all layers, got {value!r}.")
        fields = replace(fields, metadata={**fields.metadata, name: value[0]})
    return fields.count(name, 0 if least == 0 else None, least=least, most=most)


def _shared_width(fields: Fields, family: MoeFamily, width: int) -> int:
    if family.own_norms or family.scaled_inputs:
        return fields.count("intermediate_size")
    for name in _SHARED_WIDTHS:
        if fields.reads(name):
            if name == "moe_shared_expert_intermediate_size":  # of one; implementations differ in what more would be
                fields.must_equal("n_shared_experts", 1)
            return fields.count(name, least=0)
    counted = any(map(fields.reads, _SHARED_COUNTS))
    return width * (_count(fields, _SHARED_COUNTS, least=0) if counted else family.num_shared)


def _has_experts(fields: Fields, family: MoeFamily, layer: int, num_layers: int) -> bool:
    if fields.reads("mlp_only_layers"):
        dense = fields.get("mlp_only_layers", [])
        if not isinstance(dense, list) or not all(type(index) is int for index in dense):
            raise BadCheckpoint(f"{fields.where}: mlp_only_layers must be a list of layers, got {dense!r}.")
        return layer not in dense and (layer + 1) % fields.count("decoder_sparse_step") == 0
    if fields.reads("mlp_layer_types"):
        said = fields.count(_NUM_DENSE[0], 0, least=0)
        num_dense = min(said if family.num_dense is None else family.num_dense, num_layers)
        kinds = fields.get("mlp_layer_types", ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense))
        if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= {"dense", "sparse"}:
            raise BadCheckpoint(f"{fields.where}: mlp_layer_types must be a list of {num_layers}: dense or sparse.")
        first = next((index for index, kind in enumerate(kinds) if kind == "sparse"), num_layers)
        if family.num_dense is not None and _NUM_DENSE[0] in fields.metadata and min(said, num_layers) != first:
            raise BadCheckpoint(f"{fields.where}: {_NUM_DENSE[0]} and mlp_layer_types differ.")
        return bool(kinds[layer] == "sparse")
    for name in _NUM_DENSE:
        if fields.reads(name):
            return layer >= fields.count(name, least=0)
    if fields.reads("expert_layer_period"):
        every, first = read_period(fields, "expert_layer")
        return layer % every == first
    if fields.reads("moe_layers_enum"):
        return layer in listed_layers(fields, num_layers)
    if fields.reads("interleave_moe_layer_step"):
        step = fields.count("interleave_moe_layer_step")
        listed = fields.get("moe_layers", list(range(step - 1, num_layers, step)))
        if not isinstance(listed, list) or not all(type(index) is int for index in listed):
            raise BadCheckpoint(f"{fields.where}: moe_layers must be a list of layers, got {listed!r}.")
        return layer in listed
    if fields.reads("moe_layer_interval"):
        last = fields.count("moe_layer_end_index", least=-1)
        first, step = fields.count("moe_layer_start_index", least=0), fields.count("moe_layer_interval")
        return first <= layer <= (num_layers - 1 if last == -1 else last) and (layer + 1) % step == 0
    return True


def _refuse_other_routers(fields: Fields, family: MoeFamily, width: int, is_moe: list[bool]) -> None:
    same = {
        **_SAID_ANYWAY, **dict.fromkeys(_SCORE_KEYS, family.scores[0]), "norm_topk_prob": family.normalise,
        "is_moe_layer": is_moe, "num_shared_expert": family.num_shared, "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": width, "moe_router_enable_expert_bias": family.choice_bias,
    }  # fmt: skip
    if family.choice_bias and family.scores[0] == _METHODS[_WITH_BIAS]:
        same["topk_method"] = _WITH_BIAS
    for key, value in fields.metadata.items():
        wanted = _ONLY.get(key)
        if wanted is not None and value not in wanted:
            raise BadCheckpoint(f"{fields.where}: {key} = {value!r} is not supported (supported: {wanted[0]!r}).")
        if key in _SAID_TWICE and value == fields.get(_SAID_TWICE[key]):
            continue
        if key in _WITHOUT_EFFECT or fields.reads(key) or not value or key.endswith("_token_id"):
            continue
        if key in same and value in (same[key], [same[key]] * len(is_moe)):
            continue
        if any(word in key for word in _ROUTER_WORDS):
            raise BadCheckpoint(
                f"{fields.where}: {key} = {value!r}: what it asks of the choice of experts is not known."
            )


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_experts(
    fields: Fields,
    family: Family,
    tensors: Mapping[str, Tensor | QuantisedTensor],
    num_layers: int,
    activation: str,
) -> Mixtures:
    """What a GGUF file says of experts; which layers have them its tensors tell. num_layers: those that are computed.
    Raises BadCheckpoint, naming the key at fault."""
    unread = tuple(f"blk.{num_layers + index}." for index in range(num_mtp_layers(fields)))
    num_experts = fields.count("expert_count", 0, least=0, most=MAX_EXPERTS)
    if family.moe is None or not num_experts:
        if num_experts:
            raise BadCheckpoint(
                f"{fields.where}: {fields.prefix}expert_count = {num_experts}: experts are not supported."
            )
        return Mixtures(unread=unread)
    for key in fields.metadata:
        name = key.removeprefix(fields.prefix)
        if name.startswith("expert_") and name not in _GGUF_KEYS and fields.metadata[key]:
            raise BadCheckpoint(f"{fields.where}: {key} = {fields.metadata[key]!r} is not supported.")
    names = LAYER_NAMES["gguf"] | dict(family.names)
    layers = frozenset(layer for layer in range(num_layers) if f"{names['router'].format(layer)}.weight" in tensors)
    first = min(layers, default=0)
    form, width = _stored_experts(tensors, names, first)
    if not width and layers:
        raise BadCheckpoint(f"{fields.where}: layer {first} has a router and no experts.")
    routing = _routing(
        fields,
        num_experts=num_experts,
        top_k=fields.count("expert_used_count"),
        score=_gguf_score(fields, family.moe.scores),
        num_groups=fields.count("expert_group_count", 1, least=0) or 1,
        top_groups=fields.count("expert_group_used_count", 1, least=0) or 1,
        group_score=family.moe.group_score,
        normalise=_gguf_normalise(fields, family.moe.normalise),
        floor=family.moe.floor,
        scale=fields.number("expert_weights_scale", 1.0) or 1.0,
    )
    shared = tensors.get(f"{names['shared_down'].format(first)}.weight")
    width = fields.count("expert_feed_forward_length", width or 1, least=0) or width
    bias = names["choice_bias"].format(first) in tensors
    moe = MoeConfig(
        routing,
        expert_width=width,
        shared_width=0 if shared is None or not shared.shape else shared.shape[-1],
        shared_mix=family.moe.shared_mix,
        choice_bias=family.moe.choice_bias and bias,
        activation=ExpertActivation(activation if family.moe.swiglu is None else "swiglu", *family.moe.swiglu or ()),
        form=form,
    )
    if family.attention == LATENT_HEADS:
        moe = with_gguf_router(fields, moe)
    return Mixtures(moe if layers else None, layers, unread)


def num_mtp_layers(fields: Fields) -> int:
    """The last of a GGUF file's layers, which guess tokens further ahead."""
    return fields.count("nextn_predict_layers", 0, least=0, most=16)


def _stored_experts(
    tensors: Mapping[str, Tensor | QuantisedTensor], names: Mapping[str, str], layer: int
) -> tuple[str, int]:
    """-> (form, FFN width) of a layer's experts; a width of 0 where there are none."""
    for form, name, halves in (
        (STACKED, names["expert_gate"].format(layer, e="{e}"), 1),
        (MERGED, names["expert_gate_up"].format(layer, e="{e}"), 2),
        (SPLIT, f"blk.{layer}.ffn_gate.0", 1),
    ):
        found = tensors.get(f"{name}.weight")
        if found is not None and len(found.shape) >= 2:
            return form, found.shape[-2] // halves
    return STACKED, 0


def _gguf_score(fields: Fields, scores: tuple[str, ...]) -> str:
    number = fields.count("expert_gating_func", 0, least=0)
    score = _GATING.get(number) if number else scores[0]
    same = {SOFTMAX, SOFTMAX_CHOSEN}  # normalised, these weigh alike
    if score not in scores and not (score in same and set(scores) == {SOFTMAX_CHOSEN}):
        raise BadCheckpoint(f"{fields.where}: {fields.prefix}expert_gating_func = {number} is not supported.")
    return score if score in scores else scores[0]


def _gguf_normalise(fields: Fields, fixed: bool | None) -> bool:
    if fixed is None:
        return fields.flag("expert_weights_norm")
    said = fields.get("expert_weights_norm", fixed)
    if said != fixed:
        raise BadCheckpoint(f"{fields.where}: {fields.prefix}expert_weights_norm = {said!r} is not supported.")
    return fixed


# ---- both ------------------------------------------------------------------------------------------------------------


def _routing(fields: Fields, **choices: Any) -> Routing:
    """Raises BadCheckpoint where experts, groups and what is chosen do not fit each other."""
    experts, groups, top_groups = choices["num_experts"], choices["num_groups"], choices["top_groups"]
    if experts % groups or not 1 <= top_groups <= groups or (groups > 1 and experts // groups < choices["group_score"]):
        raise BadCheckpoint(
            f"{fields.where}: {experts} experts do not divide into {groups} groups of which {top_groups} are chosen."
        )
    if choices["top_k"] > experts // groups * top_groups:
        raise BadCheckpoint(
            f"{fields.where}: {choices['top_k']} experts for a token are more than the"
            f" {experts // groups * top_groups} that it can choose from."
        )
    return Routing(**choices)


def with_hf_router(fields: Fields, moe: MoeConfig) -> MoeConfig:
    """`moe`, read as any other from config.json, with what DeepSeek's own keys say. Raises BadCheckpoint for a router
    that is not one of the above."""
    score, method = moe.routing.score, fields.text("topk_method", "null")
    if _METHODS.get(method) != score:
        raise BadCheckpoint(f"{fields.where}: topk_method {method!r} is not supported here.")
    if fields.text("scoring_func", "null") != score:
        raise BadCheckpoint(f"{fields.where}: scoring_func {fields.get('scoring_func')!r} is not supported here.")
    if method == "greedy":
        moe = replace(moe, routing=replace(moe.routing, num_groups=1, top_groups=1))
    else:
        fields.count("n_group"), fields.count("topk_group")  # of these methods they must be there
    return _checked(fields, moe, "norm_topk_prob")


def with_gguf_router(fields: Fields, moe: MoeConfig) -> MoeConfig:
    """As with_hf_router. Files that name no groups have none, also where the model was made with them: old converters
    left them out."""
    score = moe.routing.score
    if score == SOFTMAX and moe.choice_bias:
        raise BadCheckpoint(f"{fields.where}: {fields.prefix}expert_gating_func must say how scores are made.")
    group_score = 2 if score == SIGMOID else 1
    floor = moe.routing.floor if score == SIGMOID else 0.0
    moe = replace(moe, routing=replace(moe.routing, group_score=group_score, floor=floor))
    return _checked(fields, moe, "expert_weights_norm")


def _checked(fields: Fields, moe: MoeConfig, key: str) -> MoeConfig:
    if moe.routing.score == SOFTMAX and moe.routing.normalise:
        raise BadCheckpoint(
            f"{fields.where}: {fields.prefix}{key} = true is not supported here: implementations of DeepSeek-V2 differ"
            " in whether normalised weights are scaled, too."
        )
    return moe


def listed_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """The layers that `moe_layers_enum` of Step-3 lists, as text or as numbers. Raises BadCheckpoint."""
    listed = fields.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else listed
    try:
        layers = frozenset(int(item) for item in items)
    except (TypeError, ValueError):
        raise BadCheckpoint(f"{fields.where}: moe_layers_enum must list layers, got {listed!r}.") from None
    if not layers or not layers <= set(range(num_layers)):
        raise BadCheckpoint(f"{fields.where}: moe_layers_enum must list layers below {num_layers}, got {listed!r}.")
    return layers
