"""The shape of a model's attention, read from its settings: over heads, over latents, or with queries that go through
fewer channels.

Latent attention is declared as in DeepSeek-V2 (arXiv 2405.04434). A YaRN scaling of these models stretches scores, too:
not only the channels that turn but all of a query and a key by 1 + 0.1 * m * ln(factor), with a weight m of its own.
Beside it the cosines are scaled by what is left of the usual factor, which is 1 where both weights are equal, as they
are in every published model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_key import REQUIRED, keys
from ..ops.api import HeadGeometry, LatentGeometry
from .config_json import ROPE_KEYS, read_object
from .family import HEADS, LATENT_HEADS, NO_HEADS, Family
from .fields import Fields

INNER_EPS = 1e-6
"""Of the norms within latent attention, whatever the model's other norms have."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """As the fields of ModelConfig. turned_dim: channels of a head among which the family's fraction turns. inner_eps:
    None where it is that of the model's norms."""

    num_kv_heads: int
    head_dim: int
    turned_dim: int
    scale: float
    latent: LatentGeometry | None = None
    is_absorbed: bool = False
    query_rank: int = 0
    inner_eps: float | None = None


def hf_num_heads(fields: Fields, family: Family) -> int:
    """Of queries; 0 where no layer attends."""
    return 0 if family.attention == NO_HEADS else fields.count("num_attention_heads")


def hf_attention(fields: Fields, family: Family, width: int, num_heads: int) -> AttentionConfig:
    """From config.json. num_heads: of queries, 0 where no layer attends. Raises BadCheckpoint."""
    if family.attention == NO_HEADS:
        return AttentionConfig(0, 0, 0, 1.0)
    if family.attention == LATENT_HEADS:
        latent = hf_latent(fields, width, num_heads)
        if fields.count("num_key_value_heads", num_heads) != num_heads:
            raise BadCheckpoint(f"{fields.where}: num_key_value_heads of latent attention must be {num_heads}.")
        scale = latent.query_dim**-0.5 * hf_score_stretch(fields)
        rank = 0 if fields.get("q_lora_rank") is None else fields.count("q_lora_rank")
        return AttentionConfig(1, latent.query_dim, latent.rope_dim, scale, latent, False, rank, INNER_EPS)
    if family.attention == HEADS:
        head_dim = fields.count("head_dim", width // num_heads)
        if fields.metadata.get("head_dim", head_dim) not in (head_dim, None):
            raise BadCheckpoint(f"{fields.where}: head_dim of a {family.title} must be {head_dim}.")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        if fields.reads("multi_query") and not fields.flag("new_decoder_architecture"):  # Falcon's, before 40B
            num_kv_heads = 1 if fields.flag("multi_query") else num_heads
        scale = _hf_scale(fields, head_dim) if family.attention_scale is None else family.attention_scale
        return AttentionConfig(num_kv_heads, head_dim, head_dim, scale)
    fields.must_equal("num_attention_groups", 1)
    head_dim = fields.count("head_dim")
    rank = fields.count("share_q_dim", head_dim)
    return AttentionConfig(1, head_dim, head_dim, head_dim**-0.5, query_rank=rank)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """As the fields of LayerConfig."""

    heads: HeadGeometry | None = None
    kv_layer: int | None = None
    keys_are_values: bool = False


def hf_layer_attention(fields: Fields, windows: Sequence[int], heads: HeadGeometry) -> list[LayerAttention]:
    """What the attention of each layer has of its own. windows: of the layers. heads: of the model. Raises
    BadCheckpoint."""
    own, kv_layers = _hf_own_heads(fields, windows, heads), _hf_kv_layers(fields, windows)
    by_window = dict(zip(windows, own, strict=True))
    if any(by_window[window] != each for window, each in zip(windows, own, strict=True)):
        raise BadCheckpoint(f"{fields.where}: per_layer_config gives layers that see as much different heads.")
    are_keys = fields.flag("attention_k_eq_v") if fields.reads("attention_k_eq_v") else False
    return [
        LayerAttention(
            heads=own[layer] if own[layer] != heads else None,
            kv_layer=kv_layers.get(layer),
            keys_are_values=are_keys and not window and layer not in kv_layers,
        )
        for layer, window in enumerate(windows)
    ]


_OWN = {"head_dim", "num_key_value_heads"}
"""What per_layer_config may change."""


def _hf_own_heads(fields: Fields, windows: Sequence[int], heads: HeadGeometry) -> list[HeadGeometry]:
    """The heads of each layer: those of layers without a window may be others, of Gemma 4."""
    if not fields.reads("per_layer_config"):
        return [heads] * len(windows)
    change: dict[str, Any] = {"head_dim": fields.count("global_head_dim")}
    num_kv_heads = fields.get("num_global_key_value_heads")
    if num_kv_heads is not None and fields.flag("attention_k_eq_v"):
        change["num_key_value_heads"] = fields.count("num_global_key_value_heads")
    changes: dict[str, Any] = {str(layer): change for layer, window in enumerate(windows) if not window}
    if "per_layer_config" in fields.metadata:
        changes = dict(read_object(fields, "per_layer_config"))
    found = [heads] * len(windows)
    for name, said in changes.items():
        if not name.isdecimal() or int(name) >= len(windows) or not isinstance(said, Mapping) or set(said) - _OWN:
            raise BadCheckpoint(f"{fields.where}: per_layer_config.{name} = {said!r} is not supported here.")
        given = Fields(said, f"{fields.where} (per_layer_config.{name})", keys(**dict.fromkeys(said, REQUIRED)))
        found[int(name)] = replace(
            heads,
            head_dim=given.count("head_dim", heads.head_dim),
            num_kv_heads=given.count("num_key_value_heads", heads.num_kv_heads),
        )
    return found


def _hf_kv_layers(fields: Fields, windows: Sequence[int]) -> dict[int, int]:
    """Of the last layers, which see the keys and values of the last layer of their kind before them: that layer."""
    if not fields.reads("num_kv_shared_layers"):
        return {}
    first = len(windows) - fields.count("num_kv_shared_layers", least=0)
    kinds = [bool(window) for window in windows]
    last = {kind: layer for layer, kind in enumerate(kinds[: max(0, first)])}
    if set(last) != set(kinds):
        raise BadCheckpoint(f"{fields.where}: num_kv_shared_layers leaves no layer whose keys and values are shared.")
    return {layer: last[kinds[layer]] for layer in range(first, len(windows))}


def _hf_scale(fields: Fields, head_dim: int) -> float:
    if fields.reads("attention_multiplier"):
        return fields.number("attention_multiplier")
    scale = fields.number("query_pre_attn_scalar", float(head_dim), positive=True) ** -0.5
    return scale * fields.number("key_multiplier", 1.0)


_LARGEST_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""(architecture, layers) of the 27B models, whose queries are scaled by width / heads, which no key of a file says."""


def gguf_attention(
    checkpoint: Checkpoint, fields: Fields, family: Family, width: int, num_layers: int
) -> AttentionConfig:
    """From a GGUF file's keys, and from which tensors it has. Raises BadCheckpoint."""
    num_heads = fields.count("attention.head_count")
    if family.attention == LATENT_HEADS:
        latent, is_absorbed = gguf_latent(checkpoint, fields, width, num_heads)
        scale = latent.query_dim**-0.5 * gguf_score_stretch(fields)
        rank = fields.count("attention.q_lora_rank", 0, least=0)
        return AttentionConfig(1, latent.query_dim, latent.rope_dim, scale, latent, is_absorbed, rank, INNER_EPS)
    head_dim = fields.count("attention.key_length", width // num_heads)
    fields.must_equal("attention.value_length", head_dim)
    if family.mixer and family.interleaved_heads:  # converters interleave whole heads, also where a part of one turns
        fields.must_equal("rope.dimension_count", head_dim)
    architecture = fields.prefix.removesuffix(".")
    per_head = width / num_heads if (architecture, num_layers) in _LARGEST_GEMMAS else head_dim
    return AttentionConfig(
        num_kv_heads=_gguf_kv_heads(fields, family, num_heads),
        head_dim=head_dim,
        turned_dim=fields.count("rope.dimension_count", head_dim),
        scale=fields.number("attention.scale", 0.0) or per_head**-0.5,
    )


def _gguf_kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    """Where some layers keep a state the file may have a list, with 0 for these."""
    key = "attention.head_count_kv"
    listed = fields.get(key)
    if not family.mixer or not isinstance(listed, list):
        return fields.count(key, num_heads)
    counts = [count for count in listed if count]
    if not counts or counts != counts[:1] * len(counts):
        raise BadCheckpoint(f"{fields.where}: {fields.prefix}{key} = {listed!r} is not supported (one count, and 0).")
    return Fields({key: counts[0]}, fields.where).count(key)


def hf_latent(fields: Fields, width: int, num_heads: int) -> LatentGeometry:
    """From config.json. Raises BadCheckpoint."""
    rope_dim = fields.count("qk_rope_head_dim")
    if fields.get("head_dim", rope_dim) != rope_dim:
        raise BadCheckpoint(f"{fields.where}: head_dim of a model with latent attention must be {rope_dim}.")
    return LatentGeometry(
        num_heads,
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=rope_dim,
        latent_dim=fields.count("kv_lora_rank"),
        value_dim=fields.count("v_head_dim", width // num_heads),
    )


def hf_score_stretch(fields: Fields) -> float:
    """What scores are multiplied by because the context is stretched."""
    given = read_object(fields, "rope_scaling") or read_object(fields, "rope_parameters")
    rope = Fields(given, f"{fields.where} (rope)", ROPE_KEYS)
    weight = rope.number("mscale_all_dim", 0.0)
    if not weight or rope.text("rope_type", rope.text("type", "")) == "default":
        return 1.0
    return _stretch(weight, rope.number("factor", positive=True))


def gguf_latent(checkpoint: Checkpoint, fields: Fields, width: int, num_heads: int) -> tuple[LatentGeometry, bool]:
    """-> (the shape, whether the file has the absorbed form's matrices: attn_k_b and attn_v_b, not attn_kv_b). In files
    with these, head sizes have keys of their own beside the sizes of a latent. Raises BadCheckpoint."""
    is_absorbed = "blk.0.attn_k_b.weight" in checkpoint.tensors
    latent_dim, rope_dim = fields.count("attention.kv_lora_rank"), fields.count("rope.dimension_count")
    key, value = "attention.key_length", "attention.value_length"
    if is_absorbed or fields.get(f"{key}_mla") is not None:
        fields.must_equal(key, latent_dim + rope_dim)
        fields.must_equal(value, latent_dim)
        key, value = f"{key}_mla", f"{value}_mla"
    if fields.count("attention.head_count_kv", num_heads) not in (1, num_heads):
        raise BadCheckpoint(f"{fields.where}: {fields.prefix}attention.head_count_kv must be 1 or {num_heads}.")
    query_dim = fields.count(key)
    if query_dim <= rope_dim:
        raise BadCheckpoint(f"{fields.where}: {fields.prefix}{key} must be above the {rope_dim} channels that turn.")
    value_dim = fields.count(value, width // num_heads)
    return LatentGeometry(num_heads, query_dim - rope_dim, rope_dim, latent_dim, value_dim), is_absorbed


def gguf_score_stretch(fields: Fields) -> float:
    """As hf_score_stretch. The file's multiplier has the 0.1 in it."""
    if fields.text("rope.scaling.type", "none") != "yarn":
        return 1.0
    weight = 10 * fields.number("rope.scaling.yarn_log_multiplier")
    return _stretch(weight, fields.number("rope.scaling.factor", positive=True))


def _stretch(weight: float, factor: float) -> float:
    return (1 + 0.1 * weight * math.log(factor)) ** 2 if factor > 1 else 1.0
