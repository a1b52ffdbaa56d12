"""Mixtures of experts in numpy: the choice of experts, and stacks of equal matrices.

T tokens  E experts  k experts of a token  K inputs  N outputs  F FFN width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .api import SIGMOID, SOFTMAX, SOFTMAX_CHOSEN, SPARSE_MIXER, Array, ExpertActivation, Experts, RawTensor, Routing
from .forward import ForwardOps
from .reference_weights import ReferenceWeight, pack


@dataclass(frozen=True, slots=True)
class ReferenceStack:
    """Matrices of one shape."""

    matrices: tuple[ReferenceWeight, ...]

    @property
    def num_matrices(self) -> int:
        return len(self.matrices)

    @property
    def num_rows(self) -> int:
        return self.matrices[0].num_rows

    @property
    def num_cols(self) -> int:
        return self.matrices[0].num_cols

    @property
    def num_bytes(self) -> int:
        return sum(matrix.num_bytes for matrix in self.matrices)


def pack_stack(matrices: Sequence[Sequence[RawTensor]]) -> ReferenceStack:
    """See Ops.pack_stack."""
    shapes = {tuple((part.kind, part.num_rows, part.num_cols) for part in parts) for parts in matrices}
    assert len(shapes) == 1, f"matrices of a stack differ: {shapes}"
    assert all(part.order is None for parts in matrices for part in parts), "a stack has no order of columns"
    return ReferenceStack(tuple(pack(parts) for parts in matrices))


def route(
    logits_TE: np.ndarray, routing: Routing, bias_E: np.ndarray | None, scales_E: np.ndarray | None
) -> np.ndarray:
    """See ForwardOps.moe_route."""
    out_T2k = np.empty((len(logits_TE), 2 * routing.top_k), np.float32)
    for row, logits_E in enumerate(logits_TE):
        out_T2k[row] = _route_row(logits_E, routing, bias_E, scales_E)
    return out_T2k


def _route_row(
    logits_E: np.ndarray, routing: Routing, bias_E: np.ndarray | None, scales_E: np.ndarray | None
) -> np.ndarray:
    k = routing.top_k
    if not np.isfinite(logits_E).all():
        return np.concatenate([np.arange(k), np.full(k, np.nan)]).astype(np.float32)
    if routing.score == SPARSE_MIXER:
        assert bias_E is None, "a sparse mixer has no bias"
        chosen, weights = _mix_sparsely(logits_E, routing)
    else:
        scores_E = _scores(logits_E, routing.score)
        chosen = _choose(scores_E if bias_E is None else scores_E + bias_E, routing)
        weights = _softmax(scores_E[chosen]) if routing.score == SOFTMAX_CHOSEN else scores_E[chosen]
    stays = weights >= np.float32(routing.min_share) * weights.max()
    chosen, weights = chosen[stays], weights[stays]
    if routing.normalise:
        weights = weights / (weights.sum() + np.float32(routing.floor))
    out_2k = np.zeros(2 * k, np.float32)
    out_2k[:k] = -1
    out_2k[: len(chosen)] = chosen
    weights = weights * np.float32(routing.scale)
    out_2k[k : k + len(chosen)] = weights if scales_E is None else weights * scales_E[chosen]
    return out_2k


def _mix_sparsely(logits_E: np.ndarray, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """-> (ids, ascending, weights). See Routing."""
    weights: dict[int, np.float32] = {}
    for _ in range(routing.top_k):
        free = np.array([e for e in range(len(logits_E)) if e not in weights])
        best = free[logits_E[free].argmax()]
        with np.errstate(invalid="ignore"):  # where all are 0, none is far from another
            off = (logits_E[best] - logits_E[free]) / np.maximum(np.abs(logits_E[free]), logits_E[best])
        near = free[~(off > np.float32(routing.margin))]
        weights[int(best)] = _softmax(logits_E[near])[near == best][0]
    chosen = np.array(sorted(weights))
    return chosen, np.array([weights[e] for e in chosen.tolist()], np.float32)


def _scores(logits_E: np.ndarray, score: str) -> np.ndarray:
    if score == SOFTMAX:
        return _softmax(logits_E)
    if score == SIGMOID:
        with np.errstate(over="ignore"):  # exp may be inf, whose reciprocal is the right 0
            return np.float32(1) / (np.float32(1) + np.exp(-logits_E))
    return logits_E


def _choose(choice_E: np.ndarray, routing: Routing) -> np.ndarray:
    """Ids, ascending."""
    allowed, size = np.arange(len(choice_E)), len(choice_E) // routing.num_groups
    if routing.num_groups > 1:
        groups_gE = choice_E.reshape(routing.num_groups, -1)
        best_gn = -np.sort(-groups_gE, axis=1)[:, : routing.group_score]
        kept = np.argsort(-best_gn.sum(axis=1), kind="stable")[: routing.top_groups]
        allowed = np.concatenate([np.arange(g * size, (g + 1) * size) for g in np.sort(kept)])
    best = np.argsort(-choice_E[allowed], kind="stable")[: routing.top_k]
    return np.sort(allowed[best])


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def ffn(ops: ForwardOps, x_TD: np.ndarray, routes_T2k: np.ndarray, experts: Experts) -> np.ndarray:
    """See ForwardOps.moe_ffn."""
    ids_Tk, weights_Tk = np.split(routes_T2k, 2, axis=1)
    gate_up, down = experts.gate_up, experts.down
    assert isinstance(gate_up, ReferenceStack) and isinstance(down, ReferenceStack), (gate_up, down)
    out_TD = np.zeros((len(x_TD), down.num_rows), np.float32)
    for e in np.unique(ids_Tk[ids_Tk >= 0]).astype(int).tolist():
        rows, places = np.nonzero(ids_Tk == e)
        gate_up_T2F = ops.linear(x_TD[rows], gate_up.matrices[e])
        if experts.gate_up_bias is not None:
            gate_up_T2F = gate_up_T2F + experts.gate_up_bias[e]
        y_TD = ops.linear(_activated(ops, gate_up_T2F, experts.activation), down.matrices[e])
        if experts.down_bias is not None:
            y_TD = y_TD + experts.down_bias[e]
        out_TD[rows] += weights_Tk[rows, places, None] * y_TD
        if experts.tally is not None:
            experts.tally[e] += len(rows)
    return out_TD


def _activated(ops: ForwardOps, gate_up_T2F: np.ndarray, how: ExpertActivation) -> Array:
    """See ExpertActivation."""
    if how.kind == "relu2":
        return ops.relu2(gate_up_T2F)
    if how.kind != "swiglu":
        return ops.gelu_mul(gate_up_T2F) if how.kind == "gelu" else ops.silu_mul(gate_up_T2F)
    limit = np.float32(how.limit)
    gate_TF, up_TF = np.split(gate_up_T2F, 2, axis=1)
    gate_TF, up_TF = np.minimum(gate_TF, limit), np.clip(up_TF, -limit, limit)
    with np.errstate(over="ignore"):  # exp may be inf, whose reciprocal is the right 0
        return gate_TF / (1 + np.exp(-np.float32(how.alpha) * gate_TF)) * (up_TF + 1)
