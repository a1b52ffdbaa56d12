"""NaN and infinity in one token: whatever sees it becomes NaN, and nothing else changes by a bit.

A small decoder in whose embeddings one token has a value that is not a number runs on every
instruction set and KV type; rows that do not see the token are compared with runs in which it does not occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ops_cases import Sequences, TinyDecoder, raw_tensor

from tokenmill.ops.api import QUANTISATIONS, Draws, HeadGeometry, RawTensor, SampleBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas
from tokenmill.ops.reference import ReferenceOps

native = pytest.mark.skipif(available() is not None, reason=str(available()))
BAD = 7
HEADS = HeadGeometry(6, 2, 32)
KINDS = {"codes": ("q4_1", "q4_0", "q4_1", "q8_0", "f32"), "bf16": ("bf16", "bf16", "bf16", "bf16", "f32")}
LENGTH = 300


class Decoder(TinyDecoder):
    """Its embeddings, of float32, are `bad` in one value of token BAD. With a window where it is not 0."""

    def __init__(self, ops: Any, kinds: tuple[str, str, str, str, str], bad: float, window: int = 0) -> None:
        self._bad, self._ops, self._window = bad, ops, window
        super().__init__(_Spoiling(ops, bad), 5, HEADS, kinds)

    def forward(self, ops: Any, kv: Any, batch: Any) -> Any:
        return super().forward(_Windowed(ops, self._window), kv, batch)


class _Spoiling:
    """Ops whose dense matrix of the vocabulary's size gets the value `bad`."""

    def __init__(self, ops: Any, bad: float) -> None:
        self._ops, self._bad = ops, bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def pack(self, parts: Any) -> Any:
        for part in parts:
            if part.kind == "f32":
                part.data.view(np.float32).reshape(part.num_rows, part.num_cols)[BAD, 3] = self._bad
        return self._ops.pack(parts)


class _Windowed:
    """Ops whose attention has a window."""

    def __init__(self, ops: Any, window: int) -> None:
        self._ops, self._window = ops, window

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def paged_attention(self, *args: Any) -> Any:
        return self._ops.paged_attention(*args, window=self._window)


class Runs:
    """A pool of two sequences of LENGTH tokens; the steps give hidden states, by way of plain rows of logits."""

    def __init__(self, ops: Any, kinds: str, dtype: str, bad: float, window: int = 0) -> None:
        self.decoder = Decoder(ops, KINDS[kinds], bad, window)
        self.sequences = Sequences.scatter(np.random.default_rng(1), [LENGTH, LENGTH], 16)
        group = self.decoder.group(16, dtype)
        kv = ops.bind_kv(np.zeros((self.sequences.num_blocks, group.bytes_per_block), np.uint8), group)
        limits = StepLimits(2 * LENGTH, 2, LENGTH // 16 + 1, 2 * LENGTH)
        self._program = ops.compile(lambda rec, batch: self.decoder.forward(rec, kv, batch), limits)

    def logits(self, *rows: tuple[int, list[int], int]) -> np.ndarray:
        """Of every token, but not the spoiled row's own."""
        batch = self.sequences.batch(list(rows))
        batch.logit_rows_L = np.arange(len(batch.tokens_T), dtype=np.int32)
        with np.errstate(all="ignore"):
            return np.delete(self._program(batch).copy(), BAD, axis=1)


def _tokens(seed: int, length: int = LENGTH) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(20, 211, length).tolist()
    return found


def _backends(share: float = 1) -> list[Any]:
    """share: how often `--sample` runs those that take many seconds; the others, which users have, it always runs."""
    native = available_isas((*ISAS, *TILE_ISAS)) if available() is None else ()
    slow = {"numpy", "scalar", "scalartiles"}
    return [
        pytest.param(name, id=name, marks=[pytest.mark.sampled(share)] if name in slow else [])
        for name in ("numpy", *native)
    ]


@pytest.fixture(params=_backends())
def ops(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = ReferenceOps() if request.param == "numpy" else NativeOps(2, request.param)
    yield made
    made.close()


def _combinations(ops: Any) -> Iterator[tuple[str, str]]:
    for kinds in KINDS:
        yield from ((kinds, dtype) for dtype in ("f16", "bf16", "int8"))


@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
@pytest.mark.parametrize("ops", _backends(1 / 4), indirect=True)
def test_what_sees_the_token_is_not_finite_and_nothing_else_changes(ops: Any, bad: float) -> None:
    """In one step: rows before it in its own prompt, and another sequence beside it."""
    for kinds, dtype in _combinations(ops):
        tokens, others = _tokens(1), _tokens(2, 40)
        clean = Runs(ops, kinds, dtype, bad).logits((0, tokens, 0), (1, others, 0))
        assert np.isfinite(clean).all()
        at = 150
        tokens[at] = BAD
        spoiled = Runs(ops, kinds, dtype, bad).logits((0, tokens, 0), (1, others, 0))
        assert _same(ops, spoiled[:at], clean[:at]), (kinds, dtype)
        assert not np.isfinite(spoiled[at:LENGTH]).all(axis=1).any(), (kinds, dtype)
        assert _same(ops, spoiled[LENGTH:], clean[LENGTH:]), (kinds, dtype)


def test_a_window_hides_it(ops: Any) -> None:
    """Two layers of a window of 20 see 38 positions back; rows of all kinds share tiles."""
    for kinds, dtype in _combinations(ops):
        tokens = _tokens(1)
        clean = Runs(ops, kinds, dtype, np.nan, window=20).logits((0, tokens, 0))
        at = 150
        tokens[at] = BAD
        spoiled = Runs(ops, kinds, dtype, np.nan, window=20).logits((0, tokens, 0))
        assert _same(ops, spoiled[:at], clean[:at]), (kinds, dtype)
        assert not np.isfinite(spoiled[at : at + 20]).any(), (kinds, dtype)
        assert _same(ops, spoiled[at + 39 :], clean[at + 39 :]), (kinds, dtype)


@pytest.mark.parametrize("ops", _backends(1 / 3), indirect=True)
def test_what_it_leaves_in_a_block_does_not_matter(ops: Any) -> None:
    """Blocks that held it serve another prompt, whose decoding reads tails that are still the old one's."""
    for kinds, dtype in _combinations(ops):
        fresh, used = (Runs(ops, kinds, dtype, np.nan) for _ in range(2))
        used.logits((0, [BAD] * LENGTH, 0))
        for length in (1, 5, 17, 100, 101, 270):
            tokens = _tokens(3, length)
            expected, got = (runs.logits((0, tokens, 0)) for runs in (fresh, used))
            assert np.isfinite(got).all() and _same(ops, got, expected), (kinds, dtype, length)


def _same(ops: Any, one: np.ndarray, other: np.ndarray) -> bool:
    """To the bit, but in numpy, whose sums depend on shapes."""
    if isinstance(ops, ReferenceOps):
        return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3))
    return bool(np.array_equal(one, other))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("num_cols", [5, 200, 5003])
def test_rows_of_logits_that_are_not_finite_give_no_token(ops: Any, bad: float, num_cols: int) -> None:
    """Greedy or sampled, whatever is filtered, wherever the value lies; other rows are as before."""
    rng = np.random.default_rng(num_cols)
    logits = rng.standard_normal((8, num_cols)).astype(np.float32)
    logits[:, 0] = 30  # of what is finite, and drawn nearly always
    for row, place in ((1, 0), (3, num_cols // 2), (4, num_cols - 1), (6, num_cols - 2)):
        logits[row, place] = bad
    logits[7] = bad
    spoiled = [1, 3, 4, 6, 7]
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.5, 3, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]
    for temperature, top_k, top_p, min_p in (*settings, (2.0, 4, 0.8, 0.2)):
        how = SampleBatch(
            np.full(8, temperature, np.float32), np.full(8, top_k, np.int32), np.full(8, top_p, np.float32),
            np.full(8, min_p, np.float32), np.arange(8, dtype=np.uint64), np.zeros(8, np.int32), np.zeros(8, np.int32),
        )  # fmt: skip
        expected = np.where(np.isin(np.arange(8), spoiled), -1, 0)
        with np.errstate(all="ignore"):
            assert ops.sample(logits, how).tolist() == expected.tolist()
    num_top = min(20, num_cols)
    with np.errstate(all="ignore"):
        logprobs, ranks, top, top_logprobs = ops.token_logprobs(logits, np.zeros(8, np.int32), num_top)
    assert np.isnan(logprobs[spoiled]).all() and np.isnan(top_logprobs[spoiled]).all()
    assert ranks.tolist() == [1, 0, 1, 0, 0, 1, 0, 0]
    assert np.isfinite(logprobs[[0, 2, 5]]).all() and top.min() >= 0 and top.max() < num_cols


def test_a_row_without_a_token_leaves_one_for_the_step_that_follows(ops: Any) -> None:
    """Its slot holds a valid id, for a step that was planned on top of it."""
    runs = Runs(ops, "codes", "f32", np.nan)
    zeros = np.zeros(2, np.float32)
    how = SampleBatch(zeros, zeros.astype(np.int32), zeros + 1, zeros, *(np.zeros(2, t) for t in ("u8", "i4", "i4")))
    draws = Draws(how, np.array([4, 2], np.int32), np.full(2, -7, np.int32), np.full(9, 5, np.int32))
    with np.errstate(all="ignore"):
        runs._program(runs.sequences.batch([(0, [9, BAD], 0), (1, [9, 8], 0)]), draws)
    assert draws.tokens_L.tolist() == [-1, -1] and draws.drawn.tolist() == [5, 5, 0, 5, 0, 5, 5, 5, 5]


@native
@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q8_0"])
def test_a_weight_that_is_not_a_number_spoils_its_output(kind: str) -> None:
    """Also where the backend would make integers of the matrix."""
    for isa in available_isas((*ISAS, *TILE_ISAS)):
        made = NativeOps(2, isa)
        x = np.random.default_rng(3).standard_normal((40, 128)).astype(np.float32)
        for place in range(1 + (kind == "q4_1")):  # scale, minimum
            tensor = raw_tensor(np.random.default_rng(2), kind, 480, 128)
            blocks = tensor.data.reshape(480 * 4, -1)
            blocks[:, :2] = np.array([0.01], np.float16).view(np.uint8)  # integers hold equal scales well
            blocks[5 * 4 + 1, 2 * place : 2 * place + 2] = np.array([np.nan], np.float16).view(np.uint8)
            out = made.linear(x, made.pack([tensor]))
            assert np.isnan(out[:, 5]).all() and np.isfinite(np.delete(out, 5, axis=1)).all(), (isa, place)
        made.close()


@native
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_quantising_at_load_keeps_it(kind: str, bad: float) -> None:
    """A dense weight that is not finite makes its output so, whatever its matrix becomes."""
    values = np.random.default_rng(2).standard_normal((48, 128)).astype(np.float32)
    values[5, 33] = bad
    made = NativeOps(1)
    tensor = RawTensor("f32", 48, 128, values.view(np.uint8).reshape(-1))
    out = made.linear(np.ones((3, 128), np.float32), made.pack([made.quantise(tensor, kind)]))
    assert not np.isfinite(out[:, 5]).any() and np.isfinite(np.delete(out, 5, axis=1)).all()
    made.close()
