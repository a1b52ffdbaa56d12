"""What adjusting logits, drawing tokens and telling their logprobs mean, in numpy. Part of the reference backend;
draws.py has the order of adjustments.

Randomness is Philox4x32-10: a function of (key, counter), with no generator state (Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011).

L logit rows  V vocabulary
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .draws import MASK_LATE, NEVER, NOT_FINITE, Adjustment, Draws, SampleBatch


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
    words = race_words(seed, choice, position, num_ids)
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


PURPOSE_TOKEN = 0
"""Purpose word of the draw that picks an output token: upper bytes of the words."""

PURPOSE_XTC = 1
"""Of the draw that decides whether the most likely tokens are left out."""

PURPOSE_TOKEN_REST = 2
"""The other bits of words that pick an output token."""

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Ten rounds of Philox4x32 on each row: counter uint32 [L, 4], key uint32 [L, 2], or [1, 2] for all -> uint32
    [L, 4]."""
    c0, c1, c2, c3 = (counter[:, word].astype(np.uint64) for word in range(4))
    k0, k1 = (key[:, word].astype(np.uint64) for word in range(2))
    for _ in range(10):
        left, right = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def words_of_ids(seed: int, choice: int, position: int, purpose: int, num_ids: int) -> np.ndarray:
    """The random word of each id: uint32 [num_ids]. key = (low, high) 32 bits of the seed; counter = (position, choice,
    purpose, id // 4), whose four words go to four ids."""
    num_blocks = -(-num_ids // 4)
    counter = np.empty((num_blocks, 4), np.uint32)
    counter[:, :3] = position, choice, purpose
    counter[:, 3] = np.arange(num_blocks)
    key = np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32)
    return philox4x32(counter, key).reshape(-1)[:num_ids]


def race_words(seed: int, choice: int, position: int, num_ids: int) -> np.ndarray:
    """The word by which each id races: uint32 [num_ids]. Its upper byte is byte number id mod 16 of block id // 16, its
    other bits are the upper ones of a word of their own: most ids have lost by their byte, a quarter of the blocks."""
    words = words_of_ids(seed, choice, position, PURPOSE_TOKEN, -(-num_ids // 4))
    bytes_V = words.astype("<u4").view(np.uint8)
    rest_V = words_of_ids(seed, choice, position, PURPOSE_TOKEN_REST, num_ids)
    return bytes_V[:num_ids].astype(np.uint32) << np.uint32(24) | rest_V >> np.uint32(8)


DRY_LONGEST = 64
"""Tokens of a repeated run that count."""


def adjust(how: Adjustment, logits_V: np.ndarray, num_output: int) -> bool:
    """Adjust one row in place, `num_output` tokens having been drawn before. False where the mask has not come."""
    vocab_size, params = len(logits_V), how.params
    tokens = how.history[: how.num_prompt + num_output]
    output = tokens[how.num_prompt :]
    if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
        seen = np.unique(tokens[(tokens >= 0) & (tokens < vocab_size)])
        produced = np.array([np.count_nonzero(output == token) for token in seen], np.float32)
        values = logits_V[seen]
        repetition = np.float32(params.repetition_penalty)
        with np.errstate(all="ignore"):  # a penalty near 0 divides beyond what a float32 holds
            values = np.where(values > 0, values / repetition, values * repetition)
        values = np.clip(values, NEVER, -NEVER)
        frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        logits_V[seen] = values - frequency * produced - presence * (produced > 0)
    if params.dry_multiplier:
        _penalise_repeats(how, tokens.tolist(), logits_V)
    logits_V[how.bias_ids] += how.bias
    if how.mask is not None:
        if not how.mask.wait(num_output):
            return False
        allowed = np.unpackbits(how.mask.words.view(np.uint8), bitorder="little")[:vocab_size]
        logits_V[allowed == 0] = NEVER
    if num_output < params.min_tokens:
        _rule_out(how.held_back, logits_V)
    _forbid_words(how, output.tolist(), logits_V)
    return True


def _penalise_repeats(how: Adjustment, tokens: list[int], logits_V: np.ndarray) -> None:
    """A token that followed an earlier occurrence of the last n tokens, n >= dry_allowed_length, loses multiplier *
    base^(n - allowed_length), for the longest such n. No run reaches over a breaker, and breakers are not penalised."""
    params = how.params
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    breakers = set(how.dry_breakers.tolist())
    most = 0
    while most < min(DRY_LONGEST, len(tokens)) and tokens[-1 - most] not in breakers:
        most += 1
    longest: dict[int, int] = {}
    for end in range(1, len(tokens)):  # tokens[end] follows the run that ends before it
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        token = tokens[end]
        if length >= max(1, params.dry_allowed_length) and token not in breakers and token < len(logits_V):
            longest[token] = max(length, longest.get(token, 0))
    for token, length in longest.items():
        penalty = np.float32(params.dry_multiplier)
        with np.errstate(over="ignore"):
            for _ in range(length - params.dry_allowed_length):
                penalty *= np.float32(params.dry_base)
            logits_V[token] = max(logits_V[token] - min(penalty, -NEVER), NEVER)


def _forbid_words(how: Adjustment, output: list[int], logits_V: np.ndarray) -> None:
    """The last token of each word whose others were just drawn."""
    starts = how.bad_starts.tolist()
    words = [how.bad_tokens[start:end].tolist() for start, end in pairwise(starts)]
    ends = [
        word[-1]
        for word in words
        if len(word) <= len(output) + 1 and output[len(output) + 1 - len(word) :] == word[:-1]
    ]
    _rule_out(np.array(ends, np.int32), logits_V)


def _rule_out(ids: np.ndarray, logits_V: np.ndarray) -> None:
    """Unless nothing else is left."""
    values = logits_V[ids]
    logits_V[ids] = NEVER
    if logits_V.max() == NEVER:
        logits_V[ids] = values
