"""How long answers will be: predicted from what a request says of itself and from how answers to like ones ended. Pure.

TetriInfer (Hu et al., 2024) lets a small model sort requests by the length of their answers, so that long ones can be
kept apart. Here the features are those a gateway has without reading the text: tenant, SLO profile, adapter, length of
the prompt, limit of the answer. Each combination has a histogram of lengths on a scale of powers of two, and is shrunk
towards the next coarser one, so that the first request of a tenant is predicted from everybody's. Old answers count
less and less. Answers cut short by their client say nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ..core.events import FINISH_LENGTH, FINISH_STOP
from ..core.request import Request

_FIRST = 4
"""The first bucket ends at 2 ** 4 tokens; each further one is twice as wide."""
_NUM_BUCKETS = 14
_KEPT = 0.995
"""Of what the histogram of a combination says, after each later answer of it."""
_SHRINK = 3.0
"""A combination counts as much as the coarser one before it once it has seen so many answers."""
_MOST = 4096
_SLOW = 1 / 64


class Guess(NamedTuple):
    """num_tokens: expected; bucket: the most likely one."""

    num_tokens: int
    bucket: int


class ObservedLength(NamedTuple):
    """Tokens of an answer as predicted and as they were; whether the likeliest bucket was right."""

    num_guessed: int
    num_tokens: int
    is_hit: bool


class _Histogram:
    """counts: answers in each bucket; sums: their tokens."""

    __slots__ = ("counts", "sums", "weight")

    def __init__(self) -> None:
        self.counts = [0.0] * _NUM_BUCKETS
        self.sums = [0.0] * _NUM_BUCKETS
        self.weight = 0.0

    def note(self, bucket: int, num_tokens: int) -> None:
        for i in range(_NUM_BUCKETS):
            self.counts[i] *= _KEPT
            self.sums[i] *= _KEPT
        self.counts[bucket] += 1.0
        self.sums[bucket] += num_tokens
        self.weight = _KEPT * self.weight + 1.0


class LengthPredictor:
    """num_noted   answers that were predicted and have ended
    num_hits    of these, those that ended in the bucket that was most likely
    error       mean of |predicted - real| / real, lately
    """

    def __init__(self) -> None:
        self.num_noted = 0
        self.num_hits = 0
        self.error = 0.0
        self._of: dict[Hashable, _Histogram] = {}

    def guess(self, request: Request, num_drawn: int = 0) -> Guess:
        """Of the whole answer, `num_drawn` tokens of which are known. Never above the request's limit."""
        shares = [0.5**bucket for bucket in range(_NUM_BUCKETS)]  # knowing nothing, short is likelier
        total = sum(shares)
        shares = [share / total for share in shares]
        means = [float(_middle(bucket)) for bucket in range(_NUM_BUCKETS)]
        for key in _keys(request):
            seen = self._of.get(key)
            if seen is None:
                continue
            weight = seen.weight / (seen.weight + _SHRINK)
            for i in range(_NUM_BUCKETS):
                shares[i] += weight * (seen.counts[i] / seen.weight - shares[i])
                if seen.counts[i] > 0.5:
                    means[i] = seen.sums[i] / seen.counts[i]
        return _conditional(shares, means, num_drawn, request.max_tokens)

    def note(self, request: Request, num_tokens: int, reason: str, guess: Guess | None = None) -> list[ObservedLength]:
        """An answer has ended so. `guess`: what was said of it before its first token. Returns how right that was, if
        anything was said and the answer counts."""
        if reason not in (FINISH_STOP, FINISH_LENGTH) or num_tokens < 1:
            return []
        bucket, seen_now = bucket_of(num_tokens), []
        if guess is not None:
            seen_now.append(ObservedLength(guess.num_tokens, num_tokens, guess.bucket == bucket))
            self.num_noted += 1
            self.num_hits += guess.bucket == bucket
            off = abs(guess.num_tokens - num_tokens) / num_tokens
            self.error += max(_SLOW, 1 / self.num_noted) * (off - self.error)
        for key in _keys(request):
            seen = self._of.pop(key, None) or _Histogram()
            self._of[key] = seen  # the one that was used last stands last
            seen.note(bucket, num_tokens)
        while len(self._of) > _MOST:
            del self._of[next(iter(self._of))]
        return seen_now


def bucket_of(num_tokens: int) -> int:
    """Of 0: up to 16 tokens; each further bucket ends at twice as many."""
    return min(_NUM_BUCKETS - 1, max(0, (num_tokens - 1).bit_length() - _FIRST))


def _middle(bucket: int) -> int:
    return 3 << (bucket + _FIRST - 2)


def _keys(request: Request) -> list[Hashable]:
    """From everybody's to its own."""
    terms = request.terms
    whose = (terms.tenant, terms.profile, request.adapter)
    size, limit = len(request.prompt_tokens).bit_length(), request.max_tokens.bit_length()
    return [(), (limit,), whose, (*whose, limit), (*whose, limit, size)]


def _conditional(shares: list[float], means: list[float], num_drawn: int, most: int) -> Guess:
    """Given that there are at least `num_drawn` and at most `most`."""
    first, last = bucket_of(num_drawn + 1), bucket_of(most)
    total = expected = best = 0.0
    likely = last
    for bucket in range(min(first, last), _NUM_BUCKETS):
        mean = means[bucket]
        if mean <= num_drawn:
            mean = num_drawn + (2 ** (bucket + _FIRST) - num_drawn) / 2
        total += shares[bucket]
        expected += shares[bucket] * min(mean, most)
        weight = sum(shares[last:]) if bucket >= last else shares[bucket]
        if weight > best:
            best, likely = weight, min(bucket, last)
    return Guess(max(1, min(most, round(expected / total))), likely)
