"""The order of a matrix's rows and columns in a file, and the one that is computed with.

Raw rows are moved, of quantised matrices too: no value changes. Columns stay, and the matrix says which input each
belongs to: blocks of quantised values reach over what would have to be moved apart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..ops.api import RawTensor, StateGeometry
from .config import ModelConfig
from .moe import PAIRED


def rows_in_order(config: ModelConfig, role: str, part: RawTensor) -> RawTensor:
    """The role's rows, or its values as a column, in the order that they are computed in: parts together, RoPE pairs
    half-split, and a mixer's heads of values those of each head of keys together."""
    part = parts_in_order(config, role, part)
    if config.mixer is not None and config.family.tiled_values:
        return _grouped(config.mixer.state, role, part)
    latent = config.latent
    heads = {"q_b" if config.query_rank else "q": (config.num_heads, 0 if latent is None else latent.nope_dim)}
    if latent is None:
        heads["k"] = (config.num_kv_heads, 0)
    else:  # what turns comes last
        heads["kv_a"] = (1, latent.latent_dim)
    if not config.family.interleaved_heads or role not in heads:
        return part
    num_heads, first = heads[role]
    return half_split(part, num_heads, config.rotary_dim, first)


def parts_in_order(config: ModelConfig, role: str, part: RawTensor) -> RawTensor:
    """Of what all files have in one order: gates above ups where they are paired, all queries above their gates, or all
    keys, and of a mixer all queries, keys, values and so on above each other."""
    if role == "qkv" and config.family.qkv_by_group:
        queries = config.num_heads // config.num_kv_heads * config.head_dim
        return parts_together(part, (queries, config.head_dim, config.head_dim))
    if role == "q" and config.family.gated_attention and not config.family.own_gates:
        return parts_together(part, (config.head_dim,) * 2)
    if role == "expert_gate_up" and config.moe is not None and config.moe.form == PAIRED:
        return parts_together(part, (1, 1))
    if config.mixer is None or role not in ("mixer_qkvz", "mixer_ba"):
        return part
    state = config.mixer.state
    heads = state.num_heads // state.num_key_heads
    values = heads * state.value_dim
    return parts_together(part, (heads,) * 2 if role == "mixer_ba" else (state.key_dim,) * 2 + (values,) * 2)


def inputs_in_order(config: ModelConfig, role: str, part: RawTensor) -> RawTensor:
    """The role's matrix with the order of its columns, where that is not the one of its inputs."""
    if role != "mixer_out" or config.mixer is None or not config.family.tiled_values:
        return part
    state = config.mixer.state
    inputs = np.arange(part.num_cols, dtype=np.int32).reshape(state.num_key_heads, -1, state.value_dim)
    return part if state.num_heads == state.num_key_heads else replace(part, order=inputs.swapaxes(0, 1).reshape(-1))


def _grouped(state: StateGeometry, role: str, part: RawTensor) -> RawTensor:
    """What heads of values have, those of each head of keys together."""
    if role not in ("mixer_qkv", "mixer_z", "mixer_b", "mixer_a", "conv", "dt_bias", "a_log"):
        return part
    size = state.value_dim if role in ("mixer_qkv", "mixer_z", "conv") else 1
    first = 2 * state.keys_width * part.row_bytes if role in ("mixer_qkv", "conv") else 0
    values = replace(part, num_rows=state.num_heads * size, data=part.data[first:])
    values = parts_together(values, (size,) * state.num_key_heads)
    return replace(part, data=np.concatenate([part.data[:first], values.data]))


def parts_together(part: RawTensor, sizes: tuple[int, ...]) -> RawTensor:
    """The rows come group by group, each of which has `sizes` rows of its parts: all of the first part before all of
    the second, and so on."""
    groups = part.data.reshape(-1, sum(sizes), part.row_bytes)
    parts = np.split(groups, np.cumsum(sizes)[:-1], axis=1)
    return replace(part, data=np.concatenate([rows.reshape(-1) for rows in parts]))


def half_split(part: RawTensor, num_heads: int, num_turned: int, first: int = 0) -> RawTensor:
    """Within each head, row 2i + h of the R from `first` on that turn goes to row h * R/2 + i of them: the two of a
    pair move from neighbours to half of them apart."""
    rows, end = part.data.reshape(num_heads, -1, part.row_bytes), first + num_turned
    turned = rows[:, first:end].reshape(num_heads, -1, 2, part.row_bytes).swapaxes(1, 2)
    moved = np.concatenate([rows[:, :first], turned.reshape(num_heads, num_turned, -1), rows[:, end:]], axis=1)
    return replace(part, data=moved.reshape(-1))
