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
from ..core.speculation import NGRAM, SUFFIX
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
    prediction: None where its caller expects nothing. scope: who may have drafts of its output; output: of it, what is
    still to be kept."""

    first_step: int
    end_ids: frozenset[int]
    untold: tuple[int, ...]
    prediction: Prediction | None
    scope: str = ""
    output: list[int] | None = None
    num_told: int = 0
    is_over: bool = False


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
        if (known := self._known.pop(seq, None)) is not None:
            self._keep(known)
            self._ask(lambda drafter: drafter.end(seq), None)

    def close(self) -> None:
        """What has been put out is kept when this returns, where somebody keeps it."""
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
        rows: list[Wanted] = []
        places: list[int] = []
        proposed = list(results)
        room = TOLD_AT_ONCE
        for place, result in enumerate(results):
            known = self._known.get(result.seq)
            if known is None or known.first_step > step or known.is_over:  # it may have left, and begun anew
                continue
            drawn = result.tokens
            known.is_over = not known.end_ids.isdisjoint(drawn)
            if known.output is not None:
                known.output += drawn
                if known.is_over:
                    self._keep(known)
            if known.prediction is not None and drawn:
                known.prediction.follow(drawn)
                if not known.is_over and (drafts := known.prediction.propose(self._most)) is not None:
                    _propose(proposed, place, drafts)
            if self._drafter is None:
                continue
            if known.untold:
                tokens = known.untold[known.num_told : known.num_told + room]
                room -= len(tokens)
                known.num_told += len(tokens)
                if known.num_told < len(known.untold):
                    known.untold += drawn
                    drawn = ()
                else:
                    tokens += drawn
                    known.untold = ()
            else:
                tokens = drawn
            rows.append(Wanted(result.seq, tokens, self._most if drawn and not known.is_over else 0))
            places.append(place)
        nothing: list[Drafts | None] = [None] * len(rows)
        for place, found in zip(places, self._ask(lambda drafter: drafter.propose(rows), nothing), strict=True):
            if found is not None:
                _propose(proposed, place, found)
        return tuple(proposed)

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


def _propose(results: list[RowResult], place: int, drafts: Drafts) -> None:
    """Unless more tokens of what is proposed already are expected to be right."""
    if _num_right(drafts) > _num_right(results[place].drafts):
        results[place] = results[place]._replace(drafts=drafts)


def _num_right(drafts: Drafts | None) -> float:
    """Tokens expected to be right."""
    return 0.0 if drafts is None else sum(accumulate(drafts.chances, mul))
