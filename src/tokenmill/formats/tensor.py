"""A tensor as a checkpoint stores it: a name, a kind, a shape and its bytes. No arithmetic; no numpy.

The table of kinds is the layout of ggml's blocks: how many values share one block and how many bytes it takes.
Plain types are blocks of one value.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_LAYOUT: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "f64": (1, 8),
    "i8": (1, 1),
    "i16": (1, 2),
    "i32": (1, 4),
    "i64": (1, 8),
    "u8": (1, 1),
    "u16": (1, 2),
    "u32": (1, 4),
    "u64": (1, 8),
    "bool": (1, 1),
    "f8_e4m3": (1, 1),
    "f8_e5m2": (1, 1),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q8_0": (32, 34),
    "q8_1": (32, 36),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "q8_k": (256, 292),
    "iq1_s": (256, 50),
    "iq1_m": (256, 56),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq2_s": (256, 82),
    "iq3_xxs": (256, 98),
    "iq3_s": (256, 110),
    "iq4_nl": (32, 18),
    "iq4_xs": (256, 136),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
    "q1_0": (128, 18),
}
"""kind -> (values per block, bytes per block)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """`shape` is outermost first: a matrix is (N, K) and its rows are contiguous. `data` views the mapped file; it
    stays valid for as long as it is referenced, whatever happens to the reader that made it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def num_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count
