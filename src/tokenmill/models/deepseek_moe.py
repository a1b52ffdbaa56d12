"""What routers of DeepSeek's models do by settings that other families lack, and which layers of Step-3 have experts.

DeepSeek-V2 (arXiv 2405.04434): scores are a softmax, and a group's score is that of its best expert. DeepSeek-V3 (arXiv
2412.19437) and Kimi-K2: scores are sigmoids, and a group's score is the sum of its best two.
"""

from __future__ import annotations

from dataclasses import replace

from ..core.errors import BadCheckpoint
from ..ops.api import SIGMOID, SOFTMAX
from .fields import Fields
from .moe import MoeConfig

_METHODS = {"greedy": SOFTMAX, "group_limited_greedy": SOFTMAX, "noaux_tc": SIGMOID}
"""`topk_method` -> how scores are made."""


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
