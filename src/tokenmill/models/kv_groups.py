"""Which of a model's layers share a block table: its KV groups.

Layers that see everything are one group. Those of each window are another, so that a sequence can give back what slid
out of it; a window that reaches over the longest context served hides nothing and makes no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ..core.block import FULL, LATENT, WINDOW, KVGroup
from .config import ModelConfig

LayerKV = tuple[Any, int]
"""A layer's bound pool, and the layer's place in it."""


def kv_groups(
    config: ModelConfig, *, windows: Collection[int] | None = None, block_size: int = 16, dtype: str = "f16"
) -> tuple[KVGroup, ...]:
    """The groups of a model, in the order of a sequence's block tables: layers that see everything, then those of each
    window, the smallest first. `windows`: which windows have a group of their own (default: all shorter than the
    model's context); layers with another one are taken for layers that see everything. Latent attention has one group
    of latents."""
    if config.latent is not None:
        latent = config.latent
        return (KVGroup(LATENT, config.num_layers, 1, latent.key_dim, block_size, dtype, value_dim=latent.latent_dim),)
    if windows is None:
        windows = {layer.window for layer in config.layers if layer.window < config.max_context}
    seen = [layer.window if layer.window in windows else 0 for layer in config.layers]
    if not any(seen):
        return (KVGroup(FULL, config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype),)
    groups: list[KVGroup] = []
    for window in sorted(set(seen)):
        layers = tuple(index for index, other in enumerate(seen) if other == window)
        name = WINDOW if window else FULL
        group = KVGroup(name, len(layers), config.num_kv_heads, config.head_dim, block_size, dtype)
        groups.append(replace(group, window=window, layers=layers, table=len(groups)))
    return tuple(groups)


def layer_kvs(groups: Sequence[KVGroup], kvs: Sequence[Any], num_layers: int) -> tuple[LayerKV, ...]:
    """Of each layer, where its KV lies; `kvs` are the bound pools of `groups`."""
    places: dict[int, LayerKV] = {}
    for group, kv in zip(groups, kvs, strict=True):
        for place, layer in enumerate(group.layers or range(num_layers)):
            places[layer] = (kv, place)
    return tuple(places[layer] for layer in range(num_layers))
