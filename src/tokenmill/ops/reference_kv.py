"""What the bytes of a KV pool mean, in numpy: the layouts of core/block.py as views, and their dtypes as float32.

B blocks  G KV heads  C channels per head  s slots of a block  T tokens  S sequences  P positions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.block import KVGroup
from .api import StepBatch

_STORED: dict[str, Any] = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32}
_SMALLEST_MAX = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class ReferenceKV:
    """A pool, uint8 [B, bytes_per_block], and its geometry."""

    pool: np.ndarray
    group: KVGroup

    def blocks_of(self, batch: StepBatch) -> np.ndarray:
        """int32 [S, B]: the sequences' block ids in this pool."""
        num_seqs = len(batch.context_lens_S)
        return batch.block_tables_SB[self.group.table * num_seqs : (self.group.table + 1) * num_seqs]

    def write(self, layer: int, block_T: np.ndarray, slot_T: np.ndarray, k_TGC: np.ndarray, v_TGC: np.ndarray) -> None:
        if self.group.dtype == "int8":
            k_TGC, v_TGC = rotated(np.ldexp(k_TGC, -self._key_exponents(layer))), rotated(v_TGC)
        k_TGC, v_TGC = _finite_values(k_TGC, v_TGC, self.group.dtype)
        if self.group.dtype != "int8":
            keys_BGCs, values_BGsC = self._plain(layer)
            keys_BGCs[block_T, :, :, slot_T] = to_stored(k_TGC, self.group.dtype)
            values_BGsC[block_T, :, slot_T, :] = to_stored(v_TGC, self.group.dtype)
            return
        keys_BGks4, values_BGskC4, k_scales_BGs, v_scales_BGs = self._codes(layer)
        codes_TGC, k_scales_BGs[block_T, :, slot_T] = int8_codes(k_TGC)
        for c in range(self.group.head_dim):
            keys_BGks4[block_T, :, c // 4, slot_T, c % 4] = codes_TGC[..., c].view(np.uint8) + np.uint8(128)
        codes_TGC, v_scales_BGs[block_T, :, slot_T] = int8_codes(v_TGC)
        values_BGskC4[block_T, :, slot_T // 4, :, slot_T % 4] = codes_TGC.view(np.uint8)

    def read(self, layer: int, blocks: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The first `length` keys [G, C, P] and values [G, P, C] that lie in these blocks."""
        groups, width = self.group.num_kv_heads, self.group.head_dim
        if self.group.dtype != "int8":
            keys_BGCs, values_BGsC = self._plain(layer)
            k_BGCs = from_stored(keys_BGCs[blocks], self.group.dtype)
            v_BGsC = from_stored(values_BGsC[blocks], self.group.dtype)
        else:
            block = np.float32(rotated_block(width))
            keys_BGks4, values_BGskC4, k_scales_BGs, v_scales_BGs = (part[blocks] for part in self._codes(layer))
            k_BGCs = keys_BGks4.swapaxes(3, 4).reshape(len(blocks), groups, -1, self.group.block_size)[:, :, :width]
            k_BGCs = (k_BGCs - np.float32(128)) * k_scales_BGs[:, :, None]
            k_BGsC = np.ldexp(rotated(k_BGCs.swapaxes(2, 3)) / block, self._key_exponents(layer)[:, None])
            k_BGCs = k_BGsC.swapaxes(2, 3)
            v_BGsC = values_BGskC4.swapaxes(3, 4).reshape(len(blocks), groups, -1, width)[:, :, : self.group.block_size]
            v_BGsC = rotated(v_BGsC.view(np.int8) * v_scales_BGs[..., None]) / block
        k_GCP = k_BGCs.transpose(1, 2, 0, 3).reshape(groups, width, -1)
        v_GPC = v_BGsC.transpose(1, 0, 2, 3).reshape(groups, -1, width)
        return k_GCP[..., :length], v_GPC[:, :length]

    def _key_exponents(self, layer: int) -> np.ndarray:
        """int [G, C], or [1, 1] where all are 0."""
        shape = self.group.num_kv_heads, self.group.head_dim
        return (
            np.array(self.group.key_exponents[layer]).reshape(shape)
            if self.group.key_exponents
            else np.zeros((1, 1), int)
        )

    def _plain(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Views K [B, G, C, s] and V [B, G, s, C] of one layer, in the pool's own dtype (bf16 as uint16)."""
        group, stored = self.group, _STORED[self.group.dtype]
        size, width = group.block_size, group.head_dim
        layer_BX = self._layer(layer).view(stored).reshape(len(self.pool), 2, group.num_kv_heads, -1)
        shape = (len(self.pool), group.num_kv_heads)
        return layer_BX[:, 0].reshape(*shape, width, size), layer_BX[:, 1].reshape(*shape, size, width)

    def _codes(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views K [B, G, C/4, s, 4], V [B, G, s/4, C, 4], uint8, and float32 scales [B, G, s] of each."""
        group, layer_BX = self.group, self._layer(layer)
        size, width, heads = group.block_size, group.head_dim, group.num_kv_heads
        shapes = ((-(-width // 4), size, 4), (-(-size // 4), width, 4), (size, 4), (size, 4))
        ends = np.cumsum([heads * int(np.prod(shape)) for shape in shapes])
        parts = np.split(layer_BX, ends[:-1], axis=1)
        views = [
            np.lib.stride_tricks.as_strided(
                part,
                (len(self.pool), heads, *shape),
                (layer_BX.strides[0], *(int(np.prod(shape[at:])) for at in range(len(shape) + 1))),
            )
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return views[0], views[1], views[2].view(np.float32)[..., 0], views[3].view(np.float32)[..., 0]

    def _layer(self, layer: int) -> np.ndarray:
        """uint8 [B, bytes of one layer]"""
        size = self.group.bytes_per_layer_block
        return self.pool[:, layer * size : (layer + 1) * size]


def rotated(x_XC: np.ndarray) -> np.ndarray:
    """float32 [..., C]: each block of 2^n channels, as many as divide C, times the Hadamard matrix of +1 and -1 in its
    natural order. Done twice it gives each value times the channels of a block."""
    num_channels, apart = x_XC.shape[-1], 1
    while apart < rotated_block(num_channels):
        pairs_X2c = x_XC.reshape(*x_XC.shape[:-1], -1, 2, apart)
        with np.errstate(invalid="ignore"):  # what is not finite stays so
            sums_Xc = pairs_X2c[..., 0, :] + pairs_X2c[..., 1, :], pairs_X2c[..., 0, :] - pairs_X2c[..., 1, :]
        x_XC = np.stack(sums_Xc, axis=-2).reshape(x_XC.shape)
        apart *= 2
    return x_XC


def rotated_block(num_channels: int) -> int:
    """The largest power of two that divides them."""
    return num_channels & -num_channels


def int8_codes(x_TGC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 codes [T, G, C] and float32 scales [T, G]: see `write_kv` in ops/forward.py."""
    most_TG1 = np.abs(x_TGC).max(axis=-1, keepdims=True)
    inverse_TG1: np.ndarray = np.where(
        most_TG1 < _SMALLEST_MAX, 0, np.float32(127) / np.maximum(most_TG1, _SMALLEST_MAX)
    )
    with np.errstate(invalid="ignore"):  # what is not finite has no code; its scale says so
        codes_TGC = np.rint(x_TGC * inverse_TG1).astype(np.int8)
    return codes_TGC, np.where(most_TG1 < _SMALLEST_MAX, 0, most_TG1 / np.float32(127))[..., 0]


def _finite_values(k_TGC: np.ndarray, v_TGC: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Where K or V of a token and head would not be finite as `dtype`, K is NaN and V is 0: see `write_kv`."""
    stored = "f32" if dtype == "int8" else dtype
    fits_TG1 = np.ones((*k_TGC.shape[:2], 1), bool)
    for x_TGC in (k_TGC, v_TGC):
        fits_TG1 &= np.isfinite(from_stored(to_stored(x_TGC, stored), stored)).all(axis=-1, keepdims=True)
    return np.where(fits_TG1, k_TGC, np.float32(np.nan)), np.where(fits_TG1, v_TGC, np.float32(0))


def to_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> f16, bf16 (as uint16) or f32, rounded to nearest even."""
    if dtype == "bf16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):  # beyond float16's range is inf, as in hardware
        return values.astype(_STORED[dtype])


def from_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
