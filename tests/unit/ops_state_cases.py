"""Cases of the operations of layers that keep a state, for the table of test_ops_conformance.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tokenmill.core.block import NO_BLOCK, STATE, STATE_WINDOW, KVGroup
from tokenmill.ops.api import BY_HEAD, BY_KEY, BY_VALUE, StateGeometry, StepBatch

Run = Callable[[Any], np.ndarray]

GEOMETRIES = (
    StateGeometry(160, 4, 6, 2, 16, 16, is_delta=True),
    StateGeometry(70, 4, 5, 1, 12, 48),
    StateGeometry(600, 3),
    StateGeometry(33, 1, 2, 2, 128, 128, is_delta=True),
    StateGeometry(70, 4, 4, 2, 12, 48, is_delta=True, decay=BY_KEY),
    StateGeometry(48, 4, 1, 1, 16, 80, decay=BY_VALUE),
    StateGeometry(48, 4, 3, 3, 4, 16, decay=BY_VALUE),
)
SIZE = 4


def state_group(state: StateGeometry, num_layers: int = 2) -> KVGroup:
    return KVGroup(STATE, num_layers, 0, 0, SIZE, "f32", STATE_WINDOW, state_values=state.num_values)


def batch_and_pool(state: StateGeometry, rng: np.random.Generator) -> tuple[StepBatch, np.ndarray]:
    """Three sequences: one from its beginning, which leaves a state at some borders; one in the middle of a block,
    which it writes over; one that goes on from a border. Rows in the middle of a block and at a border leave it in a
    block of their own, too."""
    group = state_group(state)
    starts, lengths = [0, 6, 2 * SIZE], [11, 7, 2 * SIZE + 9]
    num_rows = [length - start for start, length in zip(starts, lengths, strict=True)]
    tables = np.zeros((3, 5), np.int32)
    tables[0, :3] = NO_BLOCK, 4, 1
    tables[1, :2] = NO_BLOCK, 6
    tables[2] = NO_BLOCK, 0, NO_BLOCK, 3, 5
    state_blocks = np.full(sum(num_rows), NO_BLOCK, np.int32)
    state_blocks[[5, num_rows[0] + num_rows[1] + SIZE - 1]] = 2, 7
    pool = rng.standard_normal((8, group.bytes_per_block // 4)).astype(np.float32)
    positions = np.concatenate([np.arange(start, end) for start, end in zip(starts, lengths, strict=True)])
    batch = StepBatch(
        tokens_T=np.zeros(len(positions), np.int32),
        positions_T=positions.astype(np.int32),
        row_starts_S1=np.cumsum([0, *num_rows], dtype=np.int32),
        context_lens_S=np.array(lengths, np.int32),
        block_tables_SB=tables,
        logit_rows_L=np.zeros(0, np.int32),
        state_blocks_T=state_blocks,
    )
    return batch, pool.view(np.uint8)


def state_cases() -> Iterator[tuple[str, str, Run]]:
    """What is computed, name, and how: what comes out, then what is in the pool."""
    for state in GEOMETRIES:
        shape = f"W={state.conv_width} K={state.taps} H={state.num_heads} {state.key_dim}x{state.value_dim}"
        for silu in (False, True):
            yield "conv", f"causal_conv {shape} silu={silu}", partial(_convolve, state, silu)
        if state.num_heads:
            for has_y in {BY_HEAD: (False, True), BY_KEY: (True,), BY_VALUE: (False,)}[state.decay]:
                yield "gates", f"scan_gates {shape} by {state.decay}, y={has_y}", partial(_gates, state, has_y)
            yield "scan", f"state_scan {shape} by {state.decay}, delta={state.is_delta}", partial(_scan, state)
    yield "row", "multiply", _multiply
    yield "row", "gate_rows by value", _gate
    yield "row", "norm_groups 48", partial(_norm, 48)
    yield "row", "norm_groups 7", partial(_norm, 7)


def _with_pool(out: np.ndarray, pool: np.ndarray) -> np.ndarray:
    return np.concatenate([out.reshape(-1), pool.view(np.float32).reshape(-1)])


def _convolve(state: StateGeometry, silu: bool, ops: Any) -> np.ndarray:
    rng = np.random.default_rng(state.conv_width)
    batch, pool = batch_and_pool(state, rng)
    kv = ops.bind_kv(pool, state_group(state))
    x_TW = rng.standard_normal((len(batch.tokens_T), state.conv_width)).astype(np.float32)
    weight = ops.vector(rng.standard_normal((state.taps, state.conv_width)))
    bias = ops.vector(rng.standard_normal(state.conv_width)) if silu else None
    return _with_pool(ops.causal_conv(kv, 1, x_TW, weight, bias, batch, state, silu=silu), pool)


def _gates(state: StateGeometry, has_y: bool, ops: Any) -> np.ndarray:
    rng, num_steps = np.random.default_rng(state.num_heads), state.num_steps
    x_TN, y_TH = (8 * rng.standard_normal((9, width)).astype(np.float32) for width in (num_steps, state.num_heads))
    rates, bias = ops.vector(-rng.uniform(0.01, 3, num_steps)), ops.vector(rng.standard_normal(num_steps))
    rates = None if state.decay == BY_VALUE else rates
    made: np.ndarray = ops.scan_gates(x_TN, y_TH if has_y else None, rates, bias, state, limits=(1e-3, 9.0))
    return made


def _scan(state: StateGeometry, ops: Any) -> np.ndarray:
    rng = np.random.default_rng(state.key_dim)
    batch, pool = batch_and_pool(state, rng)
    kv, num = ops.bind_kv(pool, state_group(state)), len(batch.tokens_T)
    keys_TX = (rng.standard_normal((num, 2 * state.keys_width)) * state.key_dim**-0.5).astype(np.float32)
    values_TX = rng.standard_normal((num, state.values_width)).astype(np.float32)
    gates_TG = rng.uniform(0.1, 1, (num, state.gates_width)).astype(np.float32)
    by_value = state.decay == BY_VALUE
    skip = ops.vector(rng.standard_normal(state.values_width if by_value else state.num_heads))
    rates = ops.vector(-rng.uniform(0.01, 3, (state.key_dim, state.values_width)))
    more = {"skip": None if state.is_delta else skip, "rates_KX": rates if by_value else None}
    return _with_pool(ops.state_scan(kv, 1, keys_TX, values_TX, gates_TG, batch, state, **more), pool)


def _rows(width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(width)
    return tuple(4 * rng.standard_normal((5, width)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


def _multiply(ops: Any) -> np.ndarray:
    made: np.ndarray = ops.multiply(*_rows(77))
    return made


def _gate(ops: Any) -> np.ndarray:
    made: np.ndarray = ops.gate_rows(*_rows(77))
    return made


def _norm(size: int, ops: Any) -> np.ndarray:
    x_TD, y_TD = _rows(3 * size)
    made: np.ndarray = ops.norm_groups(x_TD, ops.vector(y_TD[0]), size, 1e-5)
    return made
