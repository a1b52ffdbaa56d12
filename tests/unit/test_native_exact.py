"""Bits of the native backend: no instruction set, thread count, batch, chunking or fusion changes one.

Every test runs a small decoder (two random layers) through compiled programs and compares logits and KV bytes for
equality.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ops_cases import KINDS, Sequences, TinyDecoder, activations, kv_type, raw_tensor, whole_blocks

from tokenmill.core.block import KVGroup
from tokenmill.formats.blocks import READERS
from tokenmill.formats.tensor import BLOCK_LAYOUT
from tokenmill.ops.api import EXACT_FACTORS, HeadGeometry, RawTensor, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.direct import batch_of, run_forward
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.reference_weights import DENSE_KINDS

pytestmark = [
    pytest.mark.exact,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

UNIFORM_KINDS = ("q4_1", "q4_1", "q4_1", "q4_1", "q8_0")
MIXED_KINDS = ("q4_1|q8_0", "q4_0", "q4_1", "q8_0|f16", "q8_0")
FAMILIES = pytest.mark.parametrize("family", [ISAS, TILE_ISAS], ids=["lanes", "tiles"])
GEOMETRIES = (
    HeadGeometry(6, 2, 64),
    HeadGeometry(4, 4, 32),
    HeadGeometry(8, 1, 80),
    HeadGeometry(4, 1, 96),
    HeadGeometry(2, 1, 128),
)


class Runner:
    """A decoder with a pool of its own: `step` advances sequences and gives their last logits."""

    def __init__(
        self,
        ops: NativeOps,
        seed: int,
        heads: HeadGeometry,
        max_lens: list[int],
        block_size: int = 16,
        dtype: str | None = None,
        kinds: tuple[str, str, str, str, str] = UNIFORM_KINDS,
    ) -> None:
        self.decoder = TinyDecoder(ops, seed, heads, kinds)
        self.sequences = Sequences.scatter(np.random.default_rng(seed), max_lens, block_size)
        group = self.decoder.group(block_size, dtype or kv_type(ops))
        # What a block held before must not matter: start from bytes that are large numbers and infinities.
        self.pool = np.full((self.sequences.num_blocks, group.bytes_per_block), 0x7C, np.uint8)
        kv = ops.bind_kv(self.pool, group)
        blocks = max(len(table) for table in self.sequences.tables)
        limits = StepLimits(sum(max_lens), len(max_lens), blocks, sum(max_lens))
        self.run = ops.compile(lambda rec, batch: self.decoder.forward(rec, kv, batch), limits)

    def step(self, rows: list[tuple[int, list[int], int]], logit_rows: list[int] | None = None) -> np.ndarray:
        return self.run(self.sequences.batch(rows, logit_rows)).copy()


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 211, length).tolist() for length in lengths]


@pytest.fixture(scope="module", params=[ISAS[-1], TILE_ISAS[0]], ids=["lanes", "tiles"])
def ops(request: pytest.FixtureRequest) -> Any:
    """The widest variant of a family; of tiles only the processor's own, as the plain loops are too slow for these."""
    if request.param not in available_isas((request.param,)):
        pytest.skip(f"this processor has no {request.param}")
    made = NativeOps(2, None if request.param in ISAS else request.param)
    yield made
    made.close()


def reference_logits(ops: NativeOps, seed: int, heads: HeadGeometry, tokens: list[int], **how: Any) -> np.ndarray:
    """Logits of every position of one prompt, alone and whole."""
    runner = Runner(ops, seed, heads, [len(tokens)], **how)
    return runner.step([(0, tokens, 0)], list(range(len(tokens))))


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [(UNIFORM_KINDS, "f16"), (MIXED_KINDS, "int8"), (("bf16",) * 5, "bf16")],
    ids=["uniform-f16", "mixed-int8", "bf16"],
)
@FAMILIES
def test_isas_threads_and_fusion_agree(heads: HeadGeometry, kinds: Any, dtype: str, family: tuple[str, ...]) -> None:
    """Logits and KV bytes of a mixed step are equal for every variant, one to three threads, fused or not."""
    tokens = prompts(1, [31, 270, 2])
    variants = [(isa, 1 + index % 3, index % 2 == 0) for index, isa in enumerate(available_isas(family))]
    widest = available_isas(family)[0]
    expected: tuple[np.ndarray, bytes] | None = None
    for isa, num_threads, fuse in (*variants, (widest, 2, False), (widest, 3, True)):
        ops = NativeOps(num_threads, isa, fuse)
        runner = Runner(ops, 7, heads, [31, 270, 2], kinds=kinds, dtype=dtype)
        runner.step([(0, tokens[0][:30], 0), (1, tokens[1][:250], 0)])
        logits = runner.step([(1, tokens[1], 250), (2, tokens[2], 0), (0, tokens[0], 30)])
        assert np.isfinite(logits).all()
        got = (logits, runner.pool.tobytes())
        expected = expected or got
        assert np.array_equal(got[0], expected[0]), (isa, num_threads, fuse)
        assert got[1] == expected[1], (isa, num_threads, fuse)
        ops.close()


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "int8"])
@pytest.mark.parametrize("heads", GEOMETRIES, ids=str)
def test_chunks_do_not_matter(ops: NativeOps, heads: HeadGeometry, dtype: str) -> None:
    """A prompt run whole, in chunks, and token by token gives the same logits at every position."""
    (tokens,) = prompts(2, [530])
    whole = reference_logits(ops, 3, heads, tokens, dtype=dtype)
    for sizes in ([530], [1, 255, 1, 200, 73], [256, 256, 18], [7] * 76):
        runner = Runner(ops, 3, heads, [530], dtype=dtype)
        start, parts = 0, []
        for size in sizes:
            end = min(530, start + size)
            if end > start:
                parts.append(runner.step([(0, tokens[:end], start)], list(range(end - start))))
            start = end
        assert np.array_equal(np.concatenate(parts), whole), sizes
    runner = Runner(ops, 3, heads, [530], dtype=dtype)
    runner.step([(0, tokens[:250], 0)])
    for end in range(251, 300):
        assert np.array_equal(runner.step([(0, tokens[:end], end - 1)])[0], whole[end - 1]), end


def test_long_context_split_over_threads(ops: NativeOps) -> None:
    """One token over many spans, which threads share, equals the same token computed on one thread."""
    (tokens,) = prompts(4, [1000])
    one = NativeOps(1, ops.isa)
    heads = HeadGeometry(6, 2, 64)
    results = []
    for backend in (ops, one):
        runner = Runner(backend, 5, heads, [1000])
        runner.step([(0, tokens[:990], 0)], [])
        results.append(np.concatenate([runner.step([(0, tokens[:end], end - 1)]) for end in range(991, 1001)]))
    one.close()
    assert np.array_equal(*results)
    assert np.array_equal(results[0], reference_logits(ops, 5, heads, tokens)[990:])


def test_a_rerun_after_preemption_gives_the_same(ops: NativeOps) -> None:
    """KV thrown away and recomputed beside other rows, in blocks that held something else, changes nothing."""
    heads = HeadGeometry(6, 2, 64)
    tokens = prompts(5, [90, 40])
    alone = reference_logits(ops, 6, heads, tokens[0])
    runner = Runner(ops, 6, heads, [90, 40])
    runner.step([(0, tokens[0][:60], 0)])
    runner.sequences.tables.reverse()  # the first sequence loses its blocks to the second, and takes what that left
    runner.sequences.tables[0] = np.concatenate([runner.sequences.tables[0], runner.sequences.tables[1][3:]])
    runner.sequences.tables[1] = runner.sequences.tables[1][:3]
    logits = runner.step([(1, tokens[1], 0), (0, tokens[0], 0)])
    assert np.array_equal(logits[1], alone[-1])


def test_a_shared_prefix_is_the_same_prefix(ops: NativeOps) -> None:
    """Two sequences that point at the same blocks, written once by either in this very step, get their solo logits."""
    heads = HeadGeometry(4, 4, 32)
    prefix, *tails = prompts(6, [32, 9, 20])
    alone = [reference_logits(ops, 8, heads, prefix + tail)[-1] for tail in tails]
    runner = Runner(ops, 8, heads, [48, 64])
    runner.sequences.tables[1][:2] = runner.sequences.tables[0][:2]
    logits = runner.step([(1, prefix + tails[1], 32), (0, prefix + tails[0], 0)])
    assert np.array_equal(logits, np.stack(alone[::-1]))


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("seed", range(20))
def test_any_batch_gives_solo_logits(ops: NativeOps, seed: int) -> None:
    """Random sequences, cut and batched at random, get the logits of their runs alone."""
    draw = random.Random(seed)
    heads = draw.choice(GEOMETRIES)
    how: dict[str, Any] = {
        "block_size": draw.choice((16, 16, 32, 5, 1)),
        "dtype": draw.choice(("f16", "f16", "bf16", "f32", "int8", "int8")),
        "kinds": draw.choice((UNIFORM_KINDS, MIXED_KINDS, ("f32", "bf16", "f32", "bf16", "f16"))),
    }
    lengths = [draw.choice((1, 2, 17, 40, 255, 256, 257, 290)) for _ in range(draw.randint(1, 4))]
    tokens = prompts(seed, lengths)
    alone = [reference_logits(ops, 9, heads, each, **how) for each in tokens]
    runner = Runner(ops, 9, heads, lengths, **how)
    done = [0] * len(tokens)
    while done != lengths:
        pending = [s for s, length in enumerate(lengths) if done[s] < length]
        chosen = draw.sample(pending, draw.randint(1, len(pending)))
        sizes = [draw.choice((1, 3, 64, 64, 300)) for _ in chosen]
        rows = [(s, tokens[s][: done[s] + size], done[s]) for s, size in zip(chosen, sizes, strict=True)]
        for (s, upto, _), got in zip(rows, runner.step(rows), strict=True):
            done[s] = len(upto)
            assert np.array_equal(got, alone[s][done[s] - 1]), (s, done[s])


@FAMILIES
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_variants_of_a_linear_agree(kind: str, family: tuple[str, ...]) -> None:
    """Any number of rows together, on any variant of a family, gives each row the bits of its plain loops alone."""
    rng = np.random.default_rng(KINDS.index(kind))
    backends = [NativeOps(2, isa) for isa in available_isas(family)]
    odd = ((21, 45), (131, 63), (5, 1)) if kind in DENSE_KINDS else ()
    for num_rows, num_cols in ((33, 32), (16, 288), (70, 96), *odd):
        num_cols = whole_blocks(kind, num_cols)
        raw = raw_tensor(rng, kind, num_rows, num_cols)
        x = activations(rng, 40, num_cols)
        scalar = backends[-1]
        weight = scalar.pack([raw])
        expected = np.concatenate([scalar.linear(x[row : row + 1], weight) for row in range(len(x))])
        for ops in backends:
            weight = ops.pack([raw])
            for count in (1, 2, 3, 7, 8, 11, 12, 13, 16, 17, 25, 33, 40):
                assert np.array_equal(ops.linear(x[:count], weight), expected[:count]), (ops.isa, count)
    for ops in backends:
        ops.close()


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q5_0", "mxfp4", "iq4_nl"])
def test_narrow_kinds_have_the_bits_of_8_bit_codes(kind: str) -> None:
    """Blocks of random bits of a stored format give the rows and products that their codes give as whole bytes beside
    scales and minimums which were rounded before, or are such that nothing is rounded (q2_k, q3_k); and they take no
    more memory than they are."""
    ops = NativeOps(2)
    rng = np.random.default_rng(3)
    block_values, block_bytes = BLOCK_LAYOUT[kind]
    (num_rows, num_cols) = shape = 100, 1536
    data = rng.integers(0, 256, (num_rows * num_cols // block_values, block_bytes), dtype=np.uint8)
    ends = rng.uniform(-0.02, 0.02, (len(data), 2)) * 10.0 ** rng.uniform(-4, 0, (len(data), 1))  # subnormal ones, too
    places = {"q2_k": (80, 4), "q3_k": (108, 2), "q6_k": (208, 2), "q5_0": (0, 2), "iq4_nl": (0, 2)}
    at, count = places.get(kind, (0, 4))
    if kind == "mxfp4":
        data[:, 0] = rng.integers(104, 128, len(data))
    else:
        halves = ends.astype("<f2").view(np.uint16) & (0xFFC0 if kind in EXACT_FACTORS else 0xFFFF)
        data[:, at : at + count] = halves.view(np.uint8)[:, :count]
    codes = READERS[kind](data)
    has_halves = kind in ("q2_k", "q3_k", "q6_k", "q5_0")
    fields = [("d", "<f2", (1 + has_halves,)), ("m", "<f2", (1 + has_halves,)), ("q", "i1", 32)]
    blocks = np.empty(
        num_rows * num_cols // 32, [each for each in fields if each[0] != "m" or codes.minimums_bg is not None]
    )
    blocks["d"] = codes.scales_bg.repeat(2 if kind == "q5_0" else 1, axis=1).reshape(blocks["d"].shape)
    if codes.minimums_bg is not None:
        blocks["m"] = codes.minimums_bg.reshape(blocks["m"].shape)
    blocks["q"] = codes.codes_bv.reshape(-1, 32)
    has_minimums = codes.minimums_bg is not None
    wide_kind = {(0, 0): "q8_0", (1, 0): "q8_h", (0, 1): "q8_m", (1, 1): "q8_hm"}[has_halves, has_minimums]
    wide = RawTensor(wide_kind, *shape, blocks.view(np.uint8))
    narrow = ops.recode(kind, data.reshape(-1), kind, *shape, None)
    assert narrow is not None and narrow.kind == kind
    weights = [ops.pack([narrow]), ops.pack([wide])]
    x = activations(rng, 40, num_cols)
    for rows in (1, 2, 5, 12, 40):
        one, other = (ops.linear(x[:rows], weight) for weight in weights)
        assert np.array_equal(one, other), rows
    tokens = np.arange(num_rows, dtype=np.int32)
    assert np.array_equal(*(ops.embed(weight, tokens) for weight in weights))
    assert weights[0].num_bytes <= data.nbytes * 112 / num_rows + 64 * 7  # whole tiles of 16 rows
    ops.close()


def test_columns_in_another_order(ops: NativeOps) -> None:
    """A weight with an order gives the bits of one without it on inputs in that order, alone, beside a residual and
    with its gate joined; numpy agrees on the values."""
    rng = np.random.default_rng(13)
    x = activations(rng, 13, 96)
    order = rng.permutation(96).astype(np.int32)
    plain = [raw_tensor(rng, "q4_1", 64, 96), raw_tensor(rng, "bf16", 64, 96)]
    ordered = [replace(raw, order=order) for raw in plain]
    down = ops.pack([raw_tensor(rng, "q8_0", 96, 64)])
    moved = np.ascontiguousarray(x[:, order])
    got = ops.linear(x, ops.pack(ordered))
    assert np.array_equal(got, ops.linear(moved, ops.pack(plain)))
    reference = ReferenceOps()
    expected = reference.linear(x, reference.pack(ordered))
    kept = slice(64 if ops.isa in TILE_ISAS else 0, None)  # weights of 4 bits become others there
    np.testing.assert_allclose(got[:, kept], expected[:, kept], atol=1e-5 * np.abs(got).max())

    def ffn(inputs: np.ndarray, gate_up: RawTensor) -> np.ndarray:
        weight = ops.pack([replace(gate_up, num_rows=64), replace(gate_up, num_rows=64)])

        def forward(rec: Any, batch: Any) -> Any:
            return rec.add(x, rec.linear(rec.silu_mul(rec.linear(inputs, weight)), down))

        return run_forward(ops, forward, batch_of(len(x)))

    assert np.array_equal(ffn(x, ordered[0]), ffn(moved, plain[0]))


@FAMILIES
def test_tiny_bf16_factors_agree(family: tuple[str, ...]) -> None:
    """Weights and inputs around 2^-56, where products and sums could become subnormal, give equal bits on every
    variant: what is smaller counts as zero, because some processors flush subnormals."""
    rng = np.random.default_rng(12)
    backends = [NativeOps(1, isa) for isa in available_isas(family)]
    signs = rng.choice(np.float32([-1, 1]), (48, 64))
    values = (signs * 2.0 ** rng.uniform(-70, -50, (48, 64))).astype(np.float32)
    raw = RawTensor("bf16", 48, 64, (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1))
    x = (2.0 ** rng.uniform(-75, -50, (13, 64))).astype(np.float32)
    results = [ops.linear(x, ops.pack([raw])) for ops in backends]
    assert results[0].any()
    assert np.abs(results[0][results[0] != 0]).min() >= 2.0**-126
    for ops, result in zip(backends, results, strict=True):
        assert np.array_equal(result, results[0]), ops.isa
        ops.close()


@FAMILIES
def test_tiny_bf16_kv_agrees(family: tuple[str, ...]) -> None:
    """Queries, keys and values around 2^-56, where products could become subnormal, give equal KV and equal bits on
    every variant; so do scores that are far apart, whose weights are as small."""
    rng = np.random.default_rng(13)
    heads, length = HeadGeometry(6, 2, 40), 37
    group = KVGroup("full", 1, heads.num_kv_heads, heads.head_dim, 16, "bf16")
    values_at = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
    signs = rng.choice(np.float32([-1, 1]), (length, heads.width))
    tiny_TW = (signs * 2.0 ** rng.uniform(-70, -50, signs.shape)).astype(np.float32)
    apart_TW = tiny_TW.copy()
    apart_TW[:, :values_at] = np.linspace(0, 4, length)[:, None]
    batch = Sequences.scatter(rng, [length], 16).batch([(0, [0] * length, 0)])
    for qkv_TW in (tiny_TW, apart_TW):
        results = []
        for isa in available_isas(family):
            ops = NativeOps(2, isa)
            pool = np.zeros((3, group.bytes_per_block), np.uint8)
            kv = ops.bind_kv(pool, group)
            ops.write_kv(kv, 0, qkv_TW, batch, heads)
            results.append((isa, pool, ops.paged_attention(kv, 0, qkv_TW, batch, heads, heads.head_dim**-0.5)))
            ops.close()
        _, pool, out_TW = results[0]
        assert out_TW.any()
        for isa, other_pool, other_TW in results:
            assert np.array_equal(other_pool, pool) and np.array_equal(other_TW, out_TW), isa
