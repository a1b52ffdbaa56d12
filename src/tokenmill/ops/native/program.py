"""A recorded list of operations as one native program: values get bytes, the list C structs, a step one call.

T tokens  S sequences  B blocks  L logit rows
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..api import SPAN, Draws, StepBatch, StepLimits
from .bind import Binder
from .library import CALL_END, DRAWS, BufferStruct, CallStruct, LimitsStruct, OpStruct, check
from .memory import aligned_bytes, place
from .operation import TOKEN_ROWS, Operation, Value

_PARTIAL_BYTES = 16 * 2**20  # most scratch for the partial attention of split contexts
_SPLIT_ROWS = 8  # query rows that scratch is sized for, besides one of every sequence
_NO_DRAWS = bytes(DRAWS.size)


class NativeProgram:
    """Callable on a StepBatch; gives the output value's rows, float32, valid until the next call.

    scratch_bytes   all memory the program holds besides weights and KV
    operations      the list
    on_error        called when a call has failed
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        team: Any,
        num_threads: int,
        operations: Sequence[Operation],
        output: Value,
        limits: StepLimits,
    ) -> None:
        self.limits = limits
        self.operations = tuple(operations)
        self._library = library
        self._team = team
        self._keep: list[Any] = [operations]  # whatever the C structs point to
        self._program = None
        self.on_error: Callable[[], None] = lambda: None
        assert output.array is None, "the output is made by an operation"
        is_read = any(output in each.inputs and each.out is not output for each in operations)
        assert not is_read, "what is joined away or rounded for its only reader is no output"

        values = _values(operations)
        max_rows = [limits.max_tokens if value.rows == TOKEN_ROWS else limits.max_logit_rows for value in values]
        rows_of = zip(values, max_rows, strict=True)
        sizes = [library.tm_buffer_bytes(value.form, rows, value.width) for value, rows in rows_of]
        lives = _lives(operations, values, output)
        inside = [index for index, value in enumerate(values) if value.array is None]
        offsets, arena_bytes = place([sizes[index] for index in inside], [lives[index] for index in inside])
        arena = aligned_bytes(arena_bytes)
        partial = aligned_bytes(_partial_bytes(operations, limits))
        self._keep += [arena, partial]
        self.scratch_bytes = arena_bytes + len(partial)

        offset_of = dict(zip(inside, offsets, strict=True))
        buffers = _buffers(values, max_rows, sizes, arena.ctypes.data, offset_of)
        index_of = {value: index for index, value in enumerate(values)}
        structs = (OpStruct * len(operations))(*(_struct(operation, index_of) for operation in operations))
        most = LimitsStruct(limits.max_tokens, limits.max_seqs, limits.max_blocks_per_seq, limits.max_logit_rows)
        self._program = library.tm_program_new(
            team,
            structs,
            len(structs),
            buffers,
            len(buffers),
            ctypes.byref(most),
            partial.ctypes.data,
            len(partial),
        )
        check(library, self._program)
        self._call_ends = tuple(CALL_END.pack(has_draws, 0, 0, 0, self._program, 0) for has_draws in (0, 1))
        at = index_of[output]
        out_bytes = arena[offset_of[at] : offset_of[at] + max_rows[at] * output.width * 4]
        self._output = out_bytes.view(np.float32).reshape(max_rows[at], output.width)
        self._output_rows = output.rows
        draws = output.rows != TOKEN_ROWS  # only from rows of logits
        draw_scratch = aligned_bytes(library.tm_sample_scratch(output.width) * (num_threads + 1) if draws else 0)
        draw_scratch[:] = 0
        self._keep.append(draw_scratch)
        self.scratch_bytes += len(draw_scratch)
        num_tables = 1 + max((o.kv.group.table for o in operations if o.kv is not None), default=0)
        self._binder = Binder(num_tables, at, draw_scratch.ctypes.data)

    def __call__(self, batch: StepBatch, draws: Draws | None = None) -> np.ndarray:
        return self.bind(batch, draws)()

    def bind(self, batch: StepBatch, draws: Draws | None = None) -> NativeCall:
        """The call with all its pointers taken. One thread at a time may bind."""
        step = self._binder.step(batch)
        if draws is None:
            struct = CallStruct.from_buffer_copy(step + _NO_DRAWS + self._call_ends[0])
        else:
            struct = CallStruct.from_buffer_copy(step + self._binder.draws(draws) + self._call_ends[1])
        num_rows = len(batch.tokens_T) if self._output_rows == TOKEN_ROWS else len(batch.logit_rows_L)
        return NativeCall(self, struct, self._output[:num_rows], (batch, draws))

    @property
    def is_open(self) -> bool:
        return self._program is not None

    def time_operations(self, times_ns: np.ndarray | None) -> None:
        """Add each operation's nanoseconds to `times_ns` (int64, one for each of `operations` and one for the draws)
        in every call from now on; None stops. The array is the caller's to keep until then."""
        assert self._program is not None, "the program is closed"
        if times_ns is not None:
            assert times_ns.dtype == np.int64 and times_ns.shape == (len(self.operations) + 1,), times_ns.shape
        self._library.tm_program_time(self._program, None if times_ns is None else times_ns.ctypes.data)

    def close(self) -> None:
        """Free the native side. The output of the last call is no longer valid."""
        if self._program is not None:
            self._library.tm_program_free(self._program)
            self._program = None
            self._output = self._output[:0].copy()
            self._keep.clear()


class NativeCall:
    """A bound call, to be made once. `keep`: what the struct points to."""

    __slots__ = ("_keep", "_output", "_program", "_struct")

    def __init__(self, program: NativeProgram, struct: CallStruct, output: np.ndarray, keep: object) -> None:
        self._program = program
        self._struct = struct
        self._output = output
        self._keep = keep

    def __call__(self) -> np.ndarray:
        struct = self.submitted()
        self._program._library.tm_call_run(struct)
        if struct.error:
            raise self.failure(struct.error)
        return self._output

    def failure(self, error: bytes) -> AssertionError:
        """Of a call that has ended with this error."""
        self._program.on_error()
        return AssertionError(error.decode())

    def submitted(self) -> CallStruct:
        """What native code takes. It changes while the call is made."""
        assert self._program.is_open, "the program is closed"
        return self._struct

    @property
    def span_s(self) -> tuple[float, float]:
        """When it began and when it ended, on a clock that never goes back."""
        return self._struct.began_ns / 1e9, self._struct.ended_ns / 1e9


def _values(operations: Sequence[Operation]) -> list[Value]:
    found: dict[Value, None] = {}
    for operation in operations:
        for value in (*operation.inputs, operation.out):
            if value is not None:
                found[value] = None
    return list(found)


def _buffers(
    values: Sequence[Value], max_rows: Sequence[int], sizes: Sequence[int], base: int, offset_of: Mapping[int, int]
) -> ctypes.Array[BufferStruct]:
    """Where each value lies: in an array of its own, or at its offset from `base`."""
    buffers = (BufferStruct * len(values))()
    for index, (value, rows) in enumerate(zip(values, max_rows, strict=True)):
        if value.array is None:
            data, num_bytes = base + offset_of[index], sizes[index]
        else:
            data, num_bytes = value.array.ctypes.data, value.array.nbytes
            rows = len(value.array)
        buffers[index] = BufferStruct(data, num_bytes, value.rows, rows, value.width, value.form)
    return buffers


def _lives(operations: Sequence[Operation], values: list[Value], output: Value) -> list[tuple[int, int]]:
    """For each value the first and last operation that touch it; the output lives to the end."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {output: len(operations)}
    for index, operation in enumerate(operations):
        for value in (*operation.inputs, operation.out):
            if value is not None:
                first.setdefault(value, index)
                last[value] = max(last.get(value, 0), index)
    return [(first[value], last[value]) for value in values]


def _partial_bytes(operations: Sequence[Operation], limits: StepLimits) -> int:
    """Room for the (max, sum, acc) of every span of one query row per sequence, so that threads can share one long
    context and rows of several sequences one prefix."""
    most = 0
    for operation in operations:
        if (
            operation.kind in ("attention", "latent_attention")
            and operation.kv is not None
            and operation.heads is not None
        ):
            num_spans = -(-limits.max_blocks_per_seq * operation.kv.group.block_size // SPAN)
            per_row = num_spans * operation.heads.num_heads * (operation.heads.head_dim + 2) * 4
            most = max(most, min(limits.max_tokens, limits.max_seqs + _SPLIT_ROWS) * per_row)
    return min(most, _PARTIAL_BYTES)


def _struct(operation: Operation, index_of: dict[Value, int]) -> OpStruct:
    in0, in1, in2 = (-1 if value is None else index_of[value] for value in operation.inputs)
    struct = OpStruct(
        kind=operation.kind.encode(),
        rows=operation.rows,
        in0=in0,
        in1=in1,
        in2=in2,
        out=-1 if operation.out is None else index_of[operation.out],
        width=operation.width,
        layer=operation.layer,
        activation=operation.activation,
        window=operation.window,
        by_place=operation.by_place,
        whole=operation.whole,
        value=operation.value,
        cap=operation.cap,
    )
    if operation.heads is not None:
        struct.num_heads = operation.heads.num_heads
        struct.num_kv_heads = operation.heads.num_kv_heads
        struct.head_dim = operation.heads.head_dim
    if operation.weight is not None:
        struct.weight = ctypes.pointer(operation.weight.struct)
    if operation.vector is not None:
        struct.vector = operation.vector.ctypes.data
        struct.vector_rows = len(operation.vector)
        struct.num_turned = operation.vector.shape[-1]
    if operation.vector2 is not None:
        struct.vector2 = operation.vector2.ctypes.data
        struct.vector2_rows = len(operation.vector2)
    if operation.order is not None:
        struct.order = operation.order.ctypes.data
    if operation.kv is not None:
        struct.kv = ctypes.pointer(operation.kv.struct)
    if operation.lora is not None:
        struct.lora = ctypes.pointer(operation.lora.struct)
    if operation.stack is not None:
        struct.stack = ctypes.pointer(operation.stack.struct)
    if operation.stack2 is not None:
        struct.stack2 = ctypes.pointer(operation.stack2.struct)
    if operation.moe is not None:
        struct.moe = ctypes.pointer(operation.moe)
    if operation.latent is not None:
        struct.latent = ctypes.pointer(operation.latent)
    return struct
