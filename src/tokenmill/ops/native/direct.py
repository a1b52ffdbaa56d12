"""A function of the kernel interface called by itself: recorded as a program of its own, and run once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from ..api import StepBatch, StepLimits
from .operation import SymbolicBatch, Value
from .record import Recorder

_OF_THE_STEP = {
    "tokens_T": "tokens_T",
    "positions_T": "positions_T",
    "rows_L": "logit_rows_L",
    "adapters_T": "adapters_T",
}
"""Parameters that are arrays of the step's, and the batch's name for each."""

_WRITTEN_FROM = ("qkv_TW", "c_TX", "x_TW")
"""Parameters of functions that give nothing."""

_WRITTEN_INTO = ("y_TN", "y_TD")
"""Parameters that must be values of the program."""


def call_directly(ops: Any, name: str, *args: Any, **kwargs: Any) -> np.ndarray:
    """The function `name` of ForwardOps on arrays, by a NativeOps. Arguments that are no KV batch make up a step of one
    sequence without KV."""
    given = dict(inspect.signature(getattr(Recorder, name)).bind(None, *args, **kwargs).arguments)
    del given["self"]
    of_step = {
        field: np.ascontiguousarray(given.pop(parameter), np.int32)
        for parameter, field in _OF_THE_STEP.items()
        if parameter in given
    }
    batch = given.pop("batch", None)
    has_batch = batch is not None
    if not has_batch:
        rows = [value for value in (*given.values(), *given.get("parts", ())) if isinstance(value, np.ndarray)]
        batch = batch_of(len(of_step["tokens_T"] if "tokens_T" in of_step else rows[0]), **of_step)

    def forward(recorder: Recorder, symbols: SymbolicBatch) -> Value:
        arguments = dict(given)
        for parameter in _WRITTEN_INTO:
            if parameter in arguments:
                arguments[parameter] = recorder.scale(arguments[parameter], 1.0)
        arguments |= {
            parameter: getattr(symbols, field) for parameter, field in _OF_THE_STEP.items() if field in of_step
        }
        if has_batch:
            arguments["batch"] = symbols
        made = getattr(recorder, name)(**arguments)
        if made is None:  # a program has an output
            made = next(given[parameter] for parameter in _WRITTEN_FROM if parameter in given)
        return made if isinstance(made, Value) and made.array is None else recorder.scale(made, 1.0)

    return run_forward(ops, forward, batch)


def run_forward(ops: Any, forward: Callable[[Any, Any], Value], batch: StepBatch) -> np.ndarray:
    """Compile a forward pass for one batch, and run it."""
    limits = StepLimits(
        max_tokens=len(batch.tokens_T),
        max_seqs=len(batch.context_lens_S),
        max_blocks_per_seq=batch.block_tables_SB.shape[1],
        max_logit_rows=len(batch.logit_rows_L),
    )
    program = ops.compile(forward, limits)
    try:
        return np.array(program(batch))
    finally:
        ops.drop(program)


def batch_of(num_tokens: int, **arrays: np.ndarray) -> StepBatch:
    """A step of one sequence without KV."""
    zeros = np.zeros(num_tokens, np.int32)
    return StepBatch(
        tokens_T=arrays.get("tokens_T", zeros),
        positions_T=arrays.get("positions_T", zeros),
        row_starts_S1=np.array([0, num_tokens], np.int32),
        context_lens_S=np.array([num_tokens], np.int32),
        block_tables_SB=np.zeros((1, 1), np.int32),
        logit_rows_L=arrays.get("logit_rows_L", zeros[:0]),
        adapters_T=arrays.get("adapters_T"),
    )
