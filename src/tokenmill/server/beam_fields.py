"""The fields of a beam search, vLLM's, and what cannot be had together with it. Pure."""

from __future__ import annotations

from ..core.errors import InvalidRequest
from ..core.sampling import MAX_LOGPROBS, SamplingParams
from ..text.beams import BeamSearchParams
from .fields import Fields

_NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "stop": (),
    "prompt_logprobs": None,
}
"""Settings that would change what is likely, or end a sequence, in ways that a search does not know."""


def read_beams(fields: Fields, sampling: SamplingParams) -> BeamSearchParams | None:
    """None where none is wanted. max_tokens is that of the caller, or 1. Raises InvalidRequest naming the field."""
    is_wanted = bool(fields.flag("use_beam_search"))
    penalty = fields.any("length_penalty")
    stops = fields.any("early_stopping")
    best_of = fields.integer("best_of", 1, MAX_LOGPROBS)
    width = fields.integer("beam_width", 1, MAX_LOGPROBS)
    if not is_wanted:
        if best_of not in (None, sampling.n):
            raise InvalidRequest("best_of must equal n, unless use_beam_search is true.", param="best_of")
        for name, value, neutral in (
            ("length_penalty", penalty, 1.0),
            ("early_stopping", stops, False),
            ("beam_width", width, 1),
        ):
            if value not in (None, neutral):
                raise InvalidRequest(f"{name} needs use_beam_search to be true.", param=name)
        return None
    if best_of is not None and width not in (None, best_of):
        raise InvalidRequest("best_of and beam_width are the same; give one.", param="beam_width")
    for name, neutral_value in _NEUTRAL.items():
        if getattr(sampling, name) != neutral_value:
            raise InvalidRequest(f"{name} is not available with use_beam_search.", param=name)
    if fields.flag("stream"):
        raise InvalidRequest("stream is not available with use_beam_search.", param="stream")
    width = width or best_of or sampling.n
    if width < sampling.n:
        raise InvalidRequest(f"n is {sampling.n}, but only {width} beams are kept.", param="n")
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max(sampling.max_tokens or 1, sampling.min_tokens),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        length_penalty=1.0 if penalty is None else penalty,
        early_stopping=False if stops is None else stops,
        stop_token_ids=sampling.stop_token_ids,
    )
