"""A checkpoint's shape, as the cost model takes it: from the checkpoint itself, or from what `tokenmill inspect --json`
said of it elsewhere, so that a model need not be where it is simulated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..formats.checkpoint import open_checkpoint
from ..formats.hub import local_model
from ..models.config import ModelConfig
from ..models.encoder_config import EncoderConfig
from ..models.summary import model_summary
from ..sim.fields import Fields
from ..sim.models import ModelShape, read_model

_UNITS = ("title", "source", "name")


def shape_of(config: ModelConfig, name: str) -> ModelShape:
    """Of a decoder's config. Values of latent attention may be narrower than keys: their mean counts. Windows are not
    known to the cost model, which takes every layer to see all."""
    latent, moe = config.latent, config.moe
    num_moe = sum(layer.is_moe for layer in config.layers)
    head_dim, num_kv_heads = config.head_dim, config.num_kv_heads
    if latent is not None:
        head_dim, num_kv_heads = (latent.nope_dim + latent.value_dim) // 2, config.num_heads
    return ModelShape(
        name,
        config.num_layers,
        config.width,
        config.num_heads,
        num_kv_heads,
        head_dim,
        config.ffn_width if num_moe < config.num_layers else 0,
        config.vocab_size,
        is_gated=config.family.gated,
        is_tied=config.tied_embeddings,
        num_dense_layers=config.num_layers - num_moe if moe is not None else 0,
        num_experts=0 if moe is None else moe.routing.num_experts,
        num_chosen=0 if moe is None else moe.routing.top_k,
        num_shared=0 if moe is None else round(moe.shared_width / moe.expert_width),
        expert_ffn=0 if moe is None else moe.expert_width,
        query_rank=config.query_rank,
        kv_rank=0 if latent is None else latent.latent_dim,
        rope_dim=0 if latent is None else latent.rope_dim,
        title=name,
        source="its checkpoint, by tokenmill inspect",
    )


def shape_facts(config: ModelConfig) -> dict[str, Any]:
    """What `inspect --json` says of it under `shape`: the keys of a table of `[model.shape]` in a cluster's file."""
    shape = asdict(shape_of(config, ""))
    return {key: value for key, value in shape.items() if key not in _UNITS}


def read_shape(path: str) -> ModelShape:
    """Of a checkpoint (an alias, a file, a folder), or of a `.json` file that `inspect --json` printed. Raises
    ConfigError, BadCheckpoint or FetchError."""
    if path.endswith(".json"):
        return _from_facts(path)
    checkpoint = open_checkpoint(local_model(path))
    config = model_summary(checkpoint).config
    if isinstance(config, EncoderConfig):
        raise ConfigError(f"model.checkpoint: {path} gives vectors, not tokens", param="model.checkpoint")
    return shape_of(config, Path(path).name)


def _from_facts(path: str) -> ModelShape:
    try:
        facts = json.loads(Path(path).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.checkpoint: {path} cannot be read: {error}", param="model.checkpoint") from None
    table = facts.get("shape") if isinstance(facts, Mapping) else None
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"model.checkpoint: {path} has no shape; write it by `tokenmill inspect MODEL --json`",
            param="model.checkpoint",
        )
    name = Path(str(facts.get("model", path))).name
    return read_model(Fields({**table, "title": name, "source": f"tokenmill inspect, {path}"}, "shape"), name)
