"""A recorded list of operations as one native program: values get bytes, the list C structs, a step one call.

A step's arrays become the bytes of the C structs of that call. Asking an array for its address costs more than all
else here, and most arrays of a step are those of the step before: the last array of each place is held, and its address
and what has been checked of it go for the next step too.

T tokens  S sequences  B blocks  L logit rows
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char
from typing import Any

import numpy as np

from ...core.sampling import PENALTIES
from ..api import SPAN, StepBatch, StepLimits
from ..draws import COLUMN_DTYPES, Adjustment, Adjustments, Draws
from .library import CALL_END, DRAWS, STEP, AdjustmentStruct, BufferStruct, CallStruct, LimitsStruct, OpStruct, check
from .memory import aligned_bytes, place
from .operation import TOKEN_ROWS, Operation, Value

_FLOAT, _INT = np.float32, np.int32
_SCORES: tuple[type[np.generic], ...] = (_INT, _FLOAT, _INT, _INT, _FLOAT)


class Binder:
    """num_tables: block tables of a sequence. logits: the buffer that draws read. draw_scratch: the address of memory
    that drawing uses."""

    def __init__(self, num_tables: int, logits: int, draw_scratch: int) -> None:
        self._num_tables = num_tables
        self._logits = logits
        self._draw_scratch = draw_scratch
        self._step = _Addresses([np.int32] * 9)
        self._draws = _Addresses([*COLUMN_DTYPES.values(), np.uint64, *_SCORES, np.int32, np.int32, np.int32])

    def step(self, batch: StepBatch) -> bytes:
        """A tm_step."""
        num_tokens, num_seqs = len(batch.tokens_T), len(batch.context_lens_S)
        num_rows, table_width = batch.block_tables_SB.shape
        assert len(batch.positions_T) == num_tokens, (len(batch.positions_T), num_tokens)
        assert len(batch.row_starts_S1) == num_seqs + 1, (len(batch.row_starts_S1), num_seqs)
        assert num_rows == num_seqs * self._num_tables, (num_rows, num_seqs)
        for array in (batch.adapters_T, batch.places_T, batch.state_blocks_T):
            assert array is None or len(array) == num_tokens, (len(array), num_tokens)
        addresses = self._step.addresses(
            (
                batch.tokens_T,
                batch.positions_T,
                batch.row_starts_S1,
                batch.context_lens_S,
                batch.block_tables_SB,
                batch.logit_rows_L,
                batch.adapters_T,
                batch.places_T,
                batch.state_blocks_T,
            )
        )
        return STEP.pack(*addresses, num_tokens, num_seqs, table_width, len(batch.logit_rows_L))

    def draws(self, draws: Draws) -> bytes:
        """A tm_draws."""
        num_rows, scores = len(draws.slots_L), draws.scores
        reported: tuple[np.ndarray | None, ...] = (None,) * 5
        if scores is not None:
            reported = (
                scores.num_top_L,
                scores.logprobs_L,
                scores.ranks_L,
                scores.top_ids_Ln,
                scores.top_logprobs_Ln,
            )
        arrays = (*draws.how.columns(), _packed(draws.adjustments), *reported, draws.slots_L, draws.tokens_L)
        for array in arrays:
            assert array is None or len(array) == num_rows, (len(array), num_rows)
        addresses = self._draws.addresses((*arrays, draws.drawn))
        top_width = 0 if scores is None else scores.top_ids_Ln.shape[1]
        return DRAWS.pack(*addresses, self._draw_scratch, num_rows, len(draws.drawn), self._logits, top_width)


def _packed(adjustments: Adjustments | None) -> np.ndarray | None:
    """The address of each row's tm_adjustment, 0 for none."""
    if adjustments is None:
        return None
    if adjustments.packed is None:
        adjustments.packed = np.array([0 if one is None else _address(one) for one in adjustments.rows], np.uint64)
    packed: np.ndarray = adjustments.packed
    return packed


def _address(one: Adjustment) -> int:
    if one.packed is None:
        assert one.history.dtype == np.int32 and one.history.flags.c_contiguous, one.history.dtype
        one.packed = AdjustmentStruct(
            history=one.history.ctypes.data,
            num_prompt=one.num_prompt,
            min_tokens=one.params.min_tokens,
            **{name: getattr(one.params, name) for name in PENALTIES},
            num_dry_breakers=len(one.dry_breakers),
            num_bias=len(one.bias_ids),
            num_held_back=len(one.held_back),
            num_bad_words=max(0, len(one.bad_starts) - 1),
            mask_wait_us=0 if one.mask is None else int(1e6 * one.mask.wait_s),
            dry_breakers=_ids(one.dry_breakers),
            bias_ids=_ids(one.bias_ids),
            bias=one.bias.ctypes.data,
            mask=None if one.mask is None else one.mask.place[0],
            mask_until=None if one.mask is None else one.mask.until_at,
            held_back=_ids(one.held_back),
            bad_tokens=_ids(one.bad_tokens),
            bad_starts=_ids(one.bad_starts),
        )
    return ctypes.addressof(one.packed)


def _ids(array: np.ndarray) -> int:
    assert array.dtype == np.int32 and array.flags.c_contiguous, array.dtype
    address: int = array.ctypes.data
    return address


class _Addresses:
    """The addresses of a fixed number of arrays, each of its own dtype; 0 for one that is not there."""

    def __init__(self, dtypes: Sequence[type[np.generic]]) -> None:
        self._dtypes = dtypes
        self._arrays: list[np.ndarray | None] = [None] * len(dtypes)
        self._addresses = [0] * len(dtypes)

    def addresses(self, arrays: Sequence[np.ndarray | None]) -> list[int]:
        held = self._arrays
        for index, array in enumerate(arrays):
            if array is held[index]:
                continue
            held[index] = array
            if array is None:
                self._addresses[index] = 0
                continue
            assert array.dtype == self._dtypes[index] and array.flags.c_contiguous, (index, array.dtype, array.shape)
            self._addresses[index] = _address_of(array)
        return self._addresses


_view: Callable[[Any], c_char] = c_char.from_buffer


def _address_of(array: np.ndarray) -> int:
    """A third of what `array.ctypes.data` costs, of arrays that may be written and have any bytes."""
    try:
        return ctypes.addressof(_view(array))
    except (TypeError, ValueError):
        address: int = array.ctypes.data
        return address


_PARTIAL_BYTES = 16 * 2**20  # most scratch for the partial attention of split contexts
_SPLIT_ROWS = 8  # query rows that scratch is sized for, besides one of every sequence
_NO_DRAWS = bytes(DRAWS.size)


UNIT = np.dtype([("place", np.int32), ("phase", np.int32), ("began_ns", np.int64), ("ended_ns", np.int64)])
"""A unit of work: of which operation (the number of operations: of the draws), in which phase of the step (-1: done by
whoever prepared the next phase), and when."""


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

    def record_units(self, batch: StepBatch, num_threads: int) -> np.ndarray:
        """Make a step as it is cut for so many threads, on the caller's alone; the units of work that it had, UNIT, in
        the order in which they were done."""
        assert self._program is not None, "the program is closed"
        units = np.zeros(1 << 10, UNIT)
        while True:
            set_up = self._library.tm_program_record(self._program, num_threads, units.ctypes.data, len(units))
            check(self._library, set_up == 0)
            try:
                self(batch)
                num_units = self._library.tm_program_recorded(self._program)
            finally:
                self._library.tm_program_record(self._program, 1, None, 0)
            if num_units <= len(units):
                return units[:num_units]
            units = np.zeros(num_units, UNIT)

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
    if operation.state is not None:
        struct.state = ctypes.pointer(operation.state)
    return struct
