"""Beam search over one prompt: which token sequences are kept from step to step, and when no better one can come.

Pure: continuations in, beams out; the caller computes them. A beam's score is the sum of its tokens' log
probabilities over length ** length_penalty, the end token counted. The rules are those of transformers, so that both
find the same sequences; ties go to the better beam, then to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.errors import InvalidRequest
from ..core.sampling import MAX_LOGPROBS
from ..core.step import TokenLogprob

MAX_TOKENS_DEFAULT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search. Names and defaults are vLLM's and transformers'.

    beam_width       sequences that are kept at each step, and in the end
    max_tokens       most tokens of one
    min_tokens       no sequence ends before it has so many
    ignore_eos       the model's end tokens are tokens like others
    length_penalty   above 0 favours long sequences, below 0 short ones
    early_stopping   True: stop as soon as `beam_width` sequences have ended; False: when the best running one is worse
                     than all of these at its present length; "never": when it could not become better at any length
    stop_token_ids   these end a sequence, as the model's own end tokens do
    """

    beam_width: int
    max_tokens: int = MAX_TOKENS_DEFAULT
    min_tokens: int = 0
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("beam_width", 1), ("max_tokens", 1), ("min_tokens", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidRequest(f"{name} must be an integer, at least {least}.", param=name)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -10 <= penalty <= 10:
            raise InvalidRequest("length_penalty must be a number from -10 to 10.", param="length_penalty")
        stops = self.early_stopping
        if not (isinstance(stops, bool) or stops == "never"):
            raise InvalidRequest('early_stopping must be true, false or "never".', param="early_stopping")


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of output tokens. `entries`: what was known of each when it was drawn. `total`: the sum of their log
    probabilities."""

    tokens: tuple[int, ...] = ()
    entries: tuple[TokenLogprob, ...] = ()
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """A beam that is complete. `stop_token`: what ended it, its last token; None: max_tokens did."""

    beam: Beam
    score: float
    stop_token: int | None


class Beams:
    """One search. Give `advance` the best continuations of each of `running` until `is_done`; then `ended` holds what
    was found, the best first.

    num_candidates: continuations that are wanted of each running beam; more do not change the result, because of one
    beam at most `beam_width` go on, and only end tokens stand before these.
    """

    def __init__(self, params: BeamSearchParams, end_ids: Sequence[int]) -> None:
        """end_ids: the model's end tokens. Raises InvalidRequest where too many candidates would be needed."""
        self._params = params
        self._end_ids = frozenset((*(() if params.ignore_eos else end_ids), *params.stop_token_ids))
        self.num_candidates = params.beam_width + len(self._end_ids)
        if self.num_candidates > MAX_LOGPROBS:
            most = max(1, MAX_LOGPROBS - len(self._end_ids))
            raise InvalidRequest(
                f"A beam search of width {params.beam_width} is too wide; this model takes at most {most}.",
                param="beam_width",
            )
        self.running: tuple[Beam, ...] = (Beam(),)
        self.ended: list[Ended] = []
        self.is_done = False

    def advance(self, continuations: Sequence[TokenLogprob]) -> None:
        """One token more for each running beam. continuations: of each, in order; `top` holds its best tokens."""
        assert not self.is_done and len(continuations) == len(self.running), (len(continuations), len(self.running))
        params = self._params
        length = len(self.running[0].tokens) + 1
        candidates = [
            (beam.total + logprob, number, token)
            for number, (beam, entry) in enumerate(zip(self.running, continuations, strict=True))
            for token, logprob in entry.top
            if length > params.min_tokens or token not in self._end_ids
        ]
        candidates.sort(key=lambda each: (-each[0], each[1], each[2]))
        is_last = length >= params.max_tokens
        going: list[Beam] = []
        for rank, (total, number, token) in enumerate(candidates):
            ends = token in self._end_ids
            if not ends and not is_last and len(going) < params.beam_width:
                going.append(self._extend(number, token, total, continuations[number]))
            elif (ends or is_last) and rank < params.beam_width:
                beam = self._extend(number, token, total, continuations[number])
                self.ended.append(Ended(beam, total / length**params.length_penalty, token if ends else None))
        self.ended.sort(key=lambda each: -each.score)  # stable: the earlier of equals stays before
        del self.ended[params.beam_width :]
        self.running = tuple(going)
        self.is_done = not going or not self._may_improve(length)

    def _extend(self, number: int, token: int, total: float, entry: TokenLogprob) -> Beam:
        beam = self.running[number]
        ranks = {each: rank for rank, (each, _) in enumerate(entry.top, 1)}
        logprob = dict(entry.top)[token]
        chosen = TokenLogprob(token, logprob, ranks[token], entry.top)
        return Beam((*beam.tokens, token), (*beam.entries, chosen), total)

    def _may_improve(self, length: int) -> bool:
        params = self._params
        if len(self.ended) < params.beam_width:
            return True
        if params.early_stopping is True:
            return False
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        best = self.running[0].total / length**params.length_penalty
        return best > self.ended[-1].score or math.isnan(best)
