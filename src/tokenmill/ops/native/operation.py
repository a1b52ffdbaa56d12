"""What a recorded forward pass consists of: values, operations on them, and the weights and pools that these name.

Every value is written once, except by add_lora, which writes on into the one it is given. Rows of a value are the
step's tokens or its logit rows; how many there are is known only when a step runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.block import KVGroup
from ..api import HeadGeometry
from .library import (
    KVStruct,
    LatentStruct,
    LoraStruct,
    LowRankStruct,
    MoeStruct,
    PartStruct,
    StackStruct,
    StateStruct,
    WeightStruct,
)

SILU, GELU, GELU_ERF, RELU2 = 0, 1, 2, 4

TOKEN_ROWS, LOGIT_ROWS = 0, 1
F32, QUANTISED, WIDE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """Packed parts and the C structs that describe them. `form`: how parts that are not dense take their inputs, F32
    where there is none; `dense`: whether any part is; `on_tiles`: all of them meet in tiles. `order`: see RawTensor."""

    num_rows: int
    num_cols: int
    num_bytes: int
    form: int
    dense: bool
    on_tiles: bool
    struct: WeightStruct
    parts: Any  # the C array of PartStruct
    data: tuple[np.ndarray, ...]
    order: np.ndarray | None = None

    def part(self, index: int) -> PartStruct:
        return self.parts[index]


@dataclass(frozen=True, slots=True)
class NativeStack:
    """Packed matrices of one kind and shape, `stride` bytes apart, and the C struct that describes them. `form`: how
    they take their inputs."""

    num_matrices: int
    num_rows: int
    num_cols: int
    form: int
    struct: StackStruct
    data: np.ndarray

    @property
    def num_bytes(self) -> int:
        return int(self.data.size)


@dataclass(frozen=True, slots=True)
class NativeKV:
    """A bound pool: the C struct, and the arrays it points into."""

    struct: KVStruct
    pool: np.ndarray
    group: KVGroup
    key_factors: np.ndarray | None


@dataclass(frozen=True, slots=True)
class NativeLora:
    """Low-rank changes of one linear: the C structs, and by slot the arrays they point into. `max_rank` is rounded up
    to whole tiles."""

    num_slots: int
    max_rank: int
    num_cols: int
    widths: tuple[int, ...]
    struct: LoraStruct
    columns: np.ndarray
    changes: Any  # the C array of LowRankStruct, slot by slot
    data: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def change(self, slot: int, index: int) -> LowRankStruct:
        """The struct of matrix `index` in a slot (from 1)."""
        return self.changes[(slot - 1) * len(self.widths) + index]


@dataclass(eq=False, slots=True)
class Value:
    """What a forward pass sees of an array. `array`: set for an input that lives outside the program."""

    rows: int
    width: int
    form: int = F32
    array: np.ndarray | None = None


@dataclass(eq=False, slots=True)
class Operation:
    """kind: its name in the tables of native/src/op_*.cpp."""

    kind: str
    rows: int
    inputs: tuple[Value | None, Value | None, Value | None]
    out: Value | None
    width: int
    value: float = 0.0
    weight: NativeWeight | None = None
    vector: np.ndarray | None = None
    vector2: np.ndarray | None = None
    activation: int = SILU
    window: int = 0
    by_place: bool = False
    whole: bool = False
    cap: float = 0.0
    kv: NativeKV | None = None
    layer: int = 0
    heads: HeadGeometry | None = None
    lora: NativeLora | None = None
    order: np.ndarray | None = None
    stack: NativeStack | None = None
    stack2: NativeStack | None = None
    moe: MoeStruct | None = None
    latent: LatentStruct | None = None
    state: StateStruct | None = None
    keep: tuple[object, ...] = ()  # what the structs point to


@dataclass(frozen=True, slots=True)
class SymbolicBatch:
    """Stands for the StepBatch of every step to come; its fields can only be handed back to the recorder."""

    tokens_T: object = field(default_factory=object)
    positions_T: object = field(default_factory=object)
    row_starts_S1: object = field(default_factory=object)
    context_lens_S: object = field(default_factory=object)
    block_tables_SB: object = field(default_factory=object)
    logit_rows_L: object = field(default_factory=object)
    adapters_T: object = field(default_factory=object)
    adapters_L: object = field(default_factory=object)
    places_T: object = field(default_factory=object)
