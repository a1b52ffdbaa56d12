"""What the kernel tests share: random matrices of every kind, step batches, and a small decoder written in the kernel
interface.

T tokens  S sequences  L logit rows  D width
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenmill.core.block import KVGroup
from tokenmill.ops.api import BLOCK_BYTES, SUPERBLOCK_BYTES, HeadGeometry, RawTensor, StepBatch, block_of
from tokenmill.ops.native import NativeOps
from tokenmill.ops.native.library import TILE_ISAS, available_isas

KINDS = ("f32", "f16", "bf16", *BLOCK_BYTES, *SUPERBLOCK_BYTES)


def whole_blocks(kind: str, num_cols: int) -> int:
    """So many columns or, of a kind in super-blocks, the fewest above that are whole ones."""
    block_values = block_of(kind)[0] if kind in SUPERBLOCK_BYTES else 1
    return -(-num_cols // block_values) * block_values


def raw_tensor(rng: np.random.Generator, kind: str, num_rows: int, num_cols: int) -> RawTensor:
    """Values of about 0.1, as a checkpoint would hold them."""
    values = (rng.standard_normal((num_rows, num_cols)) * 0.1).astype(np.float32)
    if kind == "f32":
        data = values
    elif kind == "f16":
        data = values.astype(np.float16)
    elif kind == "bf16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
    elif kind in SUPERBLOCK_BYTES:
        block_values, block_bytes = block_of(kind)
        data = rng.integers(0, 256, (num_rows, num_cols // block_values, block_bytes), dtype=np.uint8)
        scales = rng.uniform(-0.001, 0.001, (*data.shape[:2], 1)).astype(np.float16)
        data[..., :2] = scales.view(np.uint8)
        if kind in ("q2_k", "q4_k", "q5_k"):
            data[..., 2:4] = (scales * -8).astype(np.float16).view(np.uint8)
    else:
        num_groups, num_halves = num_cols // 32, 2 if kind in ("q8_h", "q8_hm") else 1
        largest = {"q4_0": 0.03, "q4_1": 0.03, "q5_0": 0.015}.get(kind, 0.002)
        data = rng.integers(0, 256, (num_rows, num_groups, BLOCK_BYTES[kind]), dtype=np.uint8)
        scales = rng.uniform(-largest, largest, (num_rows, num_groups, num_halves)).astype(np.float16)
        if kind == "mxfp4":
            data[..., 0] = rng.integers(118, 123, (num_rows, num_groups))
        else:
            data[..., : 2 * num_halves] = scales.view(np.uint8)
        if kind in ("q4_1", "q8_m", "q8_hm"):
            data[..., 2 * num_halves : 4 * num_halves] = (scales * -8).astype(np.float16).view(np.uint8)
    return RawTensor(kind, num_rows, num_cols, np.ascontiguousarray(data).view(np.uint8).reshape(-1))


def tile_backends() -> Iterator[list[NativeOps]]:
    """Of every variant with tiles that runs here; closed afterwards."""
    made = [NativeOps(2, isa) for isa in available_isas(TILE_ISAS)]
    yield made
    for ops in made:
        ops.close()


def kv_type(ops: Any) -> str:
    """The 16 bits whose attention is the kernel family's own."""
    return "bf16" if ops.family.startswith("native-tiles") else "f16"


def activations(rng: np.random.Generator, num_rows: int, num_cols: int) -> np.ndarray:
    """Rows of very different size, with groups of zeros among them."""
    x = rng.standard_normal((num_rows, num_cols)) * 10.0 ** rng.uniform(-3, 2, (num_rows, 1))
    x[rng.random(num_rows) < 0.2, : num_cols // 2] = 0
    return x.astype(np.float32)


@dataclass
class Sequences:
    """Contexts of several sequences in one pool, and batches that advance them."""

    block_size: int
    tables: list[np.ndarray]

    @classmethod
    def scatter(cls, rng: np.random.Generator, max_lens: list[int], block_size: int) -> Sequences:
        """Block tables over a shuffled pool of exactly the blocks needed."""
        counts = [-(-length // block_size) for length in max_lens]
        ids = rng.permutation(sum(counts)).astype(np.int32)
        return cls(block_size, np.split(ids, np.cumsum(counts)[:-1]))

    @property
    def num_blocks(self) -> int:
        return sum(len(table) for table in self.tables)

    def batch(self, rows: list[tuple[int, list[int], int]], logit_rows: list[int] | None = None) -> StepBatch:
        """Rows of (sequence, its tokens so far, how many of them are computed already). Logits: default of every
        row's last token."""
        starts = np.cumsum([0] + [len(tokens) - start for _, tokens, start in rows]).astype(np.int32)
        widest = max((len(self.tables[s]) for s, _, _ in rows), default=1)
        tables = np.zeros((len(rows), widest), np.int32)
        for index, (s, _, _) in enumerate(rows):
            tables[index, : len(self.tables[s])] = self.tables[s]
        return StepBatch(
            tokens_T=np.array([token for _, tokens, start in rows for token in tokens[start:]], np.int32),
            positions_T=np.array([p for _, tokens, start in rows for p in range(start, len(tokens))], np.int32),
            row_starts_S1=starts,
            context_lens_S=np.array([len(tokens) for _, tokens, _ in rows], np.int32),
            block_tables_SB=tables,
            logit_rows_L=np.array(starts[1:] - 1 if logit_rows is None else logit_rows, np.int32),
        )


class TinyDecoder:
    """Two random layers of the common decoder, embeddings tied. `kinds`: of the qkv, output, gate+up, down and
    embedding matrices; a kind of 'a|b' stacks matrices of both."""

    def __init__(
        self,
        ops: Any,
        seed: int,
        heads: HeadGeometry,
        kinds: tuple[str, str, str, str, str] = ("q4_1", "q4_1", "q4_1", "q4_1", "q8_0"),
        vocab_size: int = 211,
        ffn_width: int = 160,
        max_positions: int = 1024,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads, self.vocab_size = heads, vocab_size
        self.width = width = heads.num_heads * heads.head_dim
        shapes = ((heads.width, width), (width, width), (2 * ffn_width, width), (width, ffn_width))

        def pack(kind: str, num_rows: int, num_cols: int) -> Any:
            first, _, second = kind.partition("|")
            if not second:
                return ops.pack([raw_tensor(rng, kind, num_rows, num_cols)])
            border = num_rows // 3
            return ops.pack(
                [raw_tensor(rng, first, border, num_cols), raw_tensor(rng, second, num_rows - border, num_cols)]
            )

        self.layers = [
            [pack(kind, *shape) for kind, shape in zip(kinds, shapes, strict=False)]
            + [ops.vector(rng.uniform(0.5, 1.5, width)) for _ in range(2)]
            for _ in range(2)
        ]
        self.embed = pack(kinds[4], vocab_size, width)
        self.norm = ops.vector(rng.uniform(0.5, 1.5, width))
        half = heads.head_dim // 2
        angles = np.arange(max_positions)[:, None] * 100.0 ** (-np.arange(half) / half)
        self.table = ops.vector(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))

    def group(self, block_size: int, dtype: str = "f16") -> KVGroup:
        return KVGroup("full", 2, self.heads.num_kv_heads, self.heads.head_dim, block_size, dtype)

    def forward(self, ops: Any, kv: Any, batch: Any) -> Any:
        x = ops.embed(self.embed, batch.tokens_T)
        for index, (qkv, output, gate_up, down, attn_norm, ffn_norm) in enumerate(self.layers):
            rotated = ops.rope(
                ops.linear(ops.rms_norm(x, attn_norm, 1e-5), qkv), batch.positions_T, self.table, self.heads
            )
            ops.write_kv(kv, index, rotated, batch, self.heads)
            mixed = ops.paged_attention(kv, index, rotated, batch, self.heads, self.heads.head_dim**-0.5)
            x = ops.add(x, ops.linear(mixed, output))
            x = ops.add(x, ops.linear(ops.silu_mul(ops.linear(ops.rms_norm(x, ffn_norm, 1e-5), gate_up)), down))
        last = ops.gather_rows(x, batch.logit_rows_L)
        return ops.linear(ops.rms_norm(last, self.norm, 1e-5), self.embed)
