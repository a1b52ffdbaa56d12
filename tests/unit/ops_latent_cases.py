"""Cases of latent attention's operations, for the table of test_ops_conformance.py, and what its other tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from ops_cases import Sequences, activations
from ops_stack_cases import raw_stack

from tokenmill.core.block import KV_DTYPES, LATENT, KVGroup
from tokenmill.ops.api import LatentGeometry

Run = Callable[[Any], np.ndarray]

GEOMETRIES = (
    (LatentGeometry(16, 64, 64, 512, 64), 16),
    (LatentGeometry(5, 24, 8, 40, 16), 5),
    (LatentGeometry(40, 16, 32, 64, 24), 1),
    (LatentGeometry(1, 32, 6, 18, 8), 32),
)
"""Geometries and block sizes. Of them, 576 and 96 channels are used where they lie; 113 heads are more than a pass."""

_LENGTHS = (3, 530, 270, 1)


def latent_group(latent: LatentGeometry, block_size: int, dtype: str, num_layers: int = 2) -> KVGroup:
    width = latent.key_dim
    return KVGroup(LATENT, num_layers, 1, width, block_size, dtype, value_dim=latent.latent_dim)


def rope_table(num_positions: int, num_turned: int) -> np.ndarray:
    angles = np.arange(num_positions)[:, None] * 100.0 ** (-np.arange(num_turned // 2) / (num_turned // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def latent_cases() -> Iterator[tuple[str, str, Run]]:
    """What is computed (projection, write or attention), name, and how."""
    for latent, block_size in GEOMETRIES:
        shape = f"H={latent.num_heads} X={latent.latent_dim}+{latent.rope_dim}"
        for kind in ("f32", "f16", "bf16", "q8_0"):
            if kind != "q8_0" or latent.query_dim % 32 == latent.nope_dim % 32 == 0:
                yield "project", f"latent_queries {shape} {kind}", partial(_queries, latent, kind)
        yield "norm", f"latent_kv {shape}", partial(_latents, latent)
        for dtype in KV_DTYPES:
            name = f"{shape} block={block_size} {dtype}"
            yield "write", f"write_latent {name}", partial(_write, latent, block_size, dtype)
            yield "attend", f"latent_attention {name}", partial(_attend, latent, block_size, dtype)


def _queries(latent: LatentGeometry, kind: str, ops: Any) -> np.ndarray:
    rng = np.random.default_rng(latent.num_heads)
    stack = ops.pack_stack(raw_stack(rng, kind, latent.num_heads, latent.latent_dim, latent.nope_dim))
    x = activations(rng, 13, latent.num_heads * latent.query_dim)
    x /= np.abs(x).max(axis=1, keepdims=True)
    table = ops.vector(rope_table(40, latent.rope_dim))
    wide: np.ndarray = ops.latent_queries(x, stack, np.arange(20, 33, dtype=np.int32), table, latent)
    return wide


def _latents(latent: LatentGeometry, ops: Any) -> np.ndarray:
    rng = np.random.default_rng(latent.num_heads)
    x = rng.standard_normal((13, latent.key_dim)).astype(np.float32)
    weight = ops.vector(rng.uniform(0.5, 1.5, latent.latent_dim))
    table = ops.vector(rope_table(40, latent.rope_dim))
    made: np.ndarray = ops.latent_kv(x, weight, 1e-5, np.arange(20, 33, dtype=np.int32), table, latent)
    return made


def _prepare(latent: LatentGeometry, block_size: int, dtype: str, ops: Any) -> tuple[Any, ...]:
    rng = np.random.default_rng(latent.key_dim + block_size)
    group = latent_group(latent, block_size, dtype)
    sequences = Sequences.scatter(rng, list(_LENGTHS), block_size)
    pool = np.zeros((sequences.num_blocks, group.bytes_per_block), np.uint8)
    kv = ops.bind_kv(pool, group)
    batch = sequences.batch([(s, [0] * length, 0) for s, length in enumerate(_LENGTHS)])
    c_TX = rng.standard_normal((len(batch.tokens_T), latent.key_dim)).astype(np.float32)
    c_TX[7, ::3] = 1e-18  # nothing, as a factor
    ops.write_latent(kv, 1, c_TX, batch, latent)
    return rng, sequences, kv, pool


def _write(latent: LatentGeometry, block_size: int, dtype: str, ops: Any) -> np.ndarray:
    written: np.ndarray = _prepare(latent, block_size, dtype, ops)[3].astype(np.float32)
    return written


def _attend(latent: LatentGeometry, block_size: int, dtype: str, ops: Any) -> np.ndarray:
    rng, sequences, kv, _ = _prepare(latent, block_size, dtype, ops)
    batch = sequences.batch([(2, [0] * 270, 250), (1, [0] * 530, 529), (0, [0] * 3, 0), (3, [0], 0)])
    width = latent.num_heads * latent.key_dim
    q_TX = rng.standard_normal((len(batch.tokens_T), width)).astype(np.float32)
    mixed: np.ndarray = ops.latent_attention(kv, 1, q_TX, batch, latent, latent.key_dim**-0.5)
    return mixed
