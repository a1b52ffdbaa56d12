"""Matrices on their way into a backend, what a backend has made of them, and what a backend offers that can keep them
on disk with a bounded part of them in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.errors import ConfigError
from ..core.experts import WeightReads

GROUP = 32
"""Values that share one quantisation scale."""

BLOCK_BYTES = {
    **{"q4_0": 18, "q4_1": 20, "q5_0": 22, "q8_0": 34, "q8_m": 36, "q8_h": 36, "q8_hm": 40},
    **{"mxfp4": 17, "iq4_nl": 18},
}
"""Quantised kinds: bytes of a block of 32 values. In a block lie f16 scales (of 'mxfp4' an exponent), f16 minimums,
then codes."""

SUPERBLOCK = 256
SUPERBLOCK_BYTES = {"q2_k": 84, "q3_k": 110, "q4_k": 144, "q5_k": 176, "q6_k": 210}
"""Kinds in super-blocks: bytes of one, of 256 values. In it lie f16 scale, f16 minimum if any, factors, then codes."""

EXACT_FACTORS = frozenset({"q2_k", "q3_k"})
"""Kinds in super-blocks whose scales and minimums are not rounded once they are made of factors."""

CODE_OFFSETS = {"q2_k": 0, "q3_k": 4, "q4_0": 8, "q4_1": 0, "q4_k": 0, "q5_0": 16, "q5_k": 0, "q6_k": 32}
"""Kinds with codes of fewer than 8 bits: what they are stored plus."""

CODE_VALUES = {
    "mxfp4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8),
    "iq4_nl": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8),
}
"""Kinds with codes of 4 bits that stand for values of a table; those of 'mxfp4' (E2M1) are doubled."""

LARGEST_POWER = 2.0**103
"""The largest scale of 'mxfp4'."""

QUANTISATIONS = ("q8_0", "q4_0", "q4_1", "f16", "bf16")
"""Kinds that dense matrices can be turned into at load."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A matrix in a form that backends take. `data` is uint8, C-contiguous, `num_rows` rows of equal byte length, each
    row `num_cols` values. Kinds: 'f32', 'f16', 'bf16'; ggml's blocks 'q4_0' (x = d * (q - 8)), 'q4_1' (d * q + m) and
    'q8_0' (d * q, int8 codes); and for what other formats hold in 5 to 8 bits, with int8 codes too, 'q8_m' (d * q + m),
    'q8_h' (d * q, one d for each half of a block) and 'q8_hm' (d * q + m, one d and m for each half). 'q5_0'
    (d * (q - 16)) has behind the lower 4 bits 4 bytes of upper ones: bit n of byte j is that of value 4 n + j. 'iq4_nl'
    and 'mxfp4' have codes as 'q4_0' that stand for d * CODE_VALUES[kind][q]; d of 'mxfp4' is a power of two, of which
    the block has the exponent as float32 stores it, a byte (0: d is 0).

    In super-blocks of 8 blocks, 'q4_k' is 'q4_1' whose d and m are those of the super-block times 6-bit factors,
    rounded to f16. The factors are in three 32-bit words: a word w has from the lowest bits up those of d and m of
    block 2w, then those of block 2w + 1; for w = 3 these 24 bits are the upper bytes of the three, in order. 'q5_k' is
    the same with codes as in 'q5_0', unsigned. 'q6_k' is 'q8_h' whose d are that of the super-block times factors from
    -128 to 127, rounded to f16; these are 16 bytes, stored + 128. Its codes -32..31 are stored + 32: the lower 4 bits
    as in 'q4_0', then 8 bytes of upper bits, byte j of a half with those of its values j, 4 + j, 8 + j and 12 + j from
    the lowest bits up. 'q2_k' is 'q8_hm' with codes 0..3 in 8 such bytes, and 16 bytes of 4-bit factors, those of d
    below those of m; 'q3_k' is 'q8_h' with codes -4..3, stored + 4, the lower 2 bits in 8 such bytes and the upper one
    as in 'q5_0', and factors from -32 to 31, stored + 32 in three words as above: from the lowest bits up those of both
    halves of block 2w, then of block 2w + 1. In these two, products are not rounded.

    order: int32 [K] where columns are not in the order of the inputs: column k belongs to input order[k]. Matrices that
    are stacked have the same."""

    kind: str
    num_rows: int
    num_cols: int
    data: np.ndarray
    order: np.ndarray | None = None

    @property
    def row_bytes(self) -> int:
        return self.data.size // self.num_rows


def block_of(kind: str) -> tuple[int, int]:
    """Values and bytes of a block of a quantised kind."""
    return (SUPERBLOCK, SUPERBLOCK_BYTES[kind]) if kind in SUPERBLOCK_BYTES else (GROUP, BLOCK_BYTES[kind])


class PackedCodes(Protocol):
    """Unsigned codes of a matrix in 32-bit words; see formats/integers.py."""

    @property
    def words(self) -> np.ndarray: ...

    @property
    def layout(self) -> str: ...

    @property
    def bits(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def minus(self) -> int: ...

    @property
    def order_K(self) -> np.ndarray | None: ...


def same_order(parts: Sequence[RawTensor]) -> bool:
    """Whether the columns of matrices that are to be stacked are in one order."""
    orders = [None if part.order is None else part.order.tobytes() for part in parts]
    return all(order == orders[0] for order in orders)


class Weight(Protocol):
    """A packed matrix [N, K] of one backend; made by `pack`, understood by that backend alone."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_cols(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        ...


class Stack(Protocol):
    """Matrices [N, K] of one shape and kind, each packed by itself: of experts, or of heads. Made by `pack_stack`."""

    @property
    def num_matrices(self) -> int: ...

    @property
    def num_rows(self) -> int:
        """Of one matrix."""
        ...

    @property
    def num_cols(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Memory that all take."""
        ...


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """Weights that are kept on disk: packed once into the file `path`, of which `key` says the content (64 hex digits).

    expert_bytes  memory for routed experts, as many of them as fit; None: all are in memory as usual
    weight_bytes  memory for the other weights of layers; None: as above
    """

    path: Path
    key: str
    expert_bytes: int | None = None
    weight_bytes: int | None = None


class DiskOps(Protocol):
    """A part of Ops."""

    def pack_layer(self, make: Callable[[], Sequence[RawTensor]]) -> Weight:
        """As `pack` of what `make` gives, for a weight that every step uses once. Where it is kept on disk already,
        `make` is not called."""
        ...

    def pack_experts(self, make: Callable[[], Sequence[Sequence[RawTensor]]]) -> Stack:
        """As `pack_stack` of what `make` gives, for routed experts: of a layer gate_up, then down. Where they are kept
        on disk already, `make` is not called."""
        ...

    def on_disk(self, where: DiskWeights) -> AbstractContextManager[None]:
        """What is packed inside by the two functions above is kept on disk, as `where` says. Raises ConfigError where
        this backend cannot, there is no room on the disk, or the memory given is too little for the model."""
        ...

    @property
    def disk_memory_bytes(self) -> tuple[int, int]:
        """Memory for experts and for other weights that are kept on disk."""
        ...

    def weight_reads(self) -> WeightReads | None:
        """None where nothing is kept on disk. From any thread, until `close`."""
        ...


class AllInMemory:
    """Of a backend that keeps nothing on disk."""

    def pack_layer(self, make: Callable[[], Sequence[RawTensor]]) -> Any:
        return self.pack(make())  # type: ignore[attr-defined]

    def pack_experts(self, make: Callable[[], Sequence[Sequence[RawTensor]]]) -> Any:
        return self.pack_stack(make())  # type: ignore[attr-defined]

    def on_disk(self, where: DiskWeights) -> AbstractContextManager[None]:
        param = "expert_memory" if where.expert_bytes is not None else "weight_memory"
        raise ConfigError(f"--{param.replace('_', '-')} needs the native backend, on Linux or macOS.", param=param)

    @property
    def disk_memory_bytes(self) -> tuple[int, int]:
        return 0, 0

    def weight_reads(self) -> WeightReads | None:
        return None
