"""Attention of rows that share blocks: spans read once for several sequences give the bits of solo runs.

The attention operation alone, on random keys and values, over tables that share leading blocks in every way a prefix
tree can make them; the expected rows come from steps of one sequence, whose tables share with nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from ops_cases import kv_type, raw_tensor

from tokenmill.core.block import KVGroup, num_hidden_blocks
from tokenmill.ops.api import HeadGeometry, StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

NUM_INPUTS = 64


@dataclass(frozen=True)
class Branch:
    """A sequence: it shares the first `shared` positions' whole blocks with sequence `parent`."""

    length: int
    parent: int = -1
    shared: int = 0
    rows: int = 1


# Spans end at 256, 512, 768, 1024.
MIXES = {
    "one prefix of whole spans": [Branch(1100)] + [Branch(1030 + 9 * i, 0, 1024) for i in range(6)],
    "a prefix that ends inside a span": [Branch(700)] + [Branch(560 + i, 0, 544) for i in range(4)],
    "less than a span": [Branch(300), Branch(290, 0, 240), Branch(257, 0, 240)],
    "different lengths and shares": [Branch(1040), Branch(300, 0, 256), Branch(790, 0, 768), Branch(600, 0, 512)],
    "exactly the prefix": [Branch(513), Branch(512, 0, 512), Branch(256, 0, 256), Branch(257, 0, 256)],
    "a tree": [
        Branch(900),
        Branch(900, 0, 256),
        Branch(850, 1, 768),
        Branch(830, 0, 768),
        Branch(40),
        Branch(600, 2, 512),
    ],
    "two prefixes": [Branch(600), Branch(600), Branch(530, 0, 512), Branch(530, 1, 512), Branch(700)],
    "short runs of rows": [Branch(600, rows=3), Branch(531, 0, 512, 2), Branch(520, 0, 512, 8), Branch(515, 0, 512, 3)],
    "ends of prompts": [
        Branch(620, rows=80),
        Branch(580, 0, 512, 60),
        Branch(700, 0, 528, 50),
        Branch(545, 1, 544, 33),
    ],
    "beside a long prompt": [Branch(530, rows=200), Branch(520, 0, 512), Branch(519, 0, 512), Branch(700, 0, 512)],
}


def _tables(branches: list[Branch], block_size: int, rng: np.random.Generator) -> list[np.ndarray]:
    counts = [-(-branch.length // block_size) for branch in branches]
    free = list(rng.permutation(sum(counts)))
    tables: list[np.ndarray] = []
    for branch, count in zip(branches, counts, strict=True):
        held = list(tables[branch.parent][: branch.shared // block_size]) if branch.parent >= 0 else []
        tables.append(np.array(held + [free.pop() for _ in range(count - len(held))], np.int32))
    return tables


class Attention:
    """One attention operation over a pool of random keys and values, its queries looked up by token id."""

    def __init__(
        self,
        ops: NativeOps,
        heads: HeadGeometry,
        block_size: int,
        window: int,
        dtype: str | None = None,
        sinks: bool = False,
    ) -> None:
        dtype = dtype or kv_type(ops)
        rng = np.random.default_rng(5)
        group = KVGroup("full", 1, heads.num_kv_heads, heads.head_dim, block_size, dtype)
        pool = np.empty((8192 // block_size, group.bytes_per_block), np.uint8)
        values = rng.standard_normal(pool.size // group.bytes_per_value).astype(np.float32)
        if dtype == "bf16":
            pool.view(np.uint16).flat[:] = values.view(np.uint32) >> 16
        elif dtype == "int8":
            pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
            num_scales = 2 * heads.num_kv_heads * block_size
            scales = rng.uniform(0.01, 0.03, (len(pool), num_scales)).astype(np.float32)
            pool[:, -4 * num_scales :] = scales.view(np.uint8)
        else:
            pool.view({"f16": np.float16, "f32": np.float32}[dtype]).flat[:] = values
        self.pool = pool
        table = ops.pack([raw_tensor(rng, "f32", NUM_INPUTS, heads.width)])
        kv = ops.bind_kv(pool, group)
        sinks_H = ops.vector(np.linspace(-2, 6, heads.num_heads)) if sinks else None

        def forward(rec: Any, batch: Any) -> Any:
            x = rec.scale(rec.embed(table, batch.tokens_T), 20.0)
            return rec.paged_attention(kv, 0, x, batch, heads, heads.head_dim**-0.5, window=window, sinks_H=sinks_H)

        self._run = ops.compile(forward, StepLimits(256, 8, 1100 // block_size + 1, 1))

    def __call__(self, branches: list[Branch], tables: list[np.ndarray], tokens: list[np.ndarray]) -> list[np.ndarray]:
        starts = np.cumsum([0] + [branch.rows for branch in branches]).astype(np.int32)
        wide = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(wide, tables, strict=True):
            row[: len(table)] = table
        lengths = np.array([branch.length for branch in branches], np.int32)
        given = np.concatenate(tokens)
        nothing = np.zeros(0, np.int32)
        out = self._run(StepBatch(given, np.zeros_like(given), starts, lengths, wide, nothing)).copy()
        return [out[begin:end] for begin, end in pairwise(starts)]


def _differences(
    together: Attention, alone: Attention, branches: list[Branch], block_size: int, how: tuple[Any, ...]
) -> None:
    rng = np.random.default_rng(len(branches))
    tables = _tables(branches, block_size, rng)
    tokens = [rng.integers(0, NUM_INPUTS, branch.rows).astype(np.int32) for branch in branches]
    got = together(branches, tables, tokens)
    for s, branch in enumerate(branches):
        (expected,) = alone([branch], [tables[s]], [tokens[s]])
        assert np.isfinite(expected).all()
        assert np.array_equal(got[s], expected), (how, s, branch)


@pytest.fixture(scope="module", params=[ISAS[-1], TILE_ISAS[0]], ids=["lanes", "tiles"])
def teams(request: pytest.FixtureRequest) -> Any:
    if request.param not in available_isas((request.param,)):
        pytest.skip(f"this processor has no {request.param}")
    made = {count: NativeOps(count, None if request.param in ISAS else request.param) for count in (1, 2, 3)}
    yield made
    for ops in made.values():
        ops.close()


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [0, 300, 700])
@pytest.mark.parametrize("heads", [HeadGeometry(9, 3, 64), HeadGeometry(7, 1, 32), HeadGeometry(2, 2, 18)], ids=str)
def test_shared_blocks_give_solo_bits(teams: dict[int, NativeOps], mix: str, window: int, heads: HeadGeometry) -> None:
    """Every shape of sharing, with and without a window, for one to three threads."""
    branches = MIXES[mix]
    alone = Attention(teams[1], heads, 16, window)
    for num_threads, ops in teams.items():
        _differences(Attention(ops, heads, 16, window), alone, branches, 16, (num_threads,))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("block_size", [16, 5])
@pytest.mark.parametrize("window", [3, 16, 300])
def test_nothing_is_read_behind_a_window(teams: dict[int, NativeOps], mix: str, block_size: int, window: int) -> None:
    """Entries that no row sees name a block of NaN, for some sequences: bits are those of whole tables."""
    heads, branches, rng = HeadGeometry(9, 3, 64), MIXES[mix], np.random.default_rng(8)
    attention = Attention(teams[2], heads, block_size, window)
    tables = _tables(branches, block_size, rng)
    tokens = [rng.integers(0, NUM_INPUTS, branch.rows).astype(np.int32) for branch in branches]
    expected = attention(branches, tables, tokens)
    nowhere = len(attention.pool) - 1
    assert nowhere > max(table.max() for table in tables)
    attention.pool[nowhere] = 0xFF  # NaN of every type
    for s, (branch, table) in enumerate(zip(branches, tables, strict=True)):
        if s % 2 == 0:
            table[: num_hidden_blocks(branch.length - branch.rows, window, block_size)] = nowhere
    for got, whole in zip(attention(branches, tables, tokens), expected, strict=True):
        assert np.isfinite(whole).all() and np.array_equal(got, whole)


@pytest.mark.parametrize("block_size", [32, 5, 1])
@pytest.mark.parametrize("dtype", ["bf16", "f32", "int8"])
def test_any_block_size_and_type_shares(teams: dict[int, NativeOps], block_size: int, dtype: str) -> None:
    """Blocks that do not line up with spans share only spans whose every block agrees."""
    heads = HeadGeometry(4, 2, 32)
    attention = Attention(teams[2], heads, block_size, 0, dtype)
    for mix in ("one prefix of whole spans", "a prefix that ends inside a span", "a tree"):
        _differences(attention, attention, MIXES[mix], block_size, (mix,))


@pytest.mark.parametrize("family", [ISAS, TILE_ISAS], ids=["lanes", "tiles"])
def test_every_variant_shares(family: tuple[str, ...]) -> None:
    """All instruction sets, against solo runs of plain loops; query heads that fill tiles unevenly, or several, and
    have sinks."""
    scalar = NativeOps(1, family[-1])
    for isa in available_isas(family):
        ops = NativeOps(2, isa)
        for heads in (HeadGeometry(10, 2, 32), HeadGeometry(14, 1, 16), HeadGeometry(50, 1, 8)):
            for dtype in (kv_type(ops), "int8"):
                together, alone = (Attention(backend, heads, 16, 0, dtype, True) for backend in (ops, scalar))
                for mix in ("one prefix of whole spans", "a tree"):
                    _differences(together, alone, MIXES[mix], 16, (isa, heads, mix, dtype))
        ops.close()
    scalar.close()


def test_sharing_stops_where_scratch_ends(teams: dict[int, NativeOps], monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for the partial results of few sequences, or none, the others take their own way to the same bits."""
    heads = HeadGeometry(9, 3, 64)
    alone = Attention(teams[1], heads, 16, 0)
    per_row = 5 * heads.num_heads * (heads.head_dim + 2) * 4
    for room in (64, per_row, 3 * per_row + 8, 4 * per_row):
        monkeypatch.setattr("tokenmill.ops.native.program._PARTIAL_BYTES", room)
        together = Attention(teams[2], heads, 16, 0)
        for mix in ("one prefix of whole spans", "different lengths and shares", "short runs of rows"):
            _differences(together, alone, MIXES[mix], 16, (room, mix))
