"""NativeOps: the kernel interface of ops/api.py on the native kernels. A model is one recorded program, a step one
native call.

T tokens  L logit rows  V vocabulary  K inputs
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.block import KVGroup
from ...core.experts import WeightReads
from ...core.speculation import SpeculationConfig
from ..api import LowRank, Mask, PackedCodes, RawTensor, SampleBatch, StepLimits
from ..drafts import Corpus
from ..draws import COLUMN_DTYPES
from ..forward import ForwardOps
from ..kv_pool import HostPool
from ..weights import DiskWeights
from ..work_queue import ThreadQueue, WorkQueue
from .direct import call_directly
from .drafter import NativeDrafter
from .fuse import fuse
from .library import (
    KV_TYPES,
    PROBES,
    TILE_ISAS,
    KVStruct,
    SamplingStruct,
    check,
    keeping_interpreter,
    load_library,
)
from .memory import WeightArena, aligned_bytes
from .offload import OffloadedWeights, open_offloaded, told_as_config
from .operation import NativeKV, NativeLora, NativeStack, NativeWeight, SymbolicBatch, Value
from .pack import Packer
from .program import NativeProgram
from .queue import NativeQueue
from .record import Recorder


class NativeOps:
    """num_threads  default: the processors this process may use
    isa          one of ISAS or TILE_ISAS (library.py); default: TOKENMILL_ISA, else
                 the fastest that runs here
    fuse         False keeps the recorded operations apart (same bits, slower)
    lossless     matrices of bf16 take 12 bits a value, with the same bits of all results; not
                 for a matrix unit, nor for weights kept on disk
    """

    name = "native"

    def __init__(
        self, num_threads: int | None = None, isa: str | None = None, fuse: bool = True, lossless: bool = False
    ) -> None:
        self.num_threads = num_threads or default_num_threads()
        self._step_threads = self.num_threads  # of steps of many rows
        self.fuse = fuse
        self._lossless = lossless
        self._isa = isa or os.environ.get("TOKENMILL_ISA") or "auto"
        self._library = load_library()
        self._publish = keeping_interpreter("tm_publish")
        self._team_handle: Any = None
        self._programs: list[NativeProgram] = []
        self._drafters: list[NativeDrafter] = []
        self._weights = WeightArena()
        self._sample_scratch = np.empty(0, np.uint8)
        self._offloaded: OffloadedWeights | None = None
        self._is_offloading = False

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
        return "native-tiles-4" if self.isa in TILE_ISAS else "native-i8g32-bf16-5"

    @property
    def kv_dtype(self) -> str:
        """The matrix unit multiplies bf16; elsewhere f16 becomes float32 first, and is the finer type."""
        return "bf16" if self.isa in TILE_ISAS else "f16"

    def describe(self) -> dict[str, str]:
        return {"backend": "native", "instruction set": self.isa, "threads": str(self._step_threads)}

    def progress(self) -> int:
        return int(self._library.tm_team_progress(self._team))

    @property
    def _packer(self) -> Packer:
        return self._packer_of(self._lossless)

    def _packer_of(self, lossless: bool) -> Packer:
        return Packer(self._library, self._team, self._weights, self.isa in TILE_ISAS, lossless)

    def pack(self, parts: Sequence[RawTensor]) -> NativeWeight:
        return self._packer.pack(parts)

    def pack_stack(self, matrices: Sequence[Sequence[RawTensor]]) -> NativeStack:
        return self._packer.pack_stack(matrices)

    def pack_layer(self, make: Callable[[], Sequence[RawTensor]]) -> NativeWeight:
        offloaded = self._offloaded if self._is_offloading else None
        if offloaded is not None and offloaded.keeps_weights:
            return offloaded.weight(self._packer_of(lossless=False), make)
        return self._packer.pack(make())

    def pack_experts(self, make: Callable[[], Sequence[Sequence[RawTensor]]]) -> NativeStack:
        offloaded = self._offloaded if self._is_offloading else None
        if offloaded is not None and offloaded.keeps_experts:
            return offloaded.stack(self._packer_of(lossless=False), make)
        return self._packer.pack_stack(make())

    @contextlib.contextmanager
    def on_disk(self, where: DiskWeights) -> Iterator[None]:
        assert self._offloaded is None, "weights are on disk already"
        self._offloaded = open_offloaded(self._library, where)
        self._is_offloading = True
        try:
            with told_as_config(where):
                yield
                self._offloaded.finish()
        finally:
            self._is_offloading = False
            self._offloaded.give_up()

    @property
    def disk_memory_bytes(self) -> tuple[int, int]:
        return (0, 0) if self._offloaded is None else (self._offloaded.expert_bytes, self._offloaded.weight_bytes)

    def weight_reads(self) -> WeightReads | None:
        return None if self._offloaded is None else self._offloaded.reads()

    def quantise(self, part: RawTensor, kind: str) -> RawTensor:
        return self._packer.quantise(part, kind)

    def recode(
        self, stored: str, data: np.ndarray, kind: str, num_rows: int, num_cols: int, book: np.ndarray | None
    ) -> RawTensor | None:
        return self._packer.recode(stored, data, kind, num_rows, num_cols, book)

    def recode_integers(
        self, kind: str, codes: PackedCodes, scales_NG: np.ndarray, minimums_NG: np.ndarray | None
    ) -> RawTensor | None:
        return self._packer.recode_integers(kind, codes, scales_NG, minimums_NG)

    def lora_table(
        self, num_slots: int, max_rank: int, num_cols: int, widths: Sequence[int], *, by_token: bool = False
    ) -> NativeLora:
        return self._packer.lora_table(num_slots, max_rank, num_cols, widths, by_token=by_token)

    def set_lora(self, table: NativeLora, slot: int, changes: Sequence[LowRank | None]) -> int:
        return self._packer.set_lora(table, slot, changes)

    def vector(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, np.float32)

    def new_pool(self, group: KVGroup, num_blocks: int) -> HostPool:
        return HostPool(group, num_blocks, self.bind_kv)

    def bind_kv(self, pool: np.ndarray, group: KVGroup) -> NativeKV:
        """A handle on a pool's bytes, uint8 [num_blocks, group.bytes_per_block]."""
        assert pool.dtype == np.uint8 and pool.flags.c_contiguous and pool.flags.writeable, pool.dtype
        assert pool.ndim == 2 and pool.shape[1] == group.bytes_per_block, (pool.shape, group.bytes_per_block)
        key_factors = None
        if group.key_exponents:
            exponents = np.array(group.key_exponents)
            key_factors = np.ldexp(np.float32(1), np.stack([-exponents, exponents]))
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
            value_dim=group.value_dim,
            key_factors=None if key_factors is None else key_factors.ctypes.data,
        )
        return NativeKV(struct, pool, group, key_factors)

    def compile(self, forward: Callable[[Any, Any], Any], limits: StepLimits) -> NativeProgram:
        batch = SymbolicBatch()
        recorder = Recorder(batch)
        output = forward(recorder, batch)
        assert isinstance(output, Value), "the forward pass must return a value made by its ops"
        operations = recorder.operations
        if self.fuse:
            operations = fuse(operations, output)
        if self._offloaded is not None:
            self._offloaded.open(operation.weight for operation in operations if operation.weight is not None)
        program = NativeProgram(self._library, self._team, self.num_threads, operations, output, limits)
        if self._offloaded is not None:
            program.on_error = self._offloaded.look
        self._programs.append(program)
        return program

    def drop(self, program: NativeProgram) -> None:
        """Free a program that was compiled here."""
        self._programs.remove(program)
        program.close()

    def open_queue(self, when_idle: Callable[[], bool]) -> WorkQueue:
        if os.name != "posix":  # no event loop can wait for a pipe
            return ThreadQueue(when_idle)
        return NativeQueue(self._library, when_idle)

    if not TYPE_CHECKING:  # not part of a backend

        def __getattr__(self, name: str) -> Any:
            """A function of ops/forward.py, in a program of its own: for tests."""
            if not hasattr(ForwardOps, name):
                raise AttributeError(name)
            return partial(call_directly, self, name)

    def sample(self, logits_LV: np.ndarray, how: SampleBatch) -> np.ndarray:
        num_rows, num_cols = logits_LV.shape
        logits_LV = np.ascontiguousarray(logits_LV, np.float32)
        arrays = [
            None if array is None else np.ascontiguousarray(array, dtype)
            for array, dtype in zip(how.columns(), COLUMN_DTYPES.values(), strict=True)
        ]
        assert all(array is None or array.shape == (num_rows,) for array in arrays), num_rows
        struct = SamplingStruct(*(None if array is None else array.ctypes.data for array in arrays))
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

    def publish(self, mask: Mask, until: int) -> None:
        self._publish(mask.until_at, until)

    def _scratch_for(self, num_cols: int) -> int:
        needed = self._library.tm_sample_scratch(num_cols) * self.num_threads
        if self._sample_scratch.size < needed:
            self._sample_scratch = aligned_bytes(needed)
        return self._sample_scratch.ctypes.data

    def probe(self, what: str, num_bytes: int = 0, rounds: int = 1) -> float:
        """What the threads that do steps of one row reach together, per second: 'read': bytes of memory like that of
        weights, num_bytes of it read over and over; 'int8', 'f32', 'bf16': operations (a multiply-add is two), 0 where
        the instruction set has none; 'phase': phases of a step that are nothing but the way from one to the next."""
        data = WeightArena().take(num_bytes)
        found = self._library.tm_probe(self._team, PROBES[what], data.ctypes.data, num_bytes, rounds)
        check(self._library, found >= 0)
        return float(found)

    def new_drafter(self, config: SpeculationConfig, vocab_size: int, corpora: Sequence[Corpus] = ()) -> NativeDrafter:
        drafter = NativeDrafter(config, vocab_size, corpora)
        self._drafters.append(drafter)
        return drafter

    def seal(self) -> None:
        self._weights.seal()

    def use_threads(self, num_threads: int, places: Sequence[Sequence[int]] = ()) -> None:
        assert not self._programs, "programs hold the threads that they were compiled for"
        assert len(places) in (0, num_threads), (len(places), num_threads)
        if num_threads != self.num_threads:
            self._end_team()
            self.num_threads = self._step_threads = num_threads
        for thread, processors in enumerate(places):
            numbers = np.array(processors, np.int32)
            self._library.tm_team_place(self._team, thread, numbers.ctypes.data, len(numbers))

    def limit_threads(self, limits: Sequence[tuple[int, int]]) -> None:
        pairs = np.array(limits, np.int32).reshape(-1, 2)
        rows, threads = pairs[:, 0].copy(), pairs[:, 1].copy()
        done = self._library.tm_team_limit(self._team, len(pairs), rows.ctypes.data, threads.ctypes.data)
        check(self._library, done == 0)
        self._step_threads = limits[-1][1] if limits else self.num_threads

    def close(self) -> None:
        for program in self._programs:
            program.close()
        self._programs.clear()
        for drafter in self._drafters:
            drafter.close()
        self._drafters.clear()
        if self._offloaded is not None:
            self._offloaded.close()
        self._end_team()
        self._weights.close()
        self._sample_scratch = np.empty(0, np.uint8)

    def _end_team(self) -> None:
        if self._team_handle is not None:
            self._library.tm_team_free(self._team_handle)
            self._team_handle = None


def default_num_threads() -> int:
    """Processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
