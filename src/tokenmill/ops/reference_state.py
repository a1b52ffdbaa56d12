"""Layers that keep a state, in numpy: where it lies in a block, the convolution and the recurrence.

T tokens  H heads  K taps, or channels of keys  W channels of the convolution  X columns of keys or values  N steps
G columns of gates
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from ..core.block import NO_BLOCK
from .api import BY_HEAD, BY_VALUE, StateGeometry, StepBatch
from .reference_kv import ReferenceKV


def convolve(
    kv: ReferenceKV,
    layer: int,
    x_TW: np.ndarray,
    weight_KW: np.ndarray,
    bias_W: np.ndarray | None,
    batch: StepBatch,
    state: StateGeometry,
) -> np.ndarray:
    """See ForwardOps.causal_conv; without its silu."""
    num_taps = len(weight_KW)
    out_TW = np.zeros_like(x_TW)
    for first, end, position, table in _sequences(kv, batch):
        kept = _before(kv, layer, position, table, state)
        kept_kW = kept[: (num_taps - 1) * state.conv_width].reshape(-1, state.conv_width)
        inputs = np.concatenate([kept_kW, x_TW[first:end]])
        for index, row in enumerate(range(first, end)):
            window_KW = inputs[index : index + num_taps]
            out_TW[row] = (weight_KW * window_KW).sum(axis=0) + (0 if bias_W is None else bias_W)
            for block in _stays(kv, batch, row, position + index, end - row == 1, table):
                flat = _values(kv, layer, block, state)
                flat[: (num_taps - 1) * state.conv_width] = window_KW[1:].reshape(-1)
    return out_TW


def gates(
    x_TN: np.ndarray,
    y_TH: np.ndarray | None,
    rates_N: np.ndarray | None,
    bias_N: np.ndarray,
    limits: tuple[float, float],
) -> np.ndarray:
    """See ForwardOps.scan_gates."""
    step_TN = np.clip(np.logaddexp(np.float32(0), x_TN + bias_N), *limits).astype(np.float32)
    if rates_N is None:
        return step_TN
    with np.errstate(over="ignore"):  # exp may be inf, whose reciprocal is the right 0
        factor_TH = step_TN if y_TH is None else 1 / (1 + np.exp(-y_TH))
    return np.concatenate([np.exp(rates_N * step_TN), factor_TH], axis=1, dtype=np.float32)


def scan(
    kv: ReferenceKV,
    layer: int,
    keys_TX: np.ndarray,
    values_TX: np.ndarray,
    gates_TG: np.ndarray,
    batch: StepBatch,
    state: StateGeometry,
    skip: np.ndarray | None,
    rates_KX: np.ndarray | None,
) -> np.ndarray:
    """See ForwardOps.state_scan."""
    heads, first_value = state.num_heads, (state.taps - 1) * state.conv_width
    repeats = heads // state.num_key_heads
    queries_THd, keys_THd = (
        part.reshape(len(part), state.num_key_heads, -1).repeat(repeats, axis=1)
        for part in np.split(keys_TX, 2, axis=1)
    )
    values_THv = values_TX.reshape(len(values_TX), heads, -1)
    out_THv = np.zeros_like(values_THv)
    for first, end, position, table in _sequences(kv, batch):
        kept = _before(kv, layer, position, table, state)[first_value:]
        S_Hdv = kept.reshape(heads, state.key_dim, state.value_dim).copy()
        for index, row in enumerate(range(first, end)):
            decay, factor = _decay_and_factor(gates_TG[row], state, rates_KX)
            S_Hdv *= decay
            u_Hv = values_THv[row]
            if state.is_delta:
                u_Hv = u_Hv - np.einsum("hd,hdv->hv", keys_THd[row], S_Hdv)
            S_Hdv += keys_THd[row][:, :, None] * (u_Hv * factor)[:, None]
            out_THv[row] = np.einsum("hd,hdv->hv", queries_THd[row], S_Hdv)
            for block in _stays(kv, batch, row, position + index, end - row == 1, table):
                _values(kv, layer, block, state)[first_value:] = S_Hdv.reshape(-1)
    if skip is not None:
        out_THv += skip.reshape(heads, -1) * values_THv
    return out_THv.reshape(len(out_THv), -1)


def _decay_and_factor(
    gates_G: np.ndarray, state: StateGeometry, rates_KX: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Of a token: what S [H, key_dim, value_dim] is multiplied by, and u [H, value_dim]."""
    heads = state.num_heads
    if state.decay == BY_VALUE:
        assert rates_KX is not None, "decays by value have rates"
        rates_HKv = rates_KX.reshape(state.key_dim, heads, -1).swapaxes(0, 1)
        factor_Hv = gates_G.reshape(heads, -1)
        return np.exp(rates_HKv * factor_Hv[:, None]), factor_Hv
    decay_N, factor_H = np.split(gates_G, (state.num_steps,))
    shape = (heads, 1, 1) if state.decay == BY_HEAD else (heads, state.key_dim, 1)
    return decay_N.reshape(shape), factor_H[:, None]


def _sequences(kv: ReferenceKV, batch: StepBatch) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Of each with rows in the step: these, the position of the first, and the table."""
    starts = batch.row_starts_S1.tolist()
    for seq, (first, end) in enumerate(pairwise(starts)):
        if end > first:
            yield first, end, int(batch.context_lens_S[seq]) - (end - first), kv.blocks_of(batch)[seq]


def _values(kv: ReferenceKV, layer: int, block: int, state: StateGeometry) -> np.ndarray:
    """A view of what a layer keeps in a block."""
    values: np.ndarray = kv.pool[block].view(np.float32)[layer * state.num_values : (layer + 1) * state.num_values]
    return values


def _before(kv: ReferenceKV, layer: int, position: int, table: np.ndarray, state: StateGeometry) -> np.ndarray:
    if not position:
        return np.zeros(state.num_values, np.float32)
    return _values(kv, layer, int(table[(position - 1) // kv.group.block_size]), state).copy()


def _stays(
    kv: ReferenceKV, batch: StepBatch, row: int, position: int, is_last: bool, table: np.ndarray
) -> Iterator[int]:
    """The blocks, if any, in which the state behind this row stays."""
    size = kv.group.block_size
    block = int(table[position // size])
    if block != NO_BLOCK and (is_last or (position + 1) % size == 0):
        yield block
    if batch.state_blocks_T is not None and batch.state_blocks_T[row] != NO_BLOCK:
        yield int(batch.state_blocks_T[row])
