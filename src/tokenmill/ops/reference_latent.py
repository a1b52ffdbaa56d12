"""Latent KV in numpy: the layout of a latent group (core/block.py), and attention over it.

T tokens  H heads  X channels of a latent key  P positions  s slots of a block  B blocks
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .api import HeadGeometry, LatentGeometry, StepBatch
from .forward import ForwardOps
from .reference_kv import ReferenceKV, from_stored, int8_codes, to_stored
from .reference_moe import ReferenceStack

_STORED: dict[str, Any] = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "int8": np.int8}

_LEAST_FACTOR = np.float32(2.0**-56)


def queries(
    ops: ForwardOps,
    q_TW: np.ndarray,
    k_up: ReferenceStack,
    positions_T: np.ndarray,
    table_PR: np.ndarray,
    latent: LatentGeometry,
) -> np.ndarray:
    """See ForwardOps.latent_queries."""
    num_tokens = len(q_TW)
    q_THc = q_TW.reshape(num_tokens, latent.num_heads, latent.query_dim)
    wide_TX = ops.linear_heads(q_THc[..., : latent.nope_dim].reshape(num_tokens, -1), k_up)
    wide_THX = wide_TX.reshape(num_tokens, latent.num_heads, -1)
    turned_THc = _turned(ops, q_THc[..., latent.nope_dim :], positions_T, table_PR)
    return np.concatenate([wide_THX, turned_THc], axis=-1).reshape(num_tokens, -1)


def latents(
    ops: ForwardOps,
    c_TX: np.ndarray,
    weight: np.ndarray,
    eps: float,
    positions_T: np.ndarray,
    table_PR: np.ndarray,
    latent: LatentGeometry,
) -> np.ndarray:
    """See ForwardOps.latent_kv."""
    value_TX = ops.rms_norm(c_TX[:, : latent.latent_dim], weight, eps)
    turned_T1c = _turned(ops, c_TX[:, None, latent.latent_dim :], positions_T, table_PR)
    return np.concatenate([value_TX, turned_T1c[:, 0]], axis=1)


def _turned(ops: ForwardOps, x_THc: np.ndarray, positions_T: np.ndarray, table_PR: np.ndarray) -> np.ndarray:
    heads = HeadGeometry(x_THc.shape[1], 0, x_THc.shape[2])
    flat_TW = np.ascontiguousarray(x_THc).reshape(len(x_THc), -1)
    turned_TW: np.ndarray = ops.rope(flat_TW, positions_T, table_PR, heads)
    return turned_TW.reshape(x_THc.shape)


def write(kv: ReferenceKV, layer: int, c_TX: np.ndarray, batch: StepBatch, latent: LatentGeometry) -> None:
    """See ForwardOps.write_latent."""
    group = kv.group
    assert c_TX.shape[1] == group.head_dim == latent.key_dim, (c_TX.shape, group, latent)
    sequence_T = np.repeat(np.arange(len(batch.context_lens_S)), np.diff(batch.row_starts_S1))
    block_T = kv.blocks_of(batch)[sequence_T, batch.positions_T // group.block_size]
    slot_T = batch.positions_T % group.block_size
    codes_BsX, scales_Bs = _views(kv, layer)
    if scales_Bs is None:
        if group.dtype == "bf16":
            c_TX = np.where(np.abs(c_TX) < _LEAST_FACTOR, np.float32(0), c_TX)
        stored_TX = to_stored(c_TX, group.dtype)
        fits_T = np.isfinite(from_stored(stored_TX, group.dtype)).all(axis=-1)
        codes_BsX[block_T, slot_T] = to_stored(_hidden(c_TX, fits_T, latent), group.dtype)
        return
    fits_T = np.isfinite(c_TX).all(axis=-1)
    codes_T1X, scales_T1 = int8_codes(np.where(fits_T[:, None], c_TX, np.float32(0))[:, None])
    codes_BsX[block_T, slot_T] = codes_T1X[:, 0]
    scales_Bs[block_T, slot_T] = np.where(fits_T, scales_T1[:, 0], np.float32(np.nan))


def _hidden(c_TX: np.ndarray, fits_T: np.ndarray, latent: LatentGeometry) -> np.ndarray:
    """Rows that do not fit: 0 where they are values, NaN where they are keys alone."""
    nothing_X = np.zeros(c_TX.shape[1], np.float32)
    nothing_X[latent.latent_dim :] = np.nan
    return np.where(fits_T[:, None], c_TX, nothing_X)


def attend(
    kv: ReferenceKV, layer: int, q_TX: np.ndarray, batch: StepBatch, latent: LatentGeometry, scale: float
) -> np.ndarray:
    """See ForwardOps.latent_attention."""
    q_THX = q_TX.reshape(len(q_TX), latent.num_heads, latent.key_dim)
    out_THv = np.empty((len(q_TX), latent.num_heads, latent.latent_dim), np.float32)
    tables_SB = kv.blocks_of(batch)
    for s, length in enumerate(batch.context_lens_S):
        first, end = batch.row_starts_S1[s], batch.row_starts_S1[s + 1]
        keys_PX, values_Pv = _read(kv, layer, tables_SB[s, : -(-length // kv.group.block_size)], length, latent)
        scores_HtP = (q_THX[first:end].swapaxes(0, 1) @ keys_PX.T) * np.float32(scale)
        scores_HtP[:, batch.positions_T[first:end, None] < np.arange(length)] = -np.inf
        weights_HtP = np.exp(scores_HtP - scores_HtP.max(axis=-1, keepdims=True))
        mixed_Htv = (weights_HtP @ values_Pv) / weights_HtP.sum(axis=-1, keepdims=True)
        out_THv[first:end] = mixed_Htv.swapaxes(0, 1)
    return out_THv.reshape(len(q_TX), -1)


def _read(
    kv: ReferenceKV, layer: int, blocks: np.ndarray, length: int, latent: LatentGeometry
) -> tuple[np.ndarray, np.ndarray]:
    """Keys [P, X] and values [P, latent_dim]."""
    codes_BsX, scales_Bs = _views(kv, layer)
    stored_PX = codes_BsX[blocks].reshape(-1, kv.group.head_dim)[:length]
    if scales_Bs is None:
        keys_PX = from_stored(stored_PX, kv.group.dtype)
        return keys_PX, keys_PX[:, : latent.latent_dim]
    scales_P = scales_Bs[blocks].reshape(-1)[:length]
    values_Pv = stored_PX[:, : latent.latent_dim] * np.nan_to_num(scales_P)[:, None]
    return stored_PX * scales_P[:, None], values_Pv


def _views(kv: ReferenceKV, layer: int) -> tuple[np.ndarray, np.ndarray | None]:
    """[B, s, X] of one layer, in the pool's own dtype (bf16 as uint16), and the scales [B, s] of int8."""
    group, size = kv.group, kv.group.bytes_per_layer_block
    layer_BX = kv.pool[:, layer * size : (layer + 1) * size]
    num_codes = group.block_size * group.head_dim * group.bytes_per_value
    codes_BX = layer_BX[:, :num_codes]
    shape = (len(kv.pool), group.block_size, group.head_dim)
    strides = (layer_BX.strides[0], group.head_dim * group.bytes_per_value, group.bytes_per_value)
    codes_BsX = _strided(codes_BX, _STORED[group.dtype], shape, strides)
    if group.dtype != "int8":
        return codes_BsX, None
    scales = _strided(layer_BX[:, num_codes:], np.float32, shape[:2], (layer_BX.strides[0], 4))
    return codes_BsX, scales


def _strided(data: np.ndarray, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(data.view(dtype), shape, strides)
