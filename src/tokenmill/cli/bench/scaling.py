"""`bench scaling`: the units of a model's steps, cut for up to 64 threads and timed one after the other on one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from ...bench import machine
from ...bench.scaling import COUNTS, Phase, show
from ...models.loader import Model
from ...ops.api import StepBatch, StepLimits
from ...ops.native import NativeOps
from ...ops.native.program import NativeProgram
from .kernels import BLOCK_SIZE, make_batch, opened, tables_of
from .profile import operation_names

STEPS = {
    "decode, 1 row behind 512": [(1, 512)],
    "decode, 16 rows behind 512": [(1, 512)] * 16,
    "prefill, 512 rows": [(512, 512)],
}
"""(rows, context) of each sequence."""

REPEATS = 3
"""Of each unit the shortest time counts."""


def scaling(args: argparse.Namespace) -> int:
    with opened(args, "bench scaling cuts steps as") as (ops, model, facts):
        return show(args, _measure(ops, model), facts | {"commit": machine.commit() or "not a checkout"})


def _measure(ops: NativeOps, model: Model) -> dict[str, dict[int, list[Phase]]]:
    num_blocks = max(sum(-(-context // BLOCK_SIZE) for _, context in step) for step in STEPS.values())
    most_blocks = max(-(-context // BLOCK_SIZE) for step in STEPS.values() for _, context in step)
    pools = [ops.new_pool(group, num_blocks) for group in model.kv_groups]
    limits = StepLimits(
        max(sum(rows for rows, _ in step) for step in STEPS.values()), max(map(len, STEPS.values())), most_blocks, 16
    )
    kvs = tuple(pool.kv for pool in pools)
    program = ops.compile(lambda recorder, batch: model.forward(recorder, kvs, batch), limits)
    names = operation_names(program, model)
    try:
        return {
            step: {count: list(_phases(program, names, _batch(sequences, len(pools)), count)) for count in COUNTS}
            for step, sequences in STEPS.items()
        }
    finally:
        ops.drop(program)
        for pool in pools:
            pool.close()


def _batch(sequences: Sequence[tuple[int, int]], num_tables: int) -> StepBatch:
    counts = [-(-context // BLOCK_SIZE) for _, context in sequences]
    tables_SB = tables_of(np.arange(sum(counts), dtype=np.int32), counts)
    ends = np.cumsum([rows for rows, _ in sequences]).astype(np.int32)
    return make_batch(sequences, np.concatenate([tables_SB] * num_tables), ends - 1)


def _phases(program: NativeProgram, names: Sequence[str], batch: StepBatch, num_threads: int) -> Iterator[Phase]:
    """With one thread, each operation is a phase of one unit. The least that ever lies between two units is what
    reading the clock takes, and is taken off."""
    program(batch)  # writes the KV that the step sees, and warms up
    runs = [program.record_units(batch, num_threads) for _ in range(REPEATS)]
    units = runs[0]
    took_ns = np.min([run["ended_ns"] - run["began_ns"] for run in runs], 0)
    gaps_ns = np.min([np.diff(run["began_ns"], prepend=run["began_ns"][0]) - _shifted(run) for run in runs], 0)
    clock_ns = gaps_ns[1:].min(initial=took_ns.min())
    took_s, gaps_s = np.maximum(took_ns - clock_ns, 0) / 1e9, (gaps_ns - clock_ns) / 1e9
    before_s, at = 0.0, 0
    while at < len(units):
        phase, place = int(units[at]["phase"]), int(units[at]["place"])
        end = at + 1
        while end < len(units) and units[end]["phase"] == phase >= 0:
            end += 1
        before_s += max(0.0, float(gaps_s[at]))
        if phase < 0 and num_threads > 1:
            before_s += float(took_s[at])
        else:
            weight = program.operations[place].weight if place < len(program.operations) else None
            yield Phase(names[place], before_s, took_s[at:end].tolist(), 0 if weight is None else weight.num_bytes)
            before_s = 0.0
        at = end


def _shifted(units: np.ndarray) -> np.ndarray:
    """Nanoseconds of the unit before each, 0 of the first."""
    took_ns: np.ndarray = units["ended_ns"] - units["began_ns"]
    return np.concatenate([took_ns[:1] * 0, took_ns[:-1]])
