"""Which of a model's layers share a block table: its KV groups.

Layers that see everything are one group. Those of each window are another, so that a sequence can give back what slid
out of it; a window that reaches over the longest context served hides nothing and makes no difference, unless the
layers' heads are others. Layers that see the keys and values of another layer are in no group. And what int8 does to
channels of their keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.block import FULL, LATENT, STATE, STATE_WINDOW, WINDOW, KVGroup
from ..ops.api import HeadGeometry
from .config import ModelConfig
from .weights import LayerWeights


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Where what a layer keeps lies: bound pools, and the layer's place in each.

    kv      of keys and values, of a layer that attends
    state   of a layer that keeps one
    """

    kv: tuple[Any, int] | None = None
    state: tuple[Any, int] | None = None


def kv_groups(
    config: ModelConfig, *, windows: Collection[int] | None = None, block_size: int = 16, dtype: str = "f16"
) -> tuple[KVGroup, ...]:
    """The groups of a model, in the order of a sequence's block tables: layers that see everything, then those of each
    window, the smallest first. `windows`: which windows have a group of their own (default: all shorter than the
    model's context) beside apart_windows; layers with another one are taken for layers that see everything. Latent
    attention has one group of latents. Layers that keep a state are the last group; where no layer attends, a group
    without layers goes before it."""
    attending = tuple(index for index, layer in enumerate(config.layers) if layer.attends and layer.kv_layer is None)
    with_state = tuple(index for index, layer in enumerate(config.layers) if layer.keeps_state)
    groups = _attention_groups(config, attending, windows, block_size, dtype)
    if with_state:
        assert config.mixer is not None
        num_values = config.mixer.state.num_values
        states = KVGroup(STATE, len(with_state), 0, 0, block_size, "f32", STATE_WINDOW, state_values=num_values)
        groups.append(replace(states, layers=with_state, table=len(groups)))
    return tuple(groups)


def _attention_groups(
    config: ModelConfig, attending: tuple[int, ...], windows: Collection[int] | None, block_size: int, dtype: str
) -> list[KVGroup]:
    """attending: layers with KV of their own."""
    if not attending:
        return [KVGroup(FULL, 0, 1, 1, block_size)]
    listed = attending if len(attending) < config.num_layers else ()
    if config.latent is not None:
        latent = config.latent
        group = KVGroup(LATENT, len(attending), 1, latent.key_dim, block_size, dtype, value_dim=latent.latent_dim)
        return [replace(group, layers=listed)]
    if windows is None:
        windows = {layer.window for layer in config.layers if layer.window < config.max_context}
    windows = apart_windows(config).union(windows)
    seen = {index: config.layers[index].window for index in attending}
    seen = {index: window if window in windows else 0 for index, window in seen.items()}
    groups: list[KVGroup] = []
    for window in sorted(set(seen.values())):
        layers = tuple(index for index, other in seen.items() if other == window)
        name, heads = WINDOW if window else FULL, config.heads_of(layers[0])
        group = KVGroup(name, len(layers), heads.num_kv_heads, heads.head_dim, block_size, dtype)
        layers = layers if any(seen.values()) else listed
        groups.append(replace(group, window=window, layers=layers, table=len(groups)))
    return groups


def apart_windows(config: ModelConfig) -> frozenset[int]:
    """The windows whose layers have other KV heads than those that see everything, so that no block has both."""
    heads = {layer.window: config.heads_of(index) for index, layer in enumerate(config.layers)}
    full = heads.get(0, config.heads)
    return frozenset(window for window, own in heads.items() if _kv_heads(own) != _kv_heads(full))


def _kv_heads(heads: HeadGeometry) -> tuple[int, int]:
    return heads.num_kv_heads, heads.head_dim


def layer_kvs(groups: Sequence[KVGroup], kvs: Sequence[Any], config: ModelConfig) -> tuple[LayerKV, ...]:
    """Of each layer, where what it keeps, and the KV that it sees, lies; `kvs` are the bound pools of `groups`."""
    found = [LayerKV()] * config.num_layers
    for group, kv in zip(groups, kvs, strict=True):
        for place, layer in enumerate(group.layers_of(config.num_layers)):
            where = (kv, place)
            found[layer] = replace(found[layer], **({"state": where} if group.state_values else {"kv": where}))
    return tuple(
        found[index] if layer.kv_layer is None else replace(found[index], kv=found[layer.kv_layer].kv)
        for index, layer in enumerate(config.layers)
    )


def with_key_exponents(
    groups: Sequence[KVGroup], config: ModelConfig, layers: Sequence[LayerWeights]
) -> tuple[KVGroup, ...]:
    """The same groups, where keys are int8 with the exponents that even out what each channel adds to a score's error.

    The error of a score is the sum of what queries make of the errors of a key's channels. Where a key has one scale,
    it is least if channels are divided by the root of the ratio of their size to that of the queries' (SmoothQuant,
    arXiv 2211.10438, does so with activations and weights). Those sizes follow from the norms of heads, or are taken to
    be 1 beside the biases. Channels that RoPE turns together share an exponent, so that it may come after RoPE."""
    found: list[KVGroup] = []
    for group in groups:
        if group.dtype == "int8" and not group.value_dim:
            own = group.layers_of(config.num_layers)
            exponents = tuple(_key_exponents(config, index, layers[index]) for index in own)
            group = replace(group, key_exponents=exponents if any(map(any, exponents)) else ())
        found.append(group)
    return tuple(found)


_MOST_EXPONENT = 15
_LEAST_SQUARE = 1e-12


def _key_exponents(config: ModelConfig, index: int, layer: LayerWeights) -> tuple[int, ...]:
    """Of each channel of the layer's KV heads."""
    heads = config.heads_of(index)
    width, num_turned = heads.head_dim, heads.head_dim * config.rotary_dim // config.head_dim
    if layer.q_norm is not None and layer.k_norm is not None:
        q_X, k_X = np.square(layer.q_norm, dtype=np.float64), np.square(layer.k_norm, dtype=np.float64)
    elif layer.qkv is not None and layer.qkv.bias is not None and layer.q_up is None:
        q_end, k_end = heads.num_heads * width, (heads.num_heads + heads.num_kv_heads) * width
        q_X, k_X, _ = np.split(1 + np.square(layer.qkv.bias, dtype=np.float64), (q_end, k_end))
    else:
        return (0,) * (heads.num_kv_heads * width)
    q_HC = np.broadcast_to(q_X.reshape(-1, width), (heads.num_heads, width))
    q_GC = q_HC.reshape(heads.num_kv_heads, -1, width).mean(axis=1)
    k_GC = np.broadcast_to(k_X.reshape(-1, width), (heads.num_kv_heads, width))
    q_GC, k_GC = (np.maximum(_of_pairs(square_GC, num_turned), _LEAST_SQUARE) for square_GC in (q_GC, k_GC))
    # A quarter of the ratio's binary logarithm, rounded: without a logarithm, which libraries round in their own ways.
    exponents_GC = (np.frexp(k_GC / q_GC)[1] + 1) // 4
    return tuple(np.clip(exponents_GC, -_MOST_EXPONENT, _MOST_EXPONENT).reshape(-1).tolist())


def _of_pairs(square_GC: np.ndarray, num_turned: int) -> np.ndarray:
    """The mean of each two channels that RoPE turns together, in the place of both."""
    half = num_turned // 2
    mean_Gh = (square_GC[:, :half] + square_GC[:, half:num_turned]) / 2
    return np.concatenate([mean_Gh, mean_Gh, square_GC[:, num_turned:]], axis=1)
