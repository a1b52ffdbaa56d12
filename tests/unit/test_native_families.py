"""Bits of the native backend on the operations that only some families use: windows, soft caps, norms of heads, biases,
layer norm, partial rotation, scaled queries, every kind of block. Thread count, instruction set, fusing, batch and
chunks change none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops_cases import Sequences, raw_tensor

from tokenmill.core.block import KVGroup
from tokenmill.models.rope import RopeConfig, query_scale_table
from tokenmill.ops.api import HeadGeometry, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas
from tokenmill.ops.reference import ReferenceOps

pytestmark = [pytest.mark.exact, pytest.mark.skipif(available() is not None, reason=str(available()))]

HEADS = HeadGeometry(4, 2, 32)
LENGTHS = [600, 37, 300]
WINDOW = 270


class Decoder:
    """Two layers with everything that families add: one gated and windowed, one plain with layer norms."""

    def __init__(self, ops: Any, kind: str) -> None:
        rng = np.random.default_rng(7)
        width = 128

        def pack(num_rows: int, num_cols: int) -> Any:
            return ops.pack([raw_tensor(rng, kind, num_rows, num_cols)])

        def vector(size: int, around: float = 1.0) -> Any:
            return ops.vector(around + 0.2 * rng.standard_normal(size))

        self.embed = pack(97, width)
        self.qkv = [pack(HEADS.width, width) for _ in range(2)]
        self.output = [pack(width, width) for _ in range(2)]
        self.up = [pack(192, width), pack(96, width)]
        self.down = [pack(width, 96) for _ in range(2)]
        self.norms = [vector(width) for _ in range(5)]
        self.norm_bias = vector(width, 0.0)
        self.head_norms = [(vector(32), vector(32)), (vector(128), vector(64))]
        self.biases = [vector(HEADS.width, 0.0), vector(96, 0.0)]
        self.table = ops.vector(rng.uniform(-1, 1, (1024, 24)))
        scaled = RopeConfig(10_000.0, original_context=100, query_beta=0.3)
        self.query_scales = ops.vector(query_scale_table(scaled, HEADS.head_dim, 1024))

    def forward(self, ops: Any, kv: Any, batch: Any) -> Any:
        x = ops.scale(ops.embed(self.embed, batch.tokens_T), 3.0)
        for layer in range(2):
            windowed = layer == 0
            h = ops.rms_norm(x, self.norms[layer], 1e-5)
            if not windowed:
                h = ops.layer_norm(x, self.norms[layer], self.norm_bias, 1e-5)
            qkv = ops.add_bias(ops.linear(h, self.qkv[layer]), self.biases[0])
            qkv = ops.norm_heads(qkv, *self.head_norms[layer], HEADS, 1e-5)
            if windowed:
                qkv = ops.rope(qkv, batch.positions_T, self.table, HEADS)
            ops.write_kv(kv, layer, qkv, batch, HEADS)
            if windowed:
                qkv = ops.rope(qkv, batch.positions_T, self.query_scales, HEADS)
            limits = {"window": WINDOW, "soft_cap": 2.0} if windowed else {}
            mixed = ops.paged_attention(kv, layer, qkv, batch, HEADS, 0.2, **limits)
            x = ops.add(x, ops.rms_norm(ops.linear(mixed, self.output[layer]), self.norms[2], 1e-5))
            up = ops.linear(ops.layer_norm(x, self.norms[3], self.norm_bias, 1e-5), self.up[layer])
            hidden = ops.gelu_mul(up) if windowed else ops.gelu(ops.add_bias(up, self.biases[1]))
            x = ops.add(x, ops.scale(ops.linear(hidden, self.down[layer]), 0.5))
        last = ops.rms_norm(ops.gather_rows(x, batch.logit_rows_L), self.norms[4], 1e-5)
        return ops.soft_cap(ops.linear(last, self.embed), 20.0)


def logits(ops: Any, kind: str, chunks: list[list[int]]) -> list[np.ndarray]:
    """Logits of every position of each sequence; `chunks`: for each step, how far each sequence gets."""
    decoder = Decoder(ops, kind)
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 97, length).tolist() for length in LENGTHS]
    sequences = Sequences.scatter(rng, LENGTHS, 16)
    group = KVGroup("full", 2, HEADS.num_kv_heads, HEADS.head_dim, 16, "f16")
    kv = ops.bind_kv(np.full((sequences.num_blocks, group.bytes_per_block), 0x7C, np.uint8), group)
    widest = max(len(table) for table in sequences.tables)
    limits = StepLimits(sum(LENGTHS), len(LENGTHS), widest, sum(LENGTHS))
    program = ops.compile(lambda recorder, batch: decoder.forward(recorder, kv, batch), limits)
    found: list[list[np.ndarray]] = [[] for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    for ends in chunks:
        rows = [(s, tokens[s][:end], done[s]) for s, end in enumerate(ends) if end > done[s]]
        count = sum(len(known) - start for _, known, start in rows)
        out = program(sequences.batch(rows, list(range(count)))).copy()
        at = 0
        for s, known, start in rows:
            found[s].append(out[at : at + len(known) - start])
            at, done[s] = at + len(known) - start, len(known)
    return [np.concatenate(parts) for parts in found]


WHOLE = [LENGTHS]
CHUNKED = [[280, 1, 0], [281, 37, 0], [599, 37, 290], [600, 37, 300]]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[np.ndarray]]:
    ops = NativeOps(2)
    found = {kind: logits(ops, kind, WHOLE) for kind in ("q4_1", "f16")}
    ops.close()
    return found


@pytest.mark.parametrize("kind", ["q4_1", "f16"])
def test_near_the_reference(kind: str, expected: dict[str, list[np.ndarray]]) -> None:
    """To the rounding of float16 KV and of activations whose group lies on a border."""
    for got, want in zip(expected[kind], logits(ReferenceOps(), kind, WHOLE), strict=True):
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["q4_1", "f16"])
@pytest.mark.parametrize("family", [ISAS, TILE_ISAS])
def test_no_instruction_set_or_fusing_changes_a_bit(kind: str, family: tuple[str, ...]) -> None:
    wanted = None
    for isa in available_isas(family):
        ops = NativeOps(1, isa, fuse=wanted is None)
        got = logits(ops, kind, WHOLE)
        wanted = wanted or got
        assert all(map(np.array_equal, got, wanted)), isa
        ops.close()


@pytest.mark.parametrize("kind", ["q4_1", "f16"])
def test_no_chunk_changes_a_bit(kind: str, expected: dict[str, list[np.ndarray]]) -> None:
    """Chunks end inside windows and spans, and a single row of 599 keys is split across threads."""
    ops = NativeOps(3)
    for got, want in zip(logits(ops, kind, CHUNKED), expected[kind], strict=True):
        assert np.array_equal(got, want)
    ops.close()
