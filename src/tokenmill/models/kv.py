"""Which of a model's layers share a block table: its KV groups.

Layers that see everything are one group. Those with a window are another, so that a sequence can give back what slid
out of it; a window that reaches over the longest context served hides nothing and makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.block import KVGroup
from .config import ModelConfig

LayerKV = tuple[Any, int]
"""A layer's bound pool, and the layer's place in it."""


def kv_groups(
    config: ModelConfig, *, max_model_len: int | None = None, block_size: int = 16, dtype: str = "f16"
) -> tuple[KVGroup, ...]:
    """The groups of a model that serves `max_model_len` positions (default: its whole context), in the order of a
    sequence's block tables. A group's window is the largest of its layers."""
    longest = max_model_len or config.max_context
    windows = [layer.window if layer.window < longest else 0 for layer in config.layers]
    full = tuple(index for index, window in enumerate(windows) if not window)
    local = tuple(index for index, window in enumerate(windows) if window)
    if not local:
        return (one_group(config, block_size, dtype),)
    groups: list[KVGroup] = []
    for name, layers, window in (("full", full, 0), ("window", local, max(windows))):
        if layers:
            group = KVGroup(name, len(layers), config.num_kv_heads, config.head_dim, block_size, dtype)
            groups.append(replace(group, window=window, layers=layers, table=len(groups)))
    return tuple(groups)


def one_group(config: ModelConfig, block_size: int, dtype: str) -> KVGroup:
    """All layers on one block table."""
    return KVGroup("full", config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)


def layer_kvs(groups: Sequence[KVGroup], kvs: Sequence[Any], num_layers: int) -> tuple[LayerKV, ...]:
    """Of each layer, where its KV lies; `kvs` are the bound pools of `groups`."""
    places: dict[int, LayerKV] = {}
    for group, kv in zip(groups, kvs, strict=True):
        for place, layer in enumerate(group.layers or range(num_layers)):
            places[layer] = (kv, place)
    return tuple(places[layer] for layer in range(num_layers))
