"""Matrices in the form that the kernels read: tiles of 16 rows, stacked parts, adapters. See native/src/pack.cpp.

K inputs  N outputs
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..api import BLOCK_BYTES, QUANTISATIONS, SUPERBLOCK_BYTES, LowRank, PackedCodes, RawTensor, block_of, same_order
from .library import (
    CODE_LAYOUTS,
    INTEGER_KINDS,
    KINDS,
    PLAIN_KINDS,
    STORED,
    CodesStruct,
    LoraStruct,
    LowRankStruct,
    PartStruct,
    StackStruct,
    WeightStruct,
    check,
)
from .memory import ALIGNMENT, WeightArena, aligned_bytes
from .operation import F32, QUANTISED, WIDE, NativeLora, NativeStack, NativeWeight
from .packed_file import PAGE, Extent, StoredPart, StoredWeight

_FIRST_QUANTISED, _FIRST_INTEGER, _LAST_INTEGER = KINDS["q4_0"], KINDS["w4"], KINDS["w8"]
_TILE_ROWS = 16
"""Rows of a packed tile."""


class Packer:
    """Packs with a team's threads, weights into an arena. has_tiles: for a matrix unit. lossless: bf16 in fewer bits,
    where kernels and exponents allow that (DFloat11, arXiv 2504.11651). See ops/api.py for what the functions mean."""

    def __init__(self, library: ctypes.CDLL, team: Any, weights: WeightArena, has_tiles: bool, lossless: bool) -> None:
        self._library = library
        self._team = team
        self._weights = weights
        self._has_tiles = has_tiles
        self._lossless = lossless

    def pack(self, parts: Sequence[RawTensor]) -> NativeWeight:
        num_cols, order = parts[0].num_cols, parts[0].order
        packed = self._pack_apart(parts, self._weights.take)
        structs: list[PartStruct] = []
        column = 0
        for kind, num_rows, data in packed:
            structs.append(PartStruct(KINDS[kind], column, num_rows, num_cols, data.ctypes.data, data.size))
            column += num_rows
        num_bytes = sum(data.size for _, _, data in packed)
        held = tuple(data for _, _, data in packed)
        return self.weight_of(
            structs, num_cols, num_bytes, held, None if order is None else np.ascontiguousarray(order, np.int32)
        )

    def pack_apart(self, parts: Sequence[RawTensor]) -> list[tuple[str, int, np.ndarray]]:
        """Kind, rows and bytes of each run of parts of one kind, in memory of its own."""
        return self._pack_apart(parts, aligned_bytes)

    def _pack_apart(
        self, parts: Sequence[RawTensor], take: Callable[[int], np.ndarray]
    ) -> list[tuple[str, int, np.ndarray]]:
        num_cols = parts[0].num_cols
        assert same_order(parts), "columns in different orders"
        for matrix in parts:
            assert matrix.num_cols == num_cols, (matrix.num_cols, num_cols)
            assert matrix.data.dtype == np.uint8 and matrix.data.flags.c_contiguous, matrix.data.dtype
            assert matrix.data.size == matrix.num_rows * _raw_row_bytes(matrix.kind, num_cols), matrix.data.size
        runs = [(kind, list(run)) for kind, run in itertools.groupby(parts, key=lambda part: part.kind)]
        kinds = self._integer_kinds(runs) or [(kind, None) for kind, _ in runs]
        packed = []
        for (kind, fits), (_, matrices) in zip(kinds, runs, strict=True):
            num_rows = sum(matrix.num_rows for matrix in matrices)
            if kind == "bf16" and self._fits_packed(num_cols, matrices):
                kind = "bf16p"
            packed.append((kind, num_rows, self._pack_kind(kind, num_cols, matrices, fits, take)))
        return packed

    def weight_of(
        self,
        structs: Sequence[PartStruct],
        num_cols: int,
        num_bytes: int,
        data: tuple[np.ndarray, ...],
        order: np.ndarray | None,
    ) -> NativeWeight:
        """Of packed parts; num_bytes: memory of its own."""
        array = (PartStruct * len(structs))(*structs)
        num_rows = sum(part.num_rows for part in structs)
        forms = {_form(part.kind) for part in structs}
        assert not {QUANTISED, WIDE} <= forms, forms
        return NativeWeight(
            num_rows=num_rows,
            num_cols=num_cols,
            num_bytes=num_bytes,
            form=max(forms),
            dense=F32 in forms,
            on_tiles=forms == {WIDE} or (structs[0].kind == KINDS["bf16"] and len(structs) == 1 and self._has_tiles),
            struct=WeightStruct(num_rows, num_cols, len(structs), 0, array),
            parts=array,
            data=data,
            order=order,
        )

    def _integer_kinds(
        self, runs: Sequence[tuple[str, Sequence[RawTensor]]]
    ) -> list[tuple[str, np.ndarray | None]] | None:
        """The kinds that quantised runs have as integers, and how they are fitted; None where one of them cannot, since
        all take one input."""
        found: list[tuple[str, np.ndarray | None]] = []
        for own, matrices in runs:
            kind = own if KINDS[own] < _FIRST_QUANTISED else INTEGER_KINDS.get(own)
            if kind is None:
                return None
            fits = None
            if kind != own:
                num_cols, num_rows = matrices[0].num_cols, sum(matrix.num_rows for matrix in matrices)
                num_fits = num_rows * self._library.tm_integer_fits(KINDS[kind], num_cols)
                fits = np.empty((num_fits, 2), np.float32)
                if not self._library.tm_fits_integer(
                    self._team, KINDS[kind], num_cols, len(matrices), *_addresses(matrices), fits.ctypes.data
                ):
                    return None
            found.append((kind, fits))
        return found

    def _fits_packed(self, num_cols: int, matrices: Sequence[RawTensor]) -> bool:
        """Of bf16, which few rare exponents do."""
        return self._lossless and bool(
            self._library.tm_fits_integer(
                self._team, KINDS["bf16p"], num_cols, len(matrices), *_addresses(matrices), None
            )
        )

    def pack_stack(self, matrices: Sequence[Sequence[RawTensor]]) -> NativeStack:
        """No integer kinds: a row meets too few of the matrices for tiles of digits to pay."""
        kind, num_rows, num_cols, num_bytes = self._stack_shape(matrices)
        stride = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        out = self._weights.take(len(matrices) * stride)
        for index, parts in enumerate(matrices):
            at = index * stride
            self._pack_into(kind, num_cols, parts, None, out[at : at + num_bytes])
        return self.stack_of(StackStruct(kind, len(matrices), num_rows, num_cols, out.ctypes.data, stride), out)

    def pack_each(self, matrices: Sequence[Sequence[RawTensor]], write: Callable[[np.ndarray], Extent]) -> StoredWeight:
        """As pack_stack, each matrix by itself and as whole pages into a file."""
        kind, num_rows, num_cols, num_bytes = self._stack_shape(matrices)
        out = aligned_bytes(-(-num_bytes // PAGE) * PAGE)
        out[:] = 0
        extents = []
        for parts in matrices:
            self._pack_into(kind, num_cols, parts, None, out[:num_bytes])
            extents.append(write(out))
        return StoredWeight(num_cols, (StoredPart(matrices[0][0].kind, num_rows, 0, num_bytes),), tuple(extents))

    def _stack_shape(self, matrices: Sequence[Sequence[RawTensor]]) -> tuple[int, int, int, int]:
        """Kind, rows, columns and packed bytes of each matrix."""
        first = matrices[0][0]
        shapes = {tuple((part.kind, part.num_rows, part.num_cols) for part in parts) for parts in matrices}
        assert len(shapes) == 1 and len({kind for kind, _, _ in next(iter(shapes))}) == 1, f"unequal: {shapes}"
        assert all(part.order is None for parts in matrices for part in parts), "a stack has no order of columns"
        kind, num_rows = KINDS[first.kind], sum(part.num_rows for part in matrices[0])
        num_bytes = self._library.tm_packed_bytes(kind, num_rows, first.num_cols)
        assert num_bytes > 0, f"a {first.kind} matrix of {num_rows} x {first.num_cols} cannot be packed"
        return kind, num_rows, first.num_cols, num_bytes

    def stack_of(self, struct: StackStruct, data: np.ndarray) -> NativeStack:
        """Of packed matrices; data: those in memory of its own."""
        return NativeStack(struct.num_matrices, struct.num_rows, struct.num_cols, _form(struct.kind), struct, data)

    def quantise(self, part: RawTensor, kind: str) -> RawTensor:
        assert kind in QUANTISATIONS and part.data.flags.c_contiguous, kind
        out = np.empty(part.num_rows * _raw_row_bytes(kind, part.num_cols), np.uint8)
        done = self._library.tm_quantise(
            self._team,
            KINDS[part.kind],
            KINDS[kind],
            part.num_rows,
            part.num_cols,
            part.data.ctypes.data,
            out.ctypes.data,
        )
        check(self._library, done == 0)
        return RawTensor(kind, part.num_rows, part.num_cols, out)

    def recode(
        self, stored: str, data: np.ndarray, kind: str, num_rows: int, num_cols: int, book: np.ndarray | None
    ) -> RawTensor | None:
        if stored not in STORED:
            return None
        assert data.dtype == np.uint8 and data.flags.c_contiguous, data.dtype
        if self._has_tiles:
            kind = PLAIN_KINDS.get(kind, kind)
        out = np.empty(num_rows * _raw_row_bytes(kind, num_cols), np.uint8)
        fits = ctypes.c_int32()
        done = self._library.tm_recode(
            self._team,
            STORED.index(stored),
            KINDS[kind],
            data.ctypes.data,
            data.size,
            out.ctypes.data,
            out.size,
            ctypes.byref(fits),
            None if book is None else book.ctypes.data,
            0 if book is None else book.nbytes,
        )
        check(self._library, done == 0)
        return RawTensor(kind, num_rows, num_cols, out) if fits.value else None

    def recode_integers(
        self, kind: str, codes: PackedCodes, scales_NG: np.ndarray, minimums_NG: np.ndarray | None
    ) -> RawTensor | None:
        if codes.bits not in (2, 4, 8):
            return None
        (num_rows, num_cols), order = codes.shape, codes.order_K
        words, scales = np.ascontiguousarray(codes.words, np.uint32), np.ascontiguousarray(scales_NG, np.float16)
        minimums = None if minimums_NG is None else np.ascontiguousarray(minimums_NG, np.float16)
        assert scales.shape[0] == num_rows and (minimums is None or minimums.shape == scales.shape), scales.shape
        assert order is None or (order.dtype == np.int32 and order.shape == (num_cols,)), order
        struct = CodesStruct(
            words.ctypes.data,
            None if order is None else order.ctypes.data,
            words.shape[1],
            words.size,
            CODE_LAYOUTS[codes.layout],
            codes.bits,
            codes.minus,
            num_rows,
            num_cols,
            num_cols // scales.shape[1],
            scales.ctypes.data,
            None if minimums is None else minimums.ctypes.data,
        )
        out = np.empty(num_rows * _raw_row_bytes(kind, num_cols), np.uint8)
        done = self._library.tm_recode_integers(
            self._team, ctypes.byref(struct), KINDS[kind], out.ctypes.data, out.size
        )
        check(self._library, done == 0)
        return RawTensor(kind, num_rows, num_cols, out, order)

    def _pack_kind(
        self,
        kind: str,
        num_cols: int,
        matrices: Sequence[RawTensor],
        fits: np.ndarray | None,
        take: Callable[[int], np.ndarray],
    ) -> np.ndarray:
        num_rows = sum(matrix.num_rows for matrix in matrices)
        num_bytes = self._library.tm_packed_bytes(KINDS[kind], num_rows, num_cols)
        assert num_bytes > 0, f"a {kind} matrix of {num_rows} x {num_cols} cannot be packed"
        out = take(num_bytes)
        self._pack_into(KINDS[kind], num_cols, matrices, fits, out)
        return out

    def _pack_into(
        self, kind: int, num_cols: int, matrices: Sequence[RawTensor], fits: np.ndarray | None, out: np.ndarray
    ) -> None:
        fits_at = None if fits is None else fits.ctypes.data
        done = self._library.tm_pack(
            self._team, kind, num_cols, len(matrices), *_addresses(matrices), fits_at, out.ctypes.data, out.size
        )
        check(self._library, done == 0)

    def lora_table(
        self, num_slots: int, max_rank: int, num_cols: int, widths: Sequence[int], *, by_token: bool = False
    ) -> NativeLora:
        columns = np.cumsum([0, *widths], dtype=np.int32)
        changes = (LowRankStruct * (num_slots * len(widths)))()
        room = -(-max_rank // _TILE_ROWS) * _TILE_ROWS
        struct = LoraStruct(num_slots, len(widths), num_cols, room, by_token, columns.ctypes.data, changes)
        return NativeLora(num_slots, room, num_cols, tuple(widths), struct, columns, changes)

    def set_lora(self, table: NativeLora, slot: int, changes: Sequence[LowRank | None]) -> int:
        assert 1 <= slot <= table.num_slots and len(changes) == len(table.widths), (slot, len(changes))
        held: list[np.ndarray] = []
        for index, change in enumerate(changes):
            struct = LowRankStruct()
            if change is not None:
                rank, num_cols = change.a.num_rows, change.a.num_cols
                if table.struct.by_token:
                    rank, num_cols = num_cols, rank
                assert rank == change.b.num_cols <= table.max_rank, (rank, table.max_rank)
                assert num_cols == table.num_cols and change.b.num_rows == table.widths[index], index
                parts = [self._pack_alone(matrix, held) for matrix in (change.a, change.b)]
                struct = LowRankStruct(rank, change.scale, *parts)
                if change.factors is not None:
                    factors = np.ascontiguousarray(change.factors, np.float32)
                    assert factors.shape == (change.b.num_rows,), factors.shape
                    held.append(factors)
                    struct.factors = factors.ctypes.data
            table.changes[(slot - 1) * len(changes) + index] = struct
        table.data[slot] = held
        return sum(data.nbytes for data in held)

    def _pack_alone(self, matrix: RawTensor, held: list[np.ndarray]) -> PartStruct:
        """A dense matrix packed into memory of its own, which is appended to `held`: adapters come and go."""
        kind = KINDS[matrix.kind]
        assert matrix.kind in ("f32", "f16"), matrix.kind
        data = aligned_bytes(self._library.tm_packed_bytes(kind, matrix.num_rows, matrix.num_cols))
        self._pack_into(kind, matrix.num_cols, [matrix], None, data)
        held.append(data)
        return PartStruct(kind, 0, matrix.num_rows, matrix.num_cols, data.ctypes.data, data.size)


def _form(kind: int) -> int:
    """How a linear takes the inputs of a part."""
    if kind < _FIRST_QUANTISED or kind == KINDS["bf16p"]:
        return F32
    return WIDE if _FIRST_INTEGER <= kind <= _LAST_INTEGER else QUANTISED


def _addresses(matrices: Sequence[RawTensor]) -> tuple[Any, Any]:
    pointers = (ctypes.c_void_p * len(matrices))(*(matrix.data.ctypes.data for matrix in matrices))
    counts = (ctypes.c_int64 * len(matrices))(*(matrix.num_rows for matrix in matrices))
    return pointers, counts


def _raw_row_bytes(kind: str, num_cols: int) -> int:
    """Bytes of a row as a checkpoint stores it."""
    if kind in BLOCK_BYTES or kind in SUPERBLOCK_BYTES:
        values, num_bytes = block_of(kind)
        assert num_cols % values == 0, f"{kind} rows hold whole blocks of {values}, got {num_cols} columns"
        return num_cols // values * num_bytes
    return num_cols * {"f32": 4, "f16": 2, "bf16": 2}[kind]
