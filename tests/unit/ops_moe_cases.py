"""Cases of mixtures of experts, for the table of test_ops_conformance.py and the tests of test_native_moe.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ops_cases import KINDS, activations, whole_blocks
from ops_stack_cases import raw_stack

from tokenmill.ops.api import SIGMOID, SOFTMAX, SOFTMAX_CHOSEN, SPARSE_MIXER, ExpertActivation, Experts, Routing

Run = Callable[[Any], np.ndarray]

ROUTINGS = {
    "softmax": Routing(64, 8, SOFTMAX),
    "softmax as it is": Routing(60, 4, SOFTMAX, normalise=False, scale=16.0),
    "softmax of the chosen": Routing(8, 2, SOFTMAX_CHOSEN, normalise=False),
    "sigmoid": Routing(128, 8, SIGMOID, floor=1e-20, scale=2.5),
    "best groups": Routing(160, 6, SOFTMAX, num_groups=8, top_groups=3, normalise=False, scale=16.0),
    "two best of groups": Routing(64, 8, SIGMOID, num_groups=8, top_groups=4, group_score=2, floor=1e-20),
    "every expert a group": Routing(7, 2, SIGMOID, num_groups=7, top_groups=3, group_score=2),
    "adaptive": Routing(64, 8, SOFTMAX, min_share=0.4),
    "sparse mixer": Routing(16, 2, SPARSE_MIXER, normalise=False, margin=0.4),
    "all": Routing(5, 5, SOFTMAX),
}

SWIGLU = ExpertActivation("swiglu", limit=7.0, alpha=1.702)
SILU = ExpertActivation()


def route_cases() -> Iterator[tuple[str, Run]]:
    for name, routing in ROUTINGS.items():

        def run(ops: Any, routing=routing) -> np.ndarray:
            rng = np.random.default_rng(routing.num_experts)
            logits = rng.normal(0, 3, (33, routing.num_experts)).astype(np.float32)
            logits[5] = logits[5, 0]  # all equal: the lowest ids
            logits[6, 1::2] = logits[6, ::2][: len(logits[6, 1::2])]  # pairs of equal ones
            bias = ops.vector(rng.choice([0.0, 0.5, 0.05], routing.num_experts)) if routing.score == SIGMOID else None
            scales = ops.vector(rng.uniform(-2, 2, routing.num_experts)) if routing.min_share else None
            return ops.moe_route(logits, routing, bias, scales)

        yield f"moe_route {name}", run


def experts_of(
    ops: Any,
    rng: np.random.Generator,
    kinds: tuple[str, str],
    shape: tuple[int, int, int],
    activation: ExpertActivation = SILU,
    biased: bool = False,
    tally: np.ndarray | None = None,
) -> Experts:
    """kinds: of gate and up, and of down. shape: experts, width, inner width."""
    count, width, inner = shape
    biases = (rng.standard_normal((count, 2 * inner)), rng.standard_normal((count, width)))
    return Experts(
        ops.pack_stack(raw_stack(rng, kinds[0], count, 2 * inner, width)),
        ops.pack_stack(raw_stack(rng, kinds[1], count, width, inner)),
        activation,
        *(ops.vector(bias) if biased else None for bias in biases),
        tally=tally,
    )


def routes_of(rng: np.random.Generator, num_rows: int, num_experts: int, top_k: int) -> np.ndarray:
    """Of few experts to some rows, and of none to one in ten."""
    routes = np.zeros((num_rows, 2 * top_k), np.float32)
    for row in routes:
        count = 0 if rng.random() < 0.1 else rng.integers(1, top_k + 1)
        row[:top_k] = -1
        row[:count] = np.sort(rng.choice(num_experts, count, replace=False))
        row[top_k : top_k + count] = rng.uniform(0, 1, count)
    return routes


def ffn_cases() -> Iterator[tuple[str, Run]]:
    options: list[tuple[tuple[str, str], tuple[int, int, int], int, int, ExpertActivation, bool]] = [
        ((kind, kind), (6, whole_blocks(kind, 64), whole_blocks(kind, 96)), 3, num_rows, SILU, False)
        for kind in KINDS
        for num_rows in (1, 27)
    ]
    options += [
        (("q4_0", "q4_0"), (3, 96, 64), 2, 190, SWIGLU, True),
        (("bf16", "bf16"), (3, 40, 72), 2, 190, SWIGLU, True),
        (("q8_h", "q5_0"), (5, 64, 32), 2, 20, ExpertActivation("gelu"), True),
        (("q4_0", "f16"), (5, 64, 72), 5, 20, SILU, True),
        (("f32", "q8_0"), (5, 45, 64), 2, 150, SILU, True),
        (("f32", "f32"), (4, 33, 7), 1, 20, ExpertActivation("gelu"), False),
    ]
    for kinds, shape, top_k, num_rows, activation, biased in options:

        def run(ops: Any, given=(kinds, shape, activation, biased), top_k=top_k, num_rows=num_rows) -> np.ndarray:
            rng = np.random.default_rng(num_rows)
            experts = experts_of(ops, rng, *given)
            x = rng.standard_normal((num_rows, given[1][1])).astype(np.float32)
            if num_rows == 27:
                x = activations(rng, num_rows, given[1][1]) / 100
            return ops.moe_ffn(x, routes_of(rng, num_rows, given[1][0], top_k), experts)

        what = f"{'/'.join(kinds)} E={shape[0]} D={shape[1]} F={shape[2]} k={top_k} T={num_rows} {activation.kind}"
        yield f"moe_ffn {what}", run
