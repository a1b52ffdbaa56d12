"""Latent attention on the native kernels is one function of a row and its context, to the bit: on every instruction
set, for every number of threads, whatever else is in the step and however the step is cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from ops_latent_cases import latent_cases, latent_group

from tokenmill.core.block import KV_DTYPES
from tokenmill.ops.api import LatentGeometry, StepBatch
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

LATENT = LatentGeometry(6, 16, 16, 48, 16)
NUM_BLOCKS, BLOCK_SIZE, MAX_LENGTH = 320, 16, 1300


def test_all_variants_agree() -> None:
    """Every case of the table of conformance: the bytes of plain loops. No family has its own arithmetic."""
    plain = NativeOps(1, "scalar")
    others = [NativeOps(2, isa) for isa in available_isas((*ISAS, *TILE_ISAS)) if isa != "scalar"]
    for what, name, run in latent_cases():
        if what == "project":  # linears, whose families differ: tested as such
            continue
        expected = run(plain)
        for ops in others:
            assert run(ops).tobytes() == expected.tobytes(), (ops.isa, name)
    for ops in (plain, *others):
        ops.close()


class Attention:
    """Latent attention alone over a pool of random latents; queries by step row."""

    def __init__(self, ops: Any, dtype: str, latent: LatentGeometry = LATENT) -> None:
        rng = np.random.default_rng(3)
        self.latent = latent
        group = latent_group(latent, BLOCK_SIZE, dtype, 1)
        self.pool = np.zeros((NUM_BLOCKS, group.bytes_per_block), np.uint8)
        self.kv = ops.bind_kv(self.pool, group)
        rows = rng.standard_normal((NUM_BLOCKS * BLOCK_SIZE, latent.key_dim)).astype(np.float32)
        whole = StepBatch(
            *(np.zeros(len(rows), np.int32), np.arange(len(rows), dtype=np.int32)),
            *(np.array([0, len(rows)], np.int32), np.array([len(rows)], np.int32)),
            *(np.arange(NUM_BLOCKS, dtype=np.int32)[None], np.zeros(0, np.int32)),
        )
        ops.write_latent(self.kv, 0, rows, whole, latent)
        self._ops = ops
        self._programs: dict[int, Any] = {}

    def __call__(self, rows: list[tuple[np.ndarray, int, np.ndarray]]) -> list[np.ndarray]:
        """rows: of each sequence its blocks, its length, and the queries of its last positions."""
        starts = np.cumsum([0] + [len(q) for _, _, q in rows]).astype(np.int32)
        tables = np.zeros((len(rows), max(len(table) for table, _, _ in rows)), np.int32)
        for row, (table, _, _) in zip(tables, rows, strict=True):
            row[: len(table)] = table
        lengths = np.array([length for _, length, _ in rows], np.int32)
        positions = [np.arange(length - len(q), length, dtype=np.int32) for _, length, q in rows]
        queries = np.concatenate([q for _, _, q in rows])
        nothing = np.zeros(0, np.int32)
        batch = StepBatch(np.zeros(len(queries), np.int32), np.concatenate(positions), starts, lengths, tables, nothing)
        out = self._ops.latent_attention(self.kv, 0, queries, batch, self.latent, 0.2)
        return [out[begin:end] for begin, end in pairwise(starts)]


def _mix(rng: np.random.Generator) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """Sequences that share leading blocks with one another or not, with one row or many."""
    free = list(rng.permutation(NUM_BLOCKS))
    prefix = [free.pop() for _ in range(64)]
    rows = []
    for _ in range(int(rng.integers(1, 6))):
        length = int(rng.integers(1, 700))
        shared = prefix[: int(rng.choice([0, 16, 33, 48]))]
        length += BLOCK_SIZE * len(shared)
        count = -(-length // BLOCK_SIZE)
        table = np.array(shared + [free.pop() for _ in range(count - len(shared))], np.int32)
        num_rows = min(length, int(rng.choice([1, 1, 2, 17, 90])))
        q = rng.standard_normal((num_rows, LATENT.num_heads * LATENT.key_dim)).astype(np.float32)
        rows.append((table, length, q))
        if len(free) < 60:
            break
    return rows


@pytest.fixture(scope="module")
def teams() -> Iterator[list[NativeOps]]:
    made = [NativeOps(count) for count in (1, 2, 3)]
    yield made
    for ops in made:
        ops.close()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rows_give_solo_bits_in_any_mix(teams: list[NativeOps], dtype: str) -> None:
    """Each row of random mixes, against itself alone; contexts are split among threads, or passes shared, or none."""
    rng = np.random.default_rng(17)
    attentions = [Attention(ops, dtype) for ops in teams]
    for _ in range(6):
        rows = _mix(rng)
        alone = []
        for table, length, q in rows:
            picked = sorted({0, len(q) - 1, int(rng.integers(len(q)))})
            at = [length - len(q) + i for i in picked]
            alone.append(
                {i: attentions[0]([(table, p + 1, q[i : i + 1])])[0][0] for i, p in zip(picked, at, strict=True)}
            )
        for attention in attentions:
            for got, expected in zip(attention(rows), alone, strict=True):
                assert np.isfinite(got).all()
                for i, row in expected.items():
                    assert np.array_equal(got[i], row)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_who_does_not_see_a_bad_latent_does_not_hear_of_it(teams: list[NativeOps], dtype: str, bad: float) -> None:
    """A latent with a value that is no number, or none of the type: rows from its position on are NaN (where the type
    does not hold it), those before it and other sequences have the bits they have without it."""
    rng = np.random.default_rng(4)
    attention = Attention(teams[1], dtype)
    tables = [np.arange(40, dtype=np.int32), np.arange(40, 60, dtype=np.int32)]
    rows = [
        (table, length, rng.standard_normal((60, LATENT.num_heads * LATENT.key_dim)).astype(np.float32))
        for table, length in zip(tables, (540, 290), strict=True)
    ]
    expected = attention(rows)
    position, count = 500, 1
    c_TX = rng.standard_normal((count, LATENT.key_dim)).astype(np.float32)
    c_TX[0, 5] = bad
    batch = StepBatch(
        *(np.zeros(1, np.int32), np.array([position], np.int32), np.array([0, 1], np.int32)),
        *(np.array([position + 1], np.int32), tables[0][None], np.zeros(0, np.int32)),
    )
    teams[1].write_latent(attention.kv, 0, c_TX, batch, LATENT)
    got = attention(rows)
    before = position - (540 - 60)
    assert np.array_equal(got[1], expected[1]) and np.array_equal(got[0][:before], expected[0][:before])
    if dtype != "f16" and bad == 3e38:  # a number of the type, that scores and answers need not be of
        return
    assert np.isnan(got[0][before:]).all()
