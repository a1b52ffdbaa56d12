"""Matrices on their way into a backend, and what a backend has made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

GROUP = 32
"""Values that share one quantisation scale."""

BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34, "q8_m": 36, "q8_h": 36, "q8_hm": 40, "q6_h": 28}
"""Quantised kinds: bytes of a block of 32 values. In a block lie f16 scales, f16 minimums, then codes."""

QUANTISATIONS = ("q8_0", "q4_0", "q4_1", "f16", "bf16")
"""Kinds that dense matrices can be turned into at load."""


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A matrix in a form that backends take. `data` is uint8, C-contiguous, `num_rows` rows of equal byte length, each
    row `num_cols` values. Kinds: 'f32', 'f16', 'bf16'; ggml's blocks 'q4_0' (x = d * (q - 8)), 'q4_1' (d * q + m) and
    'q8_0' (d * q, int8 codes); and for what other formats hold in 5 to 8 bits, with int8 codes too, 'q8_m' (d * q + m),
    'q8_h' (d * q, one d for each half of a block) and 'q8_hm' (d * q + m, one d and m for each half). 'q6_h' is 'q8_h'
    with codes -32..31, stored + 32: the lower 4 bits as in 'q4_0', then 8 bytes of upper bits, byte j of a half with
    those of its values j, 4 + j, 8 + j and 12 + j from the lowest bits up.

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
