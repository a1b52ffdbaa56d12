"""What mixtures of experts are on the native side: the C structs of their operations, and room for inner values.

E experts  F FFN width  D model width
"""

from __future__ import annotations

import numpy as np

from ..api import SIGMOID, SOFTMAX, SOFTMAX_CHOSEN, Experts, Routing
from .library import MoeStruct
from .operation import F32, GELU, QUANTISED, SILU, NativeStack, Value

_SCORES = {SOFTMAX: 0, SOFTMAX_CHOSEN: 1, SIGMOID: 2}
_ACTIVATIONS = {"silu": SILU, "gelu": GELU, "swiglu": 3}


def routing_struct(routing: Routing, bias_E: np.ndarray | None) -> MoeStruct:
    """Of moe_route. The bias must live as long."""
    return MoeStruct(
        num_experts=routing.num_experts,
        top_k=routing.top_k,
        score=_SCORES[routing.score],
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        group_score=routing.group_score,
        normalise=routing.normalise,
        floor=routing.floor,
        scale=routing.scale,
        min_share=routing.min_share,
        bias=_address(bias_E, np.float32, (routing.num_experts,)),
    )


def experts_struct(experts: Experts, top_k: int) -> tuple[MoeStruct, int]:
    """Of moe_ffn, and the number of its activation. The arrays must live as long."""
    num_experts, width, inner = experts.down.num_matrices, experts.down.num_rows, experts.down.num_cols
    assert (experts.gate_up.num_matrices, experts.gate_up.num_rows) == (num_experts, 2 * inner), experts
    struct = MoeStruct(
        num_experts=num_experts,
        top_k=top_k,
        limit=experts.activation.limit,
        alpha=experts.activation.alpha,
        gate_up_bias=_address(experts.gate_up_bias, np.float32, (num_experts, 2 * inner)),
        down_bias=_address(experts.down_bias, np.float32, (num_experts, width)),
        tally=_address(experts.tally, np.int64, (num_experts,)),
    )
    return struct, _ACTIVATIONS[experts.activation.kind]


def inner_values(rows: int, top_k: int, down: NativeStack) -> Value:
    """Room for what `down` takes, of every row and each of its experts. Codes take up to twice as many places, so that
    rows of one expert lie in as few panels as they can."""
    if down.form == F32:
        return Value(rows, top_k * down.num_cols)
    return Value(rows, 2 * top_k * down.num_cols, QUANTISED)


def _address(array: np.ndarray | None, dtype: type[np.generic], shape: tuple[int, ...]) -> int | None:
    if array is None:
        return None
    assert array.dtype == dtype and array.shape == shape and array.flags.c_contiguous, (array.dtype, array.shape, shape)
    return int(array.ctypes.data)
