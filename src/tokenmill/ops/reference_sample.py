"""What drawing tokens and telling their logprobs mean, in numpy. Part of the reference backend.

L logit rows  V vocabulary
"""

from __future__ import annotations

import numpy as np

from .api import SampleBatch
from .philox import PURPOSE_TOKEN, words_of_ids


def sample(logits_LV: np.ndarray, how: SampleBatch) -> np.ndarray:
    """Rows are independent. With mass = exp((logit - max) / temperature), each filter takes what the one before left:

    top_k  keep the k of the largest mass (ties: lower id first)
    top_p  keep the shortest run of falling mass (ties: lower id first) whose share of what top_k kept reaches top_p; at
           least one token
    min_p  drop what has less than min_p * the largest mass (which is 1)
    draw   the id with the least `exponentials` / mass; ties go to the lower id
    """
    is_finite_L = np.isfinite(logits_LV).all(axis=1)
    tokens_L = np.where(is_finite_L, np.argmax(logits_LV, axis=1), -1).astype(np.int32)
    for row in np.flatnonzero((how.temperature_L > 0) & is_finite_L):
        scaled_V = logits_LV[row].astype(np.float64) / how.temperature_L[row]
        mass_V = np.exp(scaled_V - scaled_V.max())
        _keep_top(mass_V, int(how.top_k_L[row]), float(how.top_p_L[row]))
        mass_V[mass_V < how.min_p_L[row]] = 0
        seed, choice, position = int(how.seed_L[row]), int(how.choice_L[row]), int(how.position_L[row])
        with np.errstate(divide="ignore", over="ignore"):
            times_V = exponentials(seed, choice, position, len(mass_V)) / mass_V
        tokens_L[row] = np.argmin(times_V)
    return tokens_L


def exponentials(seed: int, choice: int, position: int, num_ids: int) -> np.ndarray:
    """Of each id a number that is distributed exponentially: float64 [num_ids]. A race of such numbers, each divided by
    the id's mass, is won by each id with a probability in proportion to its mass."""
    words = words_of_ids(seed, choice, position, PURPOSE_TOKEN, num_ids)
    return -np.log1p(-(words + 0.5) * 2.0**-32)


def token_logprobs(
    logits_LV: np.ndarray, tokens_L: np.ndarray, num_top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A token's rank is 1 + the tokens with a greater logit + those with an equal logit and a lower id."""
    rows_L = np.arange(len(logits_LV))
    tokens_L = np.asarray(tokens_L)
    is_finite_L1 = np.isfinite(logits_LV).all(axis=1, keepdims=True)
    logits_LV = np.where(is_finite_L1, logits_LV, np.float32(0))
    shifted_LV = logits_LV - logits_LV.max(axis=1, keepdims=True)
    log_sum_L1 = np.log(np.exp(shifted_LV).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    logprobs_LV = np.where(is_finite_L1, shifted_LV - log_sum_L1, np.float32(np.nan))
    own_L1 = logits_LV[rows_L, tokens_L][:, None]
    lower_id_LV = np.arange(logits_LV.shape[1]) < tokens_L[:, None]
    rank_L = 1 + ((logits_LV > own_L1) | ((logits_LV == own_L1) & lower_id_LV)).sum(axis=1)
    rank_L[~is_finite_L1[:, 0]] = 0
    top_Ln = np.stack([_best_ids(row_V, num_top) for row_V in logits_LV]) if len(rows_L) else np.zeros((0, num_top))
    top_Ln = top_Ln.astype(np.int32)
    top_logprobs_Ln = np.take_along_axis(logprobs_LV, top_Ln.astype(np.int64), axis=1)
    return logprobs_LV[rows_L, tokens_L], rank_L.astype(np.int32), top_Ln, top_logprobs_Ln


def _keep_top(mass_V: np.ndarray, top_k: int, top_p: float) -> None:
    """Zero, in place, what top_k and then top_p drop."""
    k = top_k if 0 < top_k < len(mass_V) else len(mass_V)
    if k == len(mass_V) and top_p >= 1:
        return
    falling = np.argsort(-mass_V, kind="stable")
    if top_p < 1:
        cumulative = np.cumsum(mass_V[falling[:k]])
        k = 1 + int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left"))
    mass_V[falling[k:]] = 0


def _best_ids(row_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest values, best first, ties to the lower id."""
    if count == 0:
        return np.zeros(0, np.int64)
    smallest_kept = np.partition(row_V, -count)[-count]
    candidates = np.flatnonzero(row_V >= smallest_kept)
    return candidates[np.argsort(-row_V[candidates], kind="stable")][:count]
