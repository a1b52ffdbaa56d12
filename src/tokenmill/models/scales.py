"""Numbers that a model's embeddings, residuals and logits are multiplied by, as settings spell them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .family import Family
from .fields import Fields


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
        math.sqrt(width) if family.scaled_embeddings else fields.number("embedding_multiplier", 1.0),
        fields.number("residual_multiplier", 1.0),
        1 / fields.number("logits_scaling", 1.0, positive=True),
    )


_MINICPM3 = Scales(12.0, 1.4, 256.0)
"""Of MiniCPM3 in GGUF, whose keys say none: as in hf_scales, `scale_emb`, `scale_depth` and `dim_model_base`."""


def gguf_scales(fields: Fields, family: Family, width: int, num_layers: int) -> Scales:
    """From a GGUF file's keys. Raises BadCheckpoint."""
    embed, residual, logit = math.sqrt(width) if family.scaled_embeddings else 1.0, 1.0, 1.0
    if fields.prefix == "minicpm3.":
        embed, residual = _MINICPM3.embed, _MINICPM3.residual / math.sqrt(num_layers)
        logit = width / _MINICPM3.logit
    return Scales(
        embed if family.scaled_embeddings else fields.number("embedding_scale", embed),
        fields.number("residual_scale", residual),
        1 / fields.number("logit_scale", logit, positive=True),
    )
