"""What drafters without a model propose, stated slowly: every place is looked at. Part of the reference backend; the
native one (native/src/drafter.cpp) finds the same by an index.

A context is a run of 1, 2, 4, ... tokens that ends the sequence (without the suffix drafter: of prompt_lookup_min, its
double, ...). The longest one that occurs elsewhere counts, at the latest OCCURRENCES of its places; of these, the ones
where most tokens match. In a corpus, it is all places where most tokens match, or OCCURRENCES evenly among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from ..core.speculation import CORPUS, NGRAM, SUFFIX, SpeculationConfig
from ..core.step import Drafts
from .drafts import OCCURRENCES, Corpus, Wanted

_PAGE = 32
"""Tokens by which a scope's share of the outputs is counted."""

_Place = tuple[list[int], int]
"""A text, and where in it a context ends."""


@dataclass(slots=True)
class _Sequence:
    scope: str
    num_before: int
    corpora: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Scope:
    """texts: outputs, the oldest first; by_use: the same, the one that was of use last first."""

    texts: list[list[int]] = field(default_factory=list)
    by_use: list[list[int]] = field(default_factory=list)
    last_use: int = 0


class ReferenceDrafter:
    """ops.drafts.Drafter. It keeps as many outputs as the settings say, whatever their bytes."""

    def __init__(self, config: SpeculationConfig, vocab_size: int, corpora: Sequence[Corpus] = ()) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._depth = config.suffix_decoding_max_tree_depth if SUFFIX in config.methods else 0
        self._num_kept = config.suffix_decoding_max_cached_requests if self._depth else 0
        longest = max(self._depth, config.prompt_lookup_max if NGRAM in config.methods else 0)
        shortest = 1 if self._depth else config.prompt_lookup_min
        self._contexts = [shortest << i for i in range(9) if shortest << i <= longest]
        self._corpora = [_places_of(corpus) for corpus in corpora]
        self._sequences: dict[int, _Sequence] = {}
        self._scopes: dict[str, _Scope] = {}
        self._ended: list[tuple[str, list[int]]] = []
        self._clock = 0

    def begin(self, seq: int, scope: str, expected: int, num_before: int, corpora: Sequence[int] = ()) -> None:
        self._sequences[seq] = _Sequence(scope, num_before, tuple(corpora))

    def end(self, seq: int) -> None:
        ended = self._sequences.pop(seq, None)
        if ended is not None and self._num_kept and len(ended.tokens) > ended.num_before + 1:
            self._ended.append((ended.scope, ended.tokens[ended.num_before :]))

    def propose(self, rows: Sequence[Wanted]) -> list[Drafts | None]:
        for scope, text in self._ended:
            self._keep(scope, text)
        self._ended.clear()
        drafts: list[Drafts | None] = []
        for seq, tokens, most in rows:
            sequence = self._sequences[seq]
            sequence.tokens += tokens
            proposed = (self._look_up(method, sequence, most) for method in self._config.methods if most)
            drafts.append(next((each for each in proposed if each.tokens), None))
        return drafts

    def _keep(self, name: str, text: list[int]) -> None:
        if sum(len(scope.texts) for scope in self._scopes.values()) == self._num_kept:
            self._forget_one()
        self._clock += 1
        scope = self._scopes.setdefault(name, _Scope())
        scope.last_use = self._clock
        scope.texts.append(text)
        scope.by_use.insert(0, text)

    def _forget_one(self) -> None:
        """Of the scope with the greatest product of the square of its pages and the time since it was of use; of two,
        the older."""

        def cost(scope: _Scope) -> int:
            return sum(-(-len(text) // _PAGE) for text in scope.texts) ** 2 * (self._clock - scope.last_use + 1)

        name, scope = max(self._scopes.items(), key=lambda each: cost(each[1]))
        forgotten = scope.by_use.pop()
        scope.texts = [text for text in scope.texts if text is not forgotten]
        if not scope.texts:
            del self._scopes[name]

    def _look_up(self, method: str, sequence: _Sequence, most: int) -> Drafts:
        config, own = self._config, sequence.tokens
        places: Iterable[_Place] = ((own, at) for at in range(len(own) - 2, -1, -1))
        if method == NGRAM:
            length, found = self._matches(places, own, config.prompt_lookup_max)
            found = found[:1] if length >= config.prompt_lookup_min else []
            return self._follow(NGRAM, found, own, most, 0.0)[0]
        drafts, score, _ = self._follow_suffix(SUFFIX, self._matches(places, own, self._depth), own, most)
        scope = self._scopes.get(sequence.scope)
        if scope is not None:
            places = ((text, at) for text in reversed(scope.texts) for at in range(len(text) - 2, -1, -1))
            found_there = self._matches(places, own, self._depth)
            others, others_score, used = self._follow_suffix(SUFFIX, found_there, own, most)
            if others_score > score:
                scope.last_use = self._clock
                scope.by_use.sort(key=lambda text: text is not used)
                drafts, score = others, others_score
        for number in sequence.corpora:
            found_there = self._matches_in_corpus(self._corpora[number], own)
            others, others_score, _ = self._follow_suffix(CORPUS, found_there, own, most)
            if others_score > score:
                drafts, score = others, others_score
        return drafts

    def _follow_suffix(
        self, source: str, found: tuple[int, list[_Place]], own: list[int], most: int
    ) -> tuple[Drafts, float, list[int]]:
        length, places = found
        allowed = np.float32(self._config.suffix_decoding_max_spec_factor) * np.float32(length)
        return self._follow(source, places, own, min(int(allowed), most), self._config.suffix_decoding_min_token_prob)

    def _matches_in_corpus(self, places: list[_Place], own: list[int]) -> tuple[int, list[_Place]]:
        lengths = [_match(*each, own, self._depth) for each in places]
        best = max(lengths)
        found = [place for place, length in zip(places, lengths, strict=True) if best and length == best]
        num_looked_at = min(len(found), OCCURRENCES)
        return best, [found[i * len(found) // num_looked_at] for i in range(num_looked_at)]

    def _matches(self, places: Iterable[_Place], own: list[int], longest: int) -> tuple[int, list[_Place]]:
        """How many tokens match at most, and where, the latest place first."""
        places = list(places)
        for context in reversed(self._contexts):
            end = own[-context:]
            ending = (each for each in places if each[1] + 1 >= context and _ending(*each, context) == end)
            if context <= min(longest, len(own)) and (found := list(islice(ending, OCCURRENCES))):
                lengths = [_match(*each, own, longest) for each in found]
                best = max(lengths)
                return best, [place for place, length in zip(found, lengths, strict=True) if length == best]
        return 0, []

    def _follow(
        self, source: str, found: list[_Place], own: list[int], most: int, least: float
    ) -> tuple[Drafts, float, list[int]]:
        """Each token is what follows the places left most often, of two what follows the latest; then only these are
        left. Tokens, chances; how many are expected to be right; the text of the latest place."""
        tokens: list[int] = []
        chances: list[float] = []
        product, score = np.float32(1), np.float32(0)
        while len(tokens) < most:
            going_on = [(text, at + 1) for text, at in found if text is own or at + 1 < len(text)]
            if not going_on:
                break
            found = going_on
            following = [(text if text is not own else [*own, *tokens])[at] for text, at in found]
            token = max(following, key=following.count)
            chance = np.float32(following.count(token)) / np.float32(len(following))
            product *= chance
            if not 0 <= token < self._vocab_size or product < np.float32(least):
                break
            score += product
            tokens.append(token)
            chances.append(float(chance))
            found = [place for place, each in zip(found, following, strict=True) if each == token]
        return Drafts(tuple(tokens), source, tuple(chances)), float(score), found[0][0] if found else own


def _ending(text: list[int], at: int, count: int) -> list[int]:
    return text[at + 1 - count : at + 1]


def _match(text: list[int], at: int, own: list[int], longest: int) -> int:
    """Tokens before and at `at` that equal the last of `own`."""
    most = min(longest, len(own), at + 1)
    return next((i for i in range(most) if text[at - i] != own[-1 - i]), most)


def _places_of(corpus: Corpus) -> list[_Place]:
    """In the order of the corpus."""
    tokens = corpus.tokens.tolist()
    ends = [at for at, token in enumerate(tokens) if token < 0]
    where: dict[int, _Place] = {}
    for begin, end in pairwise(ends):
        text = tokens[begin + 1 : end]
        where |= {begin + 1 + at: (text, at) for at in range(len(text))}
    return [where[place] for place in corpus.places.tolist()]
