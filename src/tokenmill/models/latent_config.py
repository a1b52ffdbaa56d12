"""Multi-head latent attention as checkpoints declare it (DeepSeek-V2, arXiv 2405.04434).

A YaRN scaling of these models stretches scores, too: not only the channels that turn but all of a query and a key by
1 + 0.1 * m * ln(factor), with a weight m of its own. Beside it the cosines are scaled by what is left of the usual
factor, which is 1 where both weights are equal, as they are in every published model.
"""

from __future__ import annotations

import math

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..ops.api import LatentGeometry
from .config_json import ROPE_KEYS, read_object
from .fields import Fields


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
