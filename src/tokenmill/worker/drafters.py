"""Drafters without a model, as a worker has them: it tells them of its sequences and of what these draw, and sends what
they propose with the results (core/step.py). What becomes of a proposal is the engine's to say.

A prompt is told a piece a step, beside the steps that compute it, so that a long one holds nothing up. Until all of it
is told, nothing is looked up for its sequence. What its caller expects of it (worker/prediction.py) is proposed from
the first token on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import TypeVar

from ..core.config import EngineConfig
from ..core.speculation import NGRAM, SUFFIX, tenant_digest
from ..core.step import Drafts, Introduction, RowResult
from ..ops.api import Ops
from ..ops.drafts import OUTPUT_BYTES, SEQUENCE_TOKEN_BYTES, Corpus, Drafter, Wanted
from .kept_outputs import KeptOutputs, Output
from .prediction import Prediction

log = logging.getLogger(__name__)

T = TypeVar("T")

_RECALLED = -1
"""What no sequence is called."""

_INDEXED_AT_ONCE = 1024
"""Tokens of earlier outputs that a drafter takes in with a call, at least."""

TOLD_AT_ONCE = 8192
"""Tokens of prompts told in a step: about a millisecond."""

LOOKUPS, FOR_NEW, FOR_RIGHT, MOST_PASSED = 64, 8, 32, 7
"""Lookups that may come to nothing before steps are passed over; how many more a new sequence may have, and how many a
draft that was right stands for; and steps that are passed over in a row, at most."""


def draft_index_bytes(config: EngineConfig) -> int:
    """About what they take: running sequences have no more tokens than the KV pools, where they share none."""
    if not _methods(config):
        return 0
    num_tokens = max((group.num_blocks for group in config.groups), default=0) * config.block_size
    return OUTPUT_BYTES + SEQUENCE_TOKEN_BYTES * min(num_tokens, config.max_num_seqs * config.max_model_len)


def _methods(config: EngineConfig) -> tuple[str, ...]:
    methods = () if config.speculation is None else config.speculation.methods
    return tuple(method for method in methods if method in (NGRAM, SUFFIX))


@dataclass(slots=True)
class _Known:
    """A sequence. first_step: the step that introduced it; untold: tokens that the drafters are still to be told of, up
    to num_told they have been. is_over: it has drawn one of end_ids, and what it draws after that is nothing.
    prediction: None where its caller expects nothing. guess: the first token that was drafted last; -1: none was, or it
    has been drawn since or was wrong. scope: who may have drafts of its output; output: of it, what is still to be
    kept."""

    first_step: int
    end_ids: frozenset[int]
    untold: tuple[int, ...]
    prediction: Prediction | None
    scope: str = ""
    output: list[int] | None = None
    num_told: int = 0
    is_over: bool = False
    guess: int = -1

    def next_told(self, most: int) -> tuple[int, ...]:
        """At most so many of its tokens that are to be told."""
        if not self.untold:
            return ()
        tokens = self.untold[self.num_told : self.num_told + most]
        self.num_told += len(tokens)
        if self.num_told == len(self.untold):
            self.untold, self.num_told = (), 0
        return tokens


class Drafters:
    """drafter: None where only predictions are drafted from; most: tokens to propose at a time; overlap: tokens before
    what is new to others that they are to see with it; kept: who keeps outputs across restarts, if anybody does. All
    calls are made by the thread that prepares and collects steps."""

    def __init__(self, drafter: Drafter | None, most: int, overlap: int, kept: KeptOutputs | None = None) -> None:
        self._drafter = drafter
        self._kept = kept
        self._most = most
        self._overlap = overlap
        self._known: dict[int, _Known] = {}
        self._num_lookups = LOOKUPS  # that may still come to nothing
        self._pause = self._num_left = 0  # steps that are passed over, and how many of them are left
        self._passed_over: list[tuple[int, Sequence[RowResult]]] = []

    @staticmethod
    def of(
        ops: Ops,
        config: EngineConfig,
        vocab_size: int,
        corpora: Sequence[Corpus] = (),
        kept: KeptOutputs | None = None,
    ) -> Drafters | None:
        """None where nothing is to be drafted. corpora: those of the configuration. kept: is opened, and what is there
        drafted from. What is proposed loses its first tokens to steps that are under way already."""
        speculation, methods = config.speculation, _methods(config)
        if speculation is None:
            return None
        most = speculation.num_speculative_tokens + config.steps_in_flight - 1
        assert len(corpora) == len(speculation.corpora), (len(corpora), speculation.corpora)
        own = replace(speculation, methods=methods) if methods else None
        drafter = None if own is None else ops.new_drafter(own, vocab_size, corpora)
        drafters = Drafters(drafter, most, speculation.suffix_decoding_max_tree_depth, kept)
        if kept is not None:
            drafters.recall(kept.open(speculation.suffix_decoding_max_cached_requests))
        return drafters

    def recall(self, outputs: Sequence[Output]) -> None:
        """As if they had just come to their ends, one after the other."""

        def recall(drafter: Drafter) -> None:
            for scope, tokens in outputs:
                drafter.begin(_RECALLED, scope, len(tokens), 0)
                drafter.propose([Wanted(_RECALLED, tokens, 0)])
                drafter.end(_RECALLED)
            for _ in range(sum(len(tokens) for _, tokens in outputs) // _INDEXED_AT_ONCE + 1):
                drafter.propose([])

        self._ask(recall, None)

    def introduce(self, step: int, seq: int, intro: Introduction) -> None:
        """A sequence that ran here before has let others have its outputs; only what comes is new to them."""
        self._catch_up()
        self._num_left = 0
        self._allow(FOR_NEW)
        prediction = Prediction(intro.prediction, intro.output_tokens) if intro.prediction else None
        if self._drafter is None and prediction is None:
            self._known.pop(seq, None)
            return
        tokens = intro.prompt_tokens + intro.output_tokens
        num_before = max(len(intro.prompt_tokens), len(tokens) - self._overlap)
        scope, corpora = intro.draft_scope, intro.corpora
        self._ask(lambda drafter: drafter.begin(seq, scope, len(tokens), num_before, corpora), None)
        end_ids = frozenset(intro.eos_token_ids + intro.sampling.stop_token_ids)
        output = None if self._kept is None else [*tokens[num_before:]]
        self._known[seq] = _Known(step, end_ids, tokens, prediction, scope, output)

    def release(self, seq: int) -> None:
        """Unknown ones are fine."""
        if seq not in self._known:
            return
        self._catch_up()
        known = self._known.pop(seq)
        self._keep(known)
        if late := known.next_told(TOLD_AT_ONCE):
            self._ask(lambda drafter: drafter.propose([Wanted(seq, late, 0)]), None)
        self._ask(lambda drafter: drafter.end(seq), None)

    def forget_tenants(self, tenants: Sequence[str]) -> None:
        """Of deleted ones nothing is kept; nobody is drafted for from their outputs, since nobody is them any more."""
        if self._kept is not None:
            self._kept.forget([tenant_digest(tenant) for tenant in tenants])

    def close(self) -> None:
        """What has been put out is kept when this returns, where somebody keeps it."""
        self._catch_up()
        if self._kept is not None:
            for known in self._known.values():
                self._keep(known)
            self._kept.close()

    def _keep(self, known: _Known) -> None:
        """Once: at its end, as soon as that is seen."""
        if self._kept is not None and known.output is not None and len(known.output) > 1:
            self._kept.add(known.scope, known.output)
        known.output = None

    def propose(self, step: int, results: Sequence[RowResult]) -> tuple[RowResult, ...]:
        """The results of a step, with what may follow: of all who propose something, that of which most tokens are
        expected to be right."""
        if self._num_left:
            self._num_left -= 1
            self._passed_over.append((step, results))
            return tuple(results)
        self._catch_up()
        rows: list[Wanted] = []
        places: list[int] = []
        proposed = list(results)
        room = TOLD_AT_ONCE
        is_expected = False
        for place, result in enumerate(results):
            known = self._note(step, result)
            if known is None:
                continue
            drawn = result.tokens
            if known.prediction is not None:
                is_expected = True
                if drawn:
                    known.prediction.follow(drawn)
                if drawn and not known.is_over and (drafts := known.prediction.propose(self._most)) is not None:
                    _propose(proposed, place, drafts)
            if self._drafter is None:
                continue
            tokens = known.next_told(room)
            room -= len(tokens)
            if known.untold:
                known.untold += drawn
                drawn = ()
            rows.append(Wanted(result.seq, tokens + drawn, self._most if drawn and not known.is_over else 0))
            places.append(place)
        nothing: list[Drafts | None] = [None] * len(rows)
        for place, found in zip(places, self._ask(lambda drafter: drafter.propose(rows), nothing), strict=True):
            if found is not None:
                known = self._known[results[place].seq]
                known.guess = found.tokens[0]
                if (drafts := _before_end(found, known.end_ids)) is not None:
                    _propose(proposed, place, drafts)
        if rows and not is_expected and all([row.most for row in rows]):
            self._num_lookups = max(0, self._num_lookups - len(rows))
            self._pause = 0 if self._num_lookups else min(2 * self._pause + 1, MOST_PASSED)
            self._num_left = self._pause
        return tuple(proposed)

    def _allow(self, num_lookups: int) -> None:
        self._num_lookups = min(self._num_lookups + num_lookups, LOOKUPS)

    def _note(self, step: int, result: RowResult) -> _Known | None:
        """The sequence, which has drawn something; None where that is nothing to it: it may have left, and begun
        anew, or has ended."""
        known, drawn = self._known.get(result.seq), result.tokens
        if known is None or known.first_step > step or known.is_over:
            return None
        if drawn:
            if known.guess == drawn[0]:
                self._allow(FOR_RIGHT)
            known.guess = -1
            known.is_over = not known.end_ids.isdisjoint(drawn)
            if known.output is not None:
                known.output += drawn
                if known.is_over:
                    self._keep(known)
        return known

    def _catch_up(self) -> None:
        """Take in the steps that were passed over."""
        for step, results in self._passed_over:
            for result in results:
                known = self._note(step, result)
                if known is not None:
                    known.untold += result.tokens
        self._passed_over.clear()

    def _ask(self, question: Callable[[Drafter], T], otherwise: T) -> T:
        """One that fails drafts no more: no token depends on it."""
        if self._drafter is None:
            return otherwise
        try:
            return question(self._drafter)
        except Exception:
            log.exception("Nothing is drafted from earlier text any more, until the server is started again.")
            self._drafter = None
            return otherwise


def _before_end(drafts: Drafts, end_ids: frozenset[int]) -> Drafts | None:
    """Without tokens that end the sequence, and what follows them: the next turn of a prompt is no part of an answer,
    and an answer seldom ends where one before it did."""
    if end_ids.isdisjoint(drafts.tokens):
        return drafts
    at = next(index for index, token in enumerate(drafts.tokens) if token in end_ids)
    return Drafts(drafts.tokens[:at], drafts.source, drafts.chances[:at]) if at else None


def _propose(results: list[RowResult], place: int, drafts: Drafts) -> None:
    """Unless more tokens of what is proposed already are expected to be right."""
    if _num_right(drafts) > _num_right(results[place].drafts):
        results[place] = results[place]._replace(drafts=drafts)


def _num_right(drafts: Drafts | None) -> float:
    """Tokens expected to be right."""
    return 0.0 if drafts is None else sum(accumulate(drafts.chances, mul))
