"""What drawing tokens and telling their logprobs mean, in numpy. Part of the reference backend.

L logit rows  V vocabulary
"""

from __future__ import annotations

import numpy as np

from .draws import MASK_LATE, NEVER, NOT_FINITE, Draws, SampleBatch
from .philox import PURPOSE_TOKEN, PURPOSE_XTC, words_of_ids
from .reference_adjust import adjust


def draw(logits_LV: np.ndarray, draws: Draws) -> None:
    """What a step does with its rows of logits, which stay as they are."""
    tokens_L, how = draws.tokens_L, draws.how
    adjusted_LV = logits_LV.copy()
    late: list[int] = []
    for row, adjustment in enumerate(() if draws.adjustments is None else draws.adjustments.rows):
        if adjustment is None or not np.isfinite(logits_LV[row]).all():
            continue
        if not adjust(adjustment, adjusted_LV[row], int(how.position_L[row])):
            late.append(row)
    tokens_L[:] = sample(adjusted_LV, how)
    tokens_L[late] = MASK_LATE
    draws.drawn[draws.slots_L] = np.maximum(tokens_L, 0)
    for row, adjustment in enumerate(() if draws.adjustments is None else draws.adjustments.rows):
        if adjustment is not None:
            adjustment.history[adjustment.num_prompt + int(how.position_L[row])] = max(0, int(tokens_L[row]))
    if draws.scores is not None:
        scores = draws.scores
        scored = token_logprobs(logits_LV, np.maximum(tokens_L, 0), scores.top_ids_Ln.shape[1])
        scores.logprobs_L[:], scores.ranks_L[:], scores.top_ids_Ln[:], scores.top_logprobs_Ln[:] = scored


def sample(logits_LV: np.ndarray, how: SampleBatch) -> np.ndarray:
    """Rows are independent. With mass = exp((logit - max) / temperature), each filter takes what the one before left:

    top_n_sigma  keep logits of at least max - n * the standard deviation of those that are not ruled out (Tang et al.,
                 "Top-nsigma: Not All Logits Are You Need", 2024)
    top_k      keep the k of the largest mass (ties: lower id first)
    typical_p  keep those whose surprise, -log(share), is closest to its mean, until they hold typical_p of what is left
               (ties: lower id first; Meister et al., "Locally Typical Sampling", 2022)
    top_p      keep the shortest run of falling mass (ties: lower id first) whose share of what is left reaches top_p;
               at least one token
    min_p      drop what has less than min_p * the largest mass that is left
    XTC        with xtc_probability, of those whose share of what is left reaches xtc_threshold drop all but the
               lightest (of equals, all but the last)
    draw       the id with the least `exponentials` / mass; ties go to the lower id
    """
    is_finite_L = np.isfinite(logits_LV).all(axis=1)
    tokens_L = np.where(is_finite_L, np.argmax(logits_LV, axis=1), NOT_FINITE).astype(np.int32)
    for row in np.flatnonzero((how.temperature_L > 0) & is_finite_L).tolist():
        seed, choice, position = int(how.seed_L[row]), int(how.choice_L[row]), int(how.position_L[row])
        logits_V = logits_LV[row].astype(np.float64)
        scaled_V = (logits_V - logits_V.max()) / how.temperature_L[row]
        mass_V = np.exp(scaled_V)
        num_sigma = how.filter("top_n_sigma", row)
        if num_sigma > 0 and logits_V.max() > NEVER:
            mass_V[logits_V < logits_V.max() - num_sigma * logits_V[logits_V > NEVER].std()] = 0
        _keep_first(mass_V, -mass_V, int(how.top_k_L[row]) if how.top_k_L[row] > 0 else len(mass_V), 1)
        typical_p = how.filter("typical_p", row)
        if typical_p < 1:
            with np.errstate(invalid="ignore"):
                mean = np.where(mass_V > 0, mass_V * scaled_V, 0).sum() / mass_V.sum()
            _keep_first(mass_V, np.where(mass_V > 0, np.abs(scaled_V - mean), np.inf), len(mass_V), typical_p)
        _keep_first(mass_V, -mass_V, len(mass_V), float(how.top_p_L[row]))
        mass_V[mass_V < how.min_p_L[row] * mass_V.max()] = 0
        xtc_probability = how.filter("xtc_probability", row)
        if (
            xtc_probability
            and (words_of_ids(seed, choice, position, PURPOSE_XTC, 1)[0] + 0.5) / 2**32 < xtc_probability
        ):
            _exclude_top(mass_V, how.filter("xtc_threshold", row))
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


def _keep_first(mass_V: np.ndarray, key_V: np.ndarray, count: int, share: float) -> None:
    """Zero, in place, all but the first `count` by rising key, and of these all behind those that reach the share."""
    if count >= len(mass_V) and share >= 1:
        return
    order = np.argsort(key_V, kind="stable")
    if share < 1:
        cumulative = np.cumsum(mass_V[order[:count]])
        count = 1 + int(np.searchsorted(cumulative, share * cumulative[-1], side="left"))
    mass_V[order[count:]] = 0


def _exclude_top(mass_V: np.ndarray, threshold: float) -> None:
    top = np.flatnonzero((mass_V >= threshold * mass_V.sum()) & (mass_V > 0))
    if len(top):
        spared = top[len(top) - 1 - int(np.argmin(mass_V[top][::-1]))]
        mass_V[top[top != spared]] = 0


def _best_ids(row_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest values, best first, ties to the lower id."""
    if count == 0:
        return np.zeros(0, np.int64)
    smallest_kept = np.partition(row_V, -count)[-count]
    candidates = np.flatnonzero(row_V >= smallest_kept)
    return candidates[np.argsort(-row_V[candidates], kind="stable")][:count]
