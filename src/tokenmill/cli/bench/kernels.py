"""`bench kernels`: every operation of a model on its own, on the model's own weights and shapes.

The same operation of all layers is one program, so that weights and KV come from as far away as in a real step, and
the interpreter's own clock gives the time of the operation alone.

    T rows  K inputs  N outputs
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...bench.kernels import Case, run
from ...core.errors import ConfigError
from ...core.units import GiB
from ...formats.checkpoint import open_checkpoint
from ...models.loader import Model, load_model
from ...node.load import describe_kernels
from ...node.machine import read_machine
from ...node.options import KV_CACHE_DTYPES
from ...ops.api import BLOCK_BYTES, GROUP, RawTensor, SampleBatch, StepBatch, StepLimits
from ...ops.native import NativeOps
from ...ops.native.operation import QUANTISED, Operation
from ...ops.select import select_ops
from ..models import resolve_model


def open_native(args: argparse.Namespace, what_for: str) -> tuple[Path, NativeOps]:
    """The path of `args.model`, fetched if need be, and the kernels, which the caller closes. Raises ConfigError, with
    `what_for` ("bench kernels measures"), where another backend is asked for or they cannot run."""
    path = resolve_model(args.model).path
    ops = select_ops(args.backend, args.threads or read_machine().usable_cores)
    if not isinstance(ops, NativeOps):
        raise ConfigError(f"{what_for} the native kernels, which are not to be had here.", param="backend")
    return path, ops


ROWS = (1, 4, 16, 32, 128, 512)
HEAD_ROWS = (1, 4, 16, 32)
NORM_ROWS = (1, 32, 512)
DECODES = ((1, 256), (1, 1024), (1, 8192), (4, 1024), (16, 256), (16, 1024), (32, 256))
"""(sequences, context) of one decode step."""

PREFILLS = ((512, 512), (512, 2048), (512, 8192))
"""(rows, context) of one chunk of a prompt: the rows are its last positions."""

MOST_KV_BYTES = 2 * GiB
BLOCK_SIZE = 16
QUANTISED_BITS = 9
"""Weights of fewer bits a value are multiplied as int8, others as float32."""


def kernels(args: argparse.Namespace) -> int:
    with opened(args, "bench kernels measures") as (ops, model, facts):
        return run(args, _cases(ops, model), ops, facts)


@contextmanager
def opened(args: argparse.Namespace, what_for: str) -> Iterator[tuple[NativeOps, Model, dict[str, str]]]:
    """As open_native, with the model, and what both are."""
    path, ops = open_native(args, what_for)
    checkpoint = open_checkpoint(path)
    try:
        kv_dtype = ops.kv_dtype if args.kv_cache_dtype == "auto" else KV_CACHE_DTYPES[args.kv_cache_dtype]
        model = load_model(checkpoint, ops, block_size=BLOCK_SIZE, kv_dtype=kv_dtype)
        yield ops, model, {"model": path.name, "kernels": describe_kernels(ops)}
    finally:
        ops.close()
        checkpoint.close()


def _cases(ops: NativeOps, model: Model) -> Iterator[Case]:
    yield from _linears(ops, model)
    if model.config.latent is None:
        yield from _attention(ops, model)
    yield from _row_operations(ops, model)
    yield from _sampling(ops, model)


class _Once:
    """The operation of interest, on every layer, as one program. Run for any number of rows up to max_tokens."""

    def __init__(
        self,
        ops: NativeOps,
        forward: Callable[[Any, Any], Any],
        is_wanted: Callable[[Operation], bool],
        limits: StepLimits,
    ) -> None:
        self._program = ops.compile(forward, limits)
        self._wanted = [is_wanted(operation) for operation in self._program.operations]
        self._times_ns = np.zeros(len(self._wanted) + 1, np.int64)
        self._program.time_operations(self._times_ns)
        assert any(self._wanted), [operation.kind for operation in self._program.operations]

    def run(self, batch: StepBatch) -> float:
        """Seconds of the operations of interest."""
        self._times_ns[:] = 0
        self._program(batch)
        return float(self._times_ns[:-1][self._wanted].sum()) / 1e9

    def close(self) -> None:
        self._program.close()


def _linears(ops: NativeOps, model: Model) -> Iterator[Case]:
    layers = model.weights.layers
    for name in ("qkv", "output", "mixer_in", "mixer_out", "gate_up", "down"):
        linears = [getattr(layer, name) for layer in layers]
        weights = [linear.weight for linear in linears if linear is not None]
        shapes = dict.fromkeys((weight.num_rows, weight.num_cols) for weight in weights)
        for shape in shapes:  # a dense layer's FFN may be wider than shared experts
            equal = [weight for weight in weights if (weight.num_rows, weight.num_cols) == shape]
            is_gated = name == "gate_up" and model.config.family.gated
            yield from _linear(ops, f"linear {name}", equal, ROWS, is_gated)
    yield from _linear(ops, "linear lm_head", [model.weights.head], HEAD_ROWS, False)


def _linear(
    ops: NativeOps, name: str, weights: Sequence[Any], row_counts: Sequence[int], is_gated: bool
) -> Iterator[Case]:
    first = weights[0]
    x_TK = np.random.default_rng(0).standard_normal((max(row_counts), first.num_cols), np.float32)

    def forward(recorder: Any, batch: Any) -> Any:
        for weight in weights:
            out = recorder.linear(x_TK, weight)
            if is_gated:
                out = recorder.silu_mul(out)
                # A quantised linear follows, so that the gate writes codes as it does in a model.
                out = recorder.linear(out, narrow) if narrow is not None else out
        return out

    narrow = _narrow(ops, first.num_rows // 2) if is_gated and first.form == QUANTISED else None
    own = {id(weight) for weight in weights}
    once = _Once(ops, forward, lambda found: id(found.weight) in own or found.kind == "gated", _limits(max(row_counts)))
    num_values = first.num_rows * first.num_cols
    num_bytes = sum(weight.num_bytes for weight in weights) // len(weights)
    unit = "int8" if 8 * num_bytes < QUANTISED_BITS * num_values else "f32"
    for rows in row_counts:
        batch = make_batch([(rows, rows)], np.zeros((1, 1), np.int32))
        yield Case(
            operation=name,
            shape=f"N={first.num_rows} K={first.num_cols}",
            rows=rows,
            num_copies=len(weights),
            num_bytes=num_bytes,
            num_ops=2 * rows * num_values,
            unit=unit,
            run=partial(once.run, batch),
        )
    once.close()


def _narrow(ops: NativeOps, num_cols: int) -> Any:
    """A quantised weight of one row: it makes its input wanted as codes."""
    data = np.zeros(num_cols // GROUP * BLOCK_BYTES["q8_0"], np.uint8)
    return ops.pack([RawTensor("q8_0", 1, num_cols, data)])


def _attention(ops: NativeOps, model: Model) -> Iterator[Case]:
    group, config = model.kv_groups[0], model.config
    heads = config.heads
    unit = "bf16" if group.dtype == "bf16" and ops.probe("bf16") else "f32"
    decodes = [("attention decode", [(1, context)] * count) for count, context in DECODES]
    prefills = [("attention prefill", [(rows, context)]) for rows, context in PREFILLS]
    shapes = [
        (name, sequences)
        for name, sequences in decodes + prefills
        if sum(context for _, context in sequences) * group.bytes_per_token <= MOST_KV_BYTES
        and max(context for _, context in sequences) <= config.max_context
    ]
    num_blocks = max(sum(context // BLOCK_SIZE for _, context in sequences) for _, sequences in shapes)
    pool = ops.new_pool(group, num_blocks)
    pool.data[:] = np.random.default_rng(1).integers(0, 60, pool.data.shape[1], np.uint8)  # small numbers in any dtype
    max_rows = max(sum(rows for rows, _ in sequences) for _, sequences in shapes)
    qkv_TW = np.random.default_rng(2).standard_normal((max_rows, heads.width), np.float32)

    def forward(recorder: Any, batch: Any) -> Any:
        for index in range(group.num_layers):
            out = recorder.paged_attention(pool.kv, index, qkv_TW, batch, heads, config.attention_scale)
        return out

    widest = max(max(context for _, context in sequences) for _, sequences in shapes) // BLOCK_SIZE
    limits = StepLimits(max_rows, max(len(sequences) for _, sequences in shapes), widest, 1)
    once = _Once(ops, forward, partial(_has_kind, "attention"), limits)
    for name, sequences in shapes:
        counts = [context // BLOCK_SIZE for _, context in sequences]
        ids = np.random.default_rng(3).permutation(num_blocks)[: sum(counts)].astype(np.int32)
        batch = make_batch(sequences, tables_of(ids, counts))
        seen = sum(rows * context - rows * (rows - 1) // 2 for rows, context in sequences)
        yield Case(
            operation=name,
            shape=f"H={heads.num_heads} G={heads.num_kv_heads} C={heads.head_dim} context={sequences[0][1]}",
            rows=len(batch.tokens_T),
            num_copies=group.num_layers,
            num_bytes=sum(counts) * group.bytes_per_block // group.num_layers,
            num_ops=4 * seen * heads.num_heads * heads.head_dim,
            unit=unit,
            run=partial(once.run, batch),
        )
    once.close()
    pool.close()


def _row_operations(ops: NativeOps, model: Model) -> Iterator[Case]:
    config = model.config
    num_layers, heads = config.num_layers, config.heads
    norm = model.weights.layers[0].ffn_norm
    rope_PR = next((rope.turns_PR for rope in model.ropes if rope is not None), None)
    rng = np.random.default_rng(4)
    x_TD = rng.standard_normal((max(NORM_ROWS), config.width), np.float32)
    qkv_TW = rng.standard_normal((max(NORM_ROWS), heads.width), np.float32)

    def norms(recorder: Any, batch: Any) -> Any:
        assert norm is not None
        for _ in range(num_layers):
            out = recorder.rms_norm(x_TD, norm.weight, config.norm_eps)
        return out

    def ropes(recorder: Any, batch: Any) -> Any:
        for _ in range(num_layers):
            out = recorder.rope(qkv_TW, batch.positions_T, rope_PR, heads)
        return out

    wanted: list[tuple[str, str, int, Callable[[Any, Any], Any]]] = []
    if norm is not None and norm.bias is None:
        wanted.append(("norm", "rms_norm", config.width, norms))
    if rope_PR is not None:
        wanted.append(("rope", "rope", heads.width, ropes))
    for name, kind, width, forward in wanted:
        once = _Once(ops, forward, partial(_has_kind, kind), _limits(max(NORM_ROWS)))
        for rows in NORM_ROWS:
            batch = make_batch([(rows, rows)], np.zeros((1, 1), np.int32))
            yield Case(
                operation=name,
                shape=f"D={width}",
                rows=rows,
                num_copies=num_layers,
                num_bytes=2 * rows * width * 4,
                working_set=2 * rows * width * 4,  # all layers use the same rows
                num_ops=4 * rows * width,
                unit="f32",
                run=partial(once.run, batch),
            )
        once.close()


def _sampling(ops: NativeOps, model: Model) -> Iterator[Case]:
    vocab_size = model.config.vocab_size
    logits_LV = np.random.default_rng(5).normal(0, 3, (max(HEAD_ROWS), vocab_size)).astype(np.float32)
    for name, temperature, top_p in (("greedy", 0.0, 1.0), ("temperature 0.8", 0.8, 1.0), ("top_p 0.95", 0.8, 0.95)):
        for rows in HEAD_ROWS:
            how = SampleBatch(
                temperature_L=np.full(rows, temperature, np.float32),
                top_k_L=np.zeros(rows, np.int32),
                top_p_L=np.full(rows, top_p, np.float32),
                min_p_L=np.zeros(rows, np.float32),
                seed_L=np.arange(rows, dtype=np.uint64),
                choice_L=np.zeros(rows, np.int32),
                position_L=np.zeros(rows, np.int32),
            )

            def draw(rows: int = rows, how: SampleBatch = how) -> float:
                start_s = time.perf_counter()
                ops.sample(logits_LV[:rows], how)
                return time.perf_counter() - start_s

            yield Case(
                f"sample {name}", f"V={vocab_size}", rows, 1, rows * vocab_size * 4, rows * vocab_size, "f32", draw
            )


def _has_kind(kind: str, operation: Operation) -> bool:
    return operation.kind == kind


def _limits(max_tokens: int) -> StepLimits:
    return StepLimits(max_tokens=max_tokens, max_seqs=1, max_blocks_per_seq=1, max_logit_rows=1)


def tables_of(ids: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """A block table for each of `counts`, of the next so many ids, int32; zeros behind them."""
    tables_SB = np.zeros((len(counts), max(counts)), np.int32)
    for table, own in zip(tables_SB, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        table[: len(own)] = own
    return tables_SB


def make_batch(
    sequences: Sequence[tuple[int, int]], tables_SB: np.ndarray, logit_rows_L: np.ndarray | None = None
) -> StepBatch:
    """The last `rows` positions of each (rows, context) sequence. logit_rows_L: default, the first."""
    counts = [rows for rows, _ in sequences]
    positions = [np.arange(context - rows, context, dtype=np.int32) for rows, context in sequences]
    return StepBatch(
        tokens_T=np.zeros(sum(counts), np.int32),
        positions_T=np.concatenate(positions),
        row_starts_S1=np.cumsum([0, *counts]).astype(np.int32),
        context_lens_S=np.array([context for _, context in sequences], np.int32),
        block_tables_SB=tables_SB,
        logit_rows_L=np.zeros(1, np.int32) if logit_rows_L is None else logit_rows_L,
    )
