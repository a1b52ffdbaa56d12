"""Cases of operations on columns and on stacks of matrices, for the table of test_ops_conformance.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ops_cases import KINDS, activations, raw_tensor, whole_blocks

from tokenmill.ops.api import RawTensor
from tokenmill.ops.reference_weights import DENSE_KINDS

Run = Callable[[Any], np.ndarray]


def raw_stack(
    rng: np.random.Generator, kind: str, num_matrices: int, num_rows: int, num_cols: int
) -> list[list[RawTensor]]:
    """What pack_stack takes."""
    return [[raw_tensor(rng, kind, num_rows, num_cols)] for _ in range(num_matrices)]


def column_cases() -> Iterator[tuple[str, Run]]:
    """By name; values are equal, or those of gate_rows rounded a few times."""

    def run_columns(ops: Any) -> np.ndarray:
        return ops.columns(activations(np.random.default_rng(1), 9, 50), 7, 33)

    def run_join(ops: Any) -> np.ndarray:
        rng = np.random.default_rng(2)
        return ops.join_columns([activations(rng, 9, width) for width in (3, 17, 1, 20, 2, 5)])

    def run_gate(ops: Any) -> np.ndarray:
        rng = np.random.default_rng(3)
        return ops.gate_rows(activations(rng, 9, 45), rng.normal(0, 8, (9, 1)).astype(np.float32))

    yield "columns [7, 40) of 50", run_columns
    yield "join_columns of six", run_join
    yield "gate_rows D=45", run_gate


def linear_heads_cases() -> Iterator[tuple[str, Run]]:
    for kind in KINDS:
        for heads, num_rows, num_cols, num_tokens in ((3, 40, 64, 1), (2, 17, 96, 14), (4, 33, 32, 101)):
            num_cols = 45 if kind in DENSE_KINDS and num_tokens == 14 else whole_blocks(kind, num_cols)

            def run(ops: Any, kind=kind, shape=(heads, num_rows, num_cols), num_tokens=num_tokens) -> np.ndarray:
                rng = np.random.default_rng(num_tokens)
                stack = ops.pack_stack(raw_stack(rng, kind, *shape))
                assert (stack.num_matrices, stack.num_rows, stack.num_cols) == shape
                x = activations(rng, num_tokens, shape[0] * shape[2])
                return ops.linear_heads(x, stack) / np.abs(x).max(axis=1, keepdims=True)

            yield f"linear_heads {kind} {heads} of {num_rows}x{num_cols} T={num_tokens}", run
