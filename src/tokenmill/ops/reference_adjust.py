"""What adjustments of logits mean, in numpy. Part of the reference backend; draws.py has their order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .draws import NEVER, Adjustment

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
