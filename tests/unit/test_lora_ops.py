"""add_lora on the native backend: numpy's values, and bits that depend on nothing but the row itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_cases import raw_tensor

from tokenmill.ops.api import LowRank, RawTensor, StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import available_isas
from tokenmill.ops.reference import ReferenceOps

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

NUM_COLS, WIDTHS, MAX_RANK = 96, (40, 16, 24), 20
ADAPTERS = np.array([0, 1, 1, 2, 0, 3, 2, 2, 1] * 15, np.int32)


def changes_of(slot: int, kind: str = "f32") -> list[LowRank | None]:
    """Slot 1: all matrices; 2: the last alone, at full rank; 3: one of rank 1, and one of 17 (a tile and a row)."""
    rng = np.random.default_rng(slot)
    ranks = {1: (4, 8, 5), 2: (0, 0, 20), 3: (1, 17, 0)}[slot]

    def change(rank: int, width: int) -> LowRank | None:
        if rank == 0:
            return None
        return LowRank(raw_tensor(rng, kind, rank, NUM_COLS), raw_tensor(rng, kind, width, rank), 0.5 + slot)

    return [change(rank, width) for rank, width in zip(ranks, WIDTHS, strict=True)]


def table_of(ops: Any, kind: str = "f32") -> Any:
    table = ops.lora_table(3, MAX_RANK, NUM_COLS, WIDTHS)
    for slot in (1, 2, 3):
        assert ops.set_lora(table, slot, changes_of(slot, kind)) > 0
    return table


def rows(num_cols: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((len(ADAPTERS), num_cols)).astype(np.float32)


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_values_are_those_of_numpy(kind: str) -> None:
    """Within float32 rounding of sums of this length, for every stored kind. Rows without adapter are untouched."""
    x, y = rows(NUM_COLS, 1), rows(sum(WIDTHS), 2)
    reference, native = ReferenceOps(), NativeOps(2)
    expected = reference.add_lora(y, x, table_of(reference, kind), ADAPTERS)
    got = native.add_lora(y, x, table_of(native, kind), ADAPTERS)
    assert not np.array_equal(expected[ADAPTERS > 0], y[ADAPTERS > 0])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * NUM_COLS**0.5 * np.abs(expected).max())
    np.testing.assert_array_equal(got[ADAPTERS == 0].view(np.uint32), y[ADAPTERS == 0].view(np.uint32))
    native.close()


@pytest.mark.exact
@pytest.mark.parametrize("isa", available_isas() if available() is None else ())
@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_depend_on_the_row_alone(isa: str, num_threads: int) -> None:
    """Alone or in a mixed batch, on any instruction set and number of threads."""
    x, y = rows(NUM_COLS, 1), rows(sum(WIDTHS), 2)
    scalar = NativeOps(1, isa="scalar")
    table = table_of(scalar)
    alone = np.concatenate([scalar.add_lora(y[[i]], x[[i]], table, ADAPTERS[[i]]) for i in range(0, len(ADAPTERS), 5)])
    ops = NativeOps(num_threads, isa=isa)
    together = ops.add_lora(y, x, table_of(ops), ADAPTERS)
    np.testing.assert_array_equal(together[::5].view(np.uint32), alone.view(np.uint32))
    ops.close()
    scalar.close()


def tokens_table(ops: Any, kind: str = "f32") -> Any:
    """Of an embedding of 50 tokens: slot 1 of rank 17, slot 3 with factors; slot 2 is empty."""
    rng = np.random.default_rng(8)
    table = ops.lora_table(3, MAX_RANK, 50, (40,), by_token=True)
    for slot, rank, factors in ((1, 17, None), (3, 4, rng.uniform(0.5, 2, 40).astype(np.float32))):
        a, b = raw_tensor(rng, kind, 50, rank), raw_tensor(rng, kind, 40, rank)
        assert ops.set_lora(table, slot, [LowRank(a, b, 0.5, factors)]) > 0
    ops.set_lora(table, 2, [None])
    return table


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_changes_of_embedded_tokens_and_factors_are_those_of_numpy(kind: str) -> None:
    y, x, tokens = rows(40, 2), rows(NUM_COLS, 1), np.arange(len(ADAPTERS), dtype=np.int32) % 50
    reference, native = ReferenceOps(), NativeOps(2)
    expected, got = (ops.add_token_lora(y, tokens, tokens_table(ops, kind), ADAPTERS) for ops in (reference, native))
    same = (ADAPTERS == 0) | (ADAPTERS == 2)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(got[same].view(np.uint32), y[same].view(np.uint32))
    factors = np.random.default_rng(9).uniform(0.5, 2, WIDTHS[0]).astype(np.float32)
    found = []
    for ops in (reference, native):
        first, *others = changes_of(1, kind)
        assert first is not None
        table = table_of(ops, kind)
        ops.set_lora(table, 1, [LowRank(first.a, first.b, first.scale, factors), *others])
        found.append(ops.add_lora(rows(sum(WIDTHS), 2), x, table, ADAPTERS))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6 * NUM_COLS**0.5 * np.abs(found[0]).max())
    native.close()


@pytest.mark.exact
@pytest.mark.parametrize("isa", available_isas() if available() is None else ())
def test_bits_of_embedded_tokens_depend_on_the_row_alone(isa: str) -> None:
    y, tokens = rows(40, 2), np.arange(len(ADAPTERS), dtype=np.int32) % 50
    scalar, ops = NativeOps(1, isa="scalar"), NativeOps(3, isa=isa)
    table = tokens_table(scalar)
    alone = [scalar.add_token_lora(y[[i]], tokens[[i]], table, ADAPTERS[[i]]) for i in range(0, len(y), 5)]
    together = ops.add_token_lora(y, tokens, tokens_table(ops), ADAPTERS)
    np.testing.assert_array_equal(together[::5].view(np.uint32), np.concatenate(alone).view(np.uint32))
    ops.close()
    scalar.close()


class _Model:
    """A quantised linear whose output is normed, gated and quantised again: all that could be fused around add_lora."""

    def __init__(self, ops: Any) -> None:
        rng = np.random.default_rng(4)
        self.embed = ops.pack([raw_tensor(rng, "q8_0", 50, NUM_COLS)])
        self.up = ops.pack([raw_tensor(rng, "q4_0", 128, NUM_COLS)])
        self.down = ops.pack([raw_tensor(rng, "q8_0", NUM_COLS, 64)])
        self.norm = ops.vector(np.ones(NUM_COLS))
        self.up_lora = ops.lora_table(1, 8, NUM_COLS, (64, 64))
        self.down_lora = ops.lora_table(1, 8, 64, (NUM_COLS,))

    def fill(self, ops: Any) -> None:
        rng = np.random.default_rng(5)

        def change(num_rows: int, num_cols: int) -> LowRank:
            return LowRank(raw_tensor(rng, "f32", 8, num_cols), raw_tensor(rng, "f32", num_rows, 8), 1.0)

        ops.set_lora(self.up_lora, 1, [change(64, NUM_COLS), change(64, NUM_COLS)])
        ops.set_lora(self.down_lora, 1, [change(NUM_COLS, 64)])

    def forward(self, ops: Any, batch: Any, with_lora: bool) -> Any:
        x = ops.embed(self.embed, batch.tokens_T)
        h = ops.rms_norm(x, self.norm, 1e-5)
        both = ops.linear(h, self.up)
        if with_lora:
            both = ops.add_lora(both, h, self.up_lora, batch.adapters_T)
        hidden = ops.silu_mul(both)
        out = ops.linear(hidden, self.down)
        if with_lora:
            out = ops.add_lora(out, hidden, self.down_lora, batch.adapters_T)
        return ops.gather_rows(ops.add(x, out), batch.logit_rows_L)


def _batch(adapters_T: np.ndarray | None) -> StepBatch:
    count = 30
    return StepBatch(
        tokens_T=np.arange(count, dtype=np.int32),
        positions_T=np.arange(count, dtype=np.int32),
        row_starts_S1=np.array([0, count], np.int32),
        context_lens_S=np.array([count], np.int32),
        block_tables_SB=np.zeros((1, 2), np.int32),
        logit_rows_L=np.arange(count, dtype=np.int32),
        adapters_T=adapters_T,
    )


@pytest.mark.exact
def test_a_program_sees_adapters_come_and_go() -> None:
    """Fused or not, one recorded program follows the table; without adapters it gives the bits of one without LoRA."""
    limits = StepLimits(30, 1, 2, 30)
    ops, plain = NativeOps(2), NativeOps(2, fuse=False)
    model = _Model(ops)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, batch, True), limits)
    without = ops.compile(lambda recorder, batch: model.forward(recorder, batch, False), limits)
    mixed = np.array([0, 1, 1] * 10, np.int32)
    base = without(_batch(None)).copy()
    for adapters in (None, np.zeros(30, np.int32), mixed):  # an empty slot changes nothing
        np.testing.assert_array_equal(program(_batch(adapters)).view(np.uint32), base.view(np.uint32))
    model.fill(ops)
    got = program(_batch(mixed)).copy()
    np.testing.assert_array_equal(got[mixed == 0].view(np.uint32), base[mixed == 0].view(np.uint32))
    assert (got[mixed == 1] != base[mixed == 1]).any()
    unfused = _Model(plain)
    unfused.fill(plain)
    apart = plain.compile(lambda recorder, batch: unfused.forward(recorder, batch, True), limits)
    np.testing.assert_array_equal(apart(_batch(mixed)).view(np.uint32), got.view(np.uint32))
    ops.set_lora(model.up_lora, 1, [None, None])
    ops.set_lora(model.down_lora, 1, [None])
    np.testing.assert_array_equal(program(_batch(mixed)).view(np.uint32), base.view(np.uint32))
    ops.close()
    plain.close()


def test_what_does_not_fit_is_refused() -> None:
    ops = NativeOps(1)
    table = table_of(ops)
    x, y = rows(NUM_COLS, 1), rows(sum(WIDTHS), 2)
    with pytest.raises(AssertionError, match="slot out of range"):
        ops.add_lora(y, x, table, np.full(len(y), 4, np.int32))
    small = RawTensor("f32", 4, 8, np.zeros(4 * 8 * 4, np.uint8))
    with pytest.raises(AssertionError):
        ops.set_lora(table, 1, [LowRank(small, small, 1.0), None, None])
    table.change(1, 0).a.num_bytes = 8
    with pytest.raises(AssertionError, match="do not fit"):
        ops.add_lora(y, x, table, ADAPTERS)
    ops.close()
