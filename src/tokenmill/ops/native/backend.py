"""NativeOps: the seam of ops/api.py on the native kernels.

`compile` is the way to run a model: one recorded program, one native call a step. Called directly, each function builds
a program of its own and copies its result, which is meant for tests.

    T tokens  L logit rows  V vocabulary  D width  K inputs  N outputs
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.block import KVGroup
from ..api import (
    BLOCK_BYTES,
    QUANTISATIONS,
    HeadGeometry,
    LowRank,
    RawTensor,
    SampleBatch,
    StepBatch,
    StepLimits,
    same_order,
)
from ..pool import HostPool
from ..work import ThreadQueue, WorkQueue
from .fuse import fuse
from .library import (
    INTEGER_KINDS,
    KINDS,
    KV_TYPES,
    PROBES,
    STORED,
    TILE_ISAS,
    KVStruct,
    LoraStruct,
    LowRankStruct,
    Part,
    SamplingStruct,
    WeightStruct,
    check,
    load_library,
)
from .memory import WeightArena, aligned_bytes
from .program import NativeProgram
from .queue import NativeQueue
from .record import F32, QUANTISED, WIDE, NativeKV, NativeLora, NativeWeight, Recorder, SymbolicBatch, Value

_FIRST_QUANTISED, _FIRST_INTEGER = KINDS["q4_0"], KINDS["w4"]
TILE_ROWS = 16
"""Rows of a packed tile."""


class NativeOps:
    """num_threads  default: the processors this process may use
    isa          one of ISAS or TILE_ISAS (library.py); default: TOKENMILL_ISA, else
                 the fastest that runs here
    fuse         False keeps the recorded operations apart (same bits, slower)
    """

    name = "native"

    def __init__(self, num_threads: int | None = None, isa: str | None = None, fuse: bool = True) -> None:
        self.num_threads = num_threads or default_num_threads()
        self.fuse = fuse
        self._isa = isa or os.environ.get("TOKENMILL_ISA") or "auto"
        self._library = load_library()
        self._team_handle: Any = None
        self._programs: list[NativeProgram] = []
        self._weights = WeightArena()
        self._sample_scratch = np.empty(0, np.uint8)

    @property
    def _team(self) -> Any:
        if self._team_handle is None:
            self._team_handle = self._library.tm_team_new(self.num_threads, self._isa.encode())
            check(self._library, self._team_handle)
        return self._team_handle

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._library.tm_team_isa(self._team).decode()

    @property
    def family(self) -> str:
        """Kernel family: variants of one agree in every bit."""
        return "native-tiles-3" if self.isa in TILE_ISAS else "native-i8g32-bf16-4"

    @property
    def kv_dtype(self) -> str:
        """The matrix unit multiplies bf16; elsewhere both types become float32 first, and f16 is the finer one."""
        return "bf16" if self.isa in TILE_ISAS else "f16"

    def describe(self) -> dict[str, str]:
        return {"backend": "native", "instruction set": self.isa, "threads": str(self.num_threads)}

    def progress(self) -> int:
        return int(self._library.tm_team_progress(self._team))

    def pack(self, parts: Sequence[RawTensor]) -> NativeWeight:
        num_cols = parts[0].num_cols
        assert same_order(parts), "columns in different orders"
        for matrix in parts:
            assert matrix.num_cols == num_cols, (matrix.num_cols, num_cols)
            assert matrix.data.dtype == np.uint8 and matrix.data.flags.c_contiguous, matrix.data.dtype
            assert matrix.data.size == matrix.num_rows * raw_row_bytes(matrix.kind, num_cols), matrix.data.size
        runs = [(kind, list(run)) for kind, run in itertools.groupby(parts, key=lambda part: part.kind)]
        kinds = self._integer_kinds(runs) or [(kind, None) for kind, _ in runs]
        structs: list[Part] = []
        packed: list[np.ndarray] = []
        column = 0
        for (kind, fits), (_, matrices) in zip(kinds, runs, strict=True):
            data = self._pack_kind(kind, num_cols, matrices, fits)
            num_rows = sum(matrix.num_rows for matrix in matrices)
            structs.append(Part(KINDS[kind], column, num_rows, num_cols, data.ctypes.data, data.size))
            packed.append(data)
            column += num_rows
        array = (Part * len(structs))(*structs)
        order = parts[0].order
        forms = {_form(part.kind) for part in structs}
        assert not {QUANTISED, WIDE} <= forms, forms
        return NativeWeight(
            num_rows=column,
            num_cols=num_cols,
            num_bytes=sum(data.size for data in packed),
            form=max(forms),
            dense=F32 in forms,
            on_tiles=forms == {WIDE} or (runs[0][0] == "bf16" and len(runs) == 1 and self.isa in TILE_ISAS),
            struct=WeightStruct(column, num_cols, len(structs), 0, array),
            parts=array,
            data=tuple(packed),
            order=None if order is None else np.ascontiguousarray(order, np.int32),
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

    def quantise(self, part: RawTensor, kind: str) -> RawTensor:
        assert kind in QUANTISATIONS and part.data.flags.c_contiguous, kind
        out = np.empty(part.num_rows * raw_row_bytes(kind, part.num_cols), np.uint8)
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

    def recode(self, stored: str, data: np.ndarray, kind: str, num_rows: int, num_cols: int) -> RawTensor | None:
        if stored not in STORED:
            return None
        assert data.dtype == np.uint8 and data.flags.c_contiguous, data.dtype
        out = np.empty(num_rows * raw_row_bytes(kind, num_cols), np.uint8)
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
        )
        check(self._library, done == 0)
        return RawTensor(kind, num_rows, num_cols, out) if fits.value else None

    def _pack_kind(
        self, kind: str, num_cols: int, matrices: Sequence[RawTensor], fits: np.ndarray | None
    ) -> np.ndarray:
        num_rows = sum(matrix.num_rows for matrix in matrices)
        num_bytes = self._library.tm_packed_bytes(KINDS[kind], num_rows, num_cols)
        assert num_bytes > 0, f"a {kind} matrix of {num_rows} x {num_cols} cannot be packed"
        out = self._weights.take(num_bytes)
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
        room = -(-max_rank // TILE_ROWS) * TILE_ROWS
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

    def _pack_alone(self, matrix: RawTensor, held: list[np.ndarray]) -> Part:
        """A dense matrix packed into memory of its own, which is appended to `held`: adapters come and go."""
        kind = KINDS[matrix.kind]
        assert matrix.kind in ("f32", "f16"), matrix.kind
        data = aligned_bytes(self._library.tm_packed_bytes(kind, matrix.num_rows, matrix.num_cols))
        self._pack_into(kind, matrix.num_cols, [matrix], None, data)
        held.append(data)
        return Part(kind, 0, matrix.num_rows, matrix.num_cols, data.ctypes.data, data.size)

    def vector(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, np.float32)

    def new_pool(self, group: KVGroup, num_blocks: int) -> HostPool:
        return HostPool(group, num_blocks, self.bind_kv)

    def bind_kv(self, pool: np.ndarray, group: KVGroup) -> NativeKV:
        """A handle on a pool's bytes, uint8 [num_blocks, group.bytes_per_block]."""
        assert pool.dtype == np.uint8 and pool.flags.c_contiguous and pool.flags.writeable, pool.dtype
        assert pool.ndim == 2 and pool.shape[1] == group.bytes_per_block, (pool.shape, group.bytes_per_block)
        struct = KVStruct(
            pool=pool.ctypes.data,
            num_blocks=len(pool),
            bytes_per_block=group.bytes_per_block,
            num_layers=group.num_layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_dim,
            block_size=group.block_size,
            dtype=KV_TYPES[group.dtype],
            table=group.table,
        )
        return NativeKV(struct, pool, group)

    def compile(self, forward: Callable[[Any, Any], Any], limits: StepLimits) -> NativeProgram:
        batch = SymbolicBatch()
        recorder = Recorder(batch)
        output = forward(recorder, batch)
        assert isinstance(output, Value), "the forward pass must return a value made by its ops"
        operations = recorder.operations
        if self.fuse:
            operations = fuse(operations, output)
        program = NativeProgram(self._library, self._team, self.num_threads, operations, output, limits)
        self._programs.append(program)
        return program

    def open_queue(self, when_idle: Callable[[], bool]) -> WorkQueue:
        if os.name != "posix":  # no event loop can wait for a pipe
            return ThreadQueue(when_idle)
        return NativeQueue(self._library, when_idle)

    def embed(self, table: NativeWeight, tokens_T: np.ndarray) -> np.ndarray:
        tokens_T = np.ascontiguousarray(tokens_T, np.int32)
        return self._once(lambda ops, batch: ops.embed(table, batch.tokens_T), len(tokens_T), tokens_T=tokens_T)

    def rms_norm(self, x_TD: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
        return self._once(lambda ops, batch: ops.rms_norm(x_TD, weight_D, eps), len(x_TD))

    def linear(self, x_TK: np.ndarray, weight: NativeWeight) -> np.ndarray:
        return self._once(lambda ops, batch: ops.linear(x_TK, weight), len(x_TK))

    def layer_norm(self, x_TD: np.ndarray, weight_D: np.ndarray, bias_D: np.ndarray, eps: float) -> np.ndarray:
        return self._once(lambda ops, batch: ops.layer_norm(x_TD, weight_D, bias_D, eps), len(x_TD))

    def norm_heads(
        self, qkv_TW: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, heads: HeadGeometry, eps: float
    ) -> np.ndarray:
        return self._once(lambda ops, batch: ops.norm_heads(qkv_TW, q_weight, k_weight, heads, eps), len(qkv_TW))

    def add_bias(self, x_TN: np.ndarray, bias_N: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.add_bias(x_TN, bias_N), len(x_TN))

    def scale(self, x_TD: np.ndarray, factor: float) -> np.ndarray:
        return self._once(lambda ops, batch: ops.scale(x_TD, factor), len(x_TD))

    def soft_cap(self, x_TD: np.ndarray, cap: float) -> np.ndarray:
        return self._once(lambda ops, batch: ops.soft_cap(x_TD, cap), len(x_TD))

    def gelu_mul(self, gate_up_T2F: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.gelu_mul(gate_up_T2F), len(gate_up_T2F))

    def gelu_erf_mul(self, gate_up_T2F: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.gelu_erf_mul(gate_up_T2F), len(gate_up_T2F))

    def gelu(self, x_TF: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.gelu(x_TF), len(x_TF))

    def add_lora(self, y_TN: np.ndarray, x_TK: np.ndarray, table: NativeLora, adapters_T: np.ndarray) -> np.ndarray:
        def forward(ops: Recorder, batch: SymbolicBatch) -> Value:
            return ops.add_lora(ops.scale(y_TN, 1.0), x_TK, table, batch.adapters_T)

        return self._once(forward, len(y_TN), adapters_T=np.ascontiguousarray(adapters_T, np.int32))

    def add_token_lora(
        self, y_TD: np.ndarray, tokens_T: np.ndarray, table: NativeLora, adapters_T: np.ndarray
    ) -> np.ndarray:
        def forward(ops: Recorder, batch: SymbolicBatch) -> Value:
            return ops.add_token_lora(ops.scale(y_TD, 1.0), batch.tokens_T, table, batch.adapters_T)

        given = {"tokens_T": tokens_T, "adapters_T": adapters_T}
        return self._once(forward, len(y_TD), **{k: np.ascontiguousarray(v, np.int32) for k, v in given.items()})

    def gelu_erf(self, x_TF: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.gelu_erf(x_TF), len(x_TF))

    def add(self, x_TD: np.ndarray, y_TD: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.add(x_TD, y_TD), len(x_TD))

    def silu_mul(self, gate_up_T2F: np.ndarray) -> np.ndarray:
        return self._once(lambda ops, batch: ops.silu_mul(gate_up_T2F), len(gate_up_T2F))

    def rope(
        self, qkv_TW: np.ndarray, positions_T: np.ndarray, table_PR: np.ndarray, heads: HeadGeometry
    ) -> np.ndarray:
        positions_T = np.ascontiguousarray(positions_T, np.int32)
        return self._once(
            lambda ops, batch: ops.rope(qkv_TW, batch.positions_T, table_PR, heads),
            len(qkv_TW),
            positions_T=positions_T,
        )

    def write_kv(self, kv: NativeKV, layer: int, qkv_TW: np.ndarray, batch: StepBatch, heads: HeadGeometry) -> None:
        def forward(ops: Recorder, symbols: SymbolicBatch) -> Value:
            ops.write_kv(kv, layer, qkv_TW, symbols, heads)
            return ops.add(qkv_TW, qkv_TW)  # a program has an output

        self._run_once(forward, batch)

    def paged_attention(
        self,
        kv: NativeKV,
        layer: int,
        qkv_TW: np.ndarray,
        batch: StepBatch,
        heads: HeadGeometry,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        causal: bool = True,
    ) -> np.ndarray:
        limits: Any = {"window": window, "soft_cap": soft_cap, "causal": causal}

        def forward(ops: Recorder, symbols: SymbolicBatch) -> Value:
            return ops.paged_attention(kv, layer, qkv_TW, symbols, heads, scale, **limits)

        return self._run_once(forward, batch)

    def gather_rows(self, x_TD: np.ndarray, rows_L: np.ndarray) -> np.ndarray:
        rows_L = np.ascontiguousarray(rows_L, np.int32)
        return self._once(lambda ops, batch: ops.gather_rows(x_TD, batch.logit_rows_L), len(x_TD), logit_rows_L=rows_L)

    def _once(self, forward: Callable[[Any, Any], Value], num_tokens: int, **given: np.ndarray) -> np.ndarray:
        """Run `forward` on a batch of one sequence without KV."""
        zeros = np.zeros(num_tokens, np.int32)
        batch = StepBatch(
            tokens_T=given.get("tokens_T", zeros),
            positions_T=given.get("positions_T", zeros),
            row_starts_S1=np.array([0, num_tokens], np.int32),
            context_lens_S=np.array([num_tokens], np.int32),
            block_tables_SB=np.zeros((1, 1), np.int32),
            logit_rows_L=given.get("logit_rows_L", zeros[:0]),
            adapters_T=given.get("adapters_T"),
        )
        return self._run_once(forward, batch)

    def _run_once(self, forward: Callable[[Any, Any], Value], batch: StepBatch) -> np.ndarray:
        limits = StepLimits(
            max_tokens=len(batch.tokens_T),
            max_seqs=len(batch.context_lens_S),
            max_blocks_per_seq=batch.block_tables_SB.shape[1],
            max_logit_rows=len(batch.logit_rows_L),
        )
        program = self.compile(forward, limits)
        try:
            return program(batch).copy()
        finally:
            self._programs.remove(program)
            program.close()

    def sample(self, logits_LV: np.ndarray, how: SampleBatch) -> np.ndarray:
        num_rows, num_cols = logits_LV.shape
        logits_LV = np.ascontiguousarray(logits_LV, np.float32)
        fields = (
            (how.temperature_L, np.float32),
            (how.top_k_L, np.int32),
            (how.top_p_L, np.float32),
            (how.min_p_L, np.float32),
            (how.seed_L, np.uint64),
            (how.choice_L, np.int32),
            (how.position_L, np.int32),
        )
        arrays = [np.ascontiguousarray(array, dtype) for array, dtype in fields]
        assert all(array.shape == (num_rows,) for array in arrays), [array.shape for array in arrays]
        struct = SamplingStruct(*(array.ctypes.data for array in arrays))
        tokens_L = np.empty(num_rows, np.int32)
        done = self._library.tm_sample(
            self._team,
            logits_LV.ctypes.data,
            num_rows,
            num_cols,
            ctypes.byref(struct),
            tokens_L.ctypes.data,
            self._scratch_for(num_cols),
        )
        check(self._library, done == 0)
        return tokens_L

    def token_logprobs(
        self, logits_LV: np.ndarray, tokens_L: np.ndarray, num_top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        num_rows, num_cols = logits_LV.shape
        logits_LV = np.ascontiguousarray(logits_LV, np.float32)
        tokens_L = np.ascontiguousarray(tokens_L, np.int32)
        assert tokens_L.shape == (num_rows,), tokens_L.shape
        logprobs_L, ranks_L = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
        top_Ln, top_logprobs_Ln = np.empty((num_rows, num_top), np.int32), np.empty((num_rows, num_top), np.float32)
        done = self._library.tm_token_logprobs(
            self._team,
            logits_LV.ctypes.data,
            num_rows,
            num_cols,
            tokens_L.ctypes.data,
            num_top,
            logprobs_L.ctypes.data,
            ranks_L.ctypes.data,
            top_Ln.ctypes.data,
            top_logprobs_Ln.ctypes.data,
            self._scratch_for(num_cols),
        )
        check(self._library, done == 0)
        return logprobs_L, ranks_L, top_Ln, top_logprobs_Ln

    def _scratch_for(self, num_cols: int) -> int:
        needed = self._library.tm_sample_scratch(num_cols) * self.num_threads
        if self._sample_scratch.size < needed:
            self._sample_scratch = aligned_bytes(needed)
        return self._sample_scratch.ctypes.data

    def probe(self, what: str, num_bytes: int = 0, rounds: int = 1) -> float:
        """What all threads reach together, per second: 'read': bytes of memory like that of weights, num_bytes of it
        read over and over; 'int8', 'f32': operations (a multiply-add is two). 0 where the instruction set has none."""
        data = WeightArena().take(num_bytes)
        data[:] = 1
        found = self._library.tm_probe(self._team, PROBES[what], data.ctypes.data, num_bytes, rounds)
        check(self._library, found >= 0)
        return float(found)

    def close(self) -> None:
        for program in self._programs:
            program.close()
        self._programs.clear()
        if self._team_handle is not None:
            self._library.tm_team_free(self._team_handle)
            self._team_handle = None
        self._weights.close()
        self._sample_scratch = np.empty(0, np.uint8)


def _form(kind: int) -> int:
    """How a linear takes the inputs of a part."""
    return F32 if kind < _FIRST_QUANTISED else QUANTISED if kind < _FIRST_INTEGER else WIDE


def _addresses(matrices: Sequence[RawTensor]) -> tuple[Any, Any]:
    pointers = (ctypes.c_void_p * len(matrices))(*(matrix.data.ctypes.data for matrix in matrices))
    counts = (ctypes.c_int64 * len(matrices))(*(matrix.num_rows for matrix in matrices))
    return pointers, counts


def default_num_threads() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def raw_row_bytes(kind: str, num_cols: int) -> int:
    """Bytes of a row as a checkpoint stores it."""
    block = BLOCK_BYTES.get(kind)
    if block is not None:
        assert num_cols % 32 == 0, f"{kind} rows hold whole blocks of 32, got {num_cols} columns"
        return num_cols // 32 * block
    return num_cols * {"f32": 4, "f16": 2, "bf16": 2}[kind]
