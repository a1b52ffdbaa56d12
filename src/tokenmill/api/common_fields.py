"""Fields that several APIs read: beam search, reasoning, priority class, hints on KV. Pure.

A tenant's priority class is that of its calls; one may ask for less by `priority_class` or OpenAI's `service_tier`.
`flex` is the last class, and every other tier the tenant's own: who is served first is agreed with the tenant, not
claimed by a call."""

from __future__ import annotations

from ..core.config import check_name
from ..core.errors import ConfigError, InvalidRequest
from ..core.sampling import MAX_LOGPROBS, SamplingParams
from ..core.terms import NUM_PRIORITY_CLASSES, Terms
from ..text.beams import BeamSearchParams
from ..text.chat_format import ChatFormat
from ..text.reasoning import ReasoningUse
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


MOST_S = 86400


def read_keep(fields: Fields) -> int | None:
    """For how long it is to be kept; None: it does not say. Raises InvalidRequest naming the field."""
    hints = Fields(fields.object("kv_hints") or {}, "kv_hints")
    keep_s = hints.integer("keep_s", 0, MOST_S)
    hints.unread()
    return keep_s


_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")
BUDGET = "thinking_token_budget"
_BUDGETS = (BUDGET, "thinking_budget_tokens", "reasoning_budget")


def template_switch(thinks: bool) -> dict[str, bool]:
    """What tells a chat template whether the model is to think: most read the first name, Granite's and DeepSeek's the
    second."""
    return {"enable_thinking": thinks, "thinking": thinks}


def read_reasoning(fields: Fields, chat_format: ChatFormat) -> ReasoningUse:
    """Raises InvalidRequest naming the field."""
    shown, separate = fields.flag("include_reasoning"), fields.flag("separate_reasoning")
    form = fields.text("reasoning_format")
    if form is not None and form not in _FORMATS:
        raise InvalidRequest(f"reasoning_format must be one of {', '.join(_FORMATS)}.", param="reasoning_format")
    if form == "none":
        if separate:
            raise InvalidRequest("reasoning_format contradicts separate_reasoning.", param="reasoning_format")
        separate = False
    if separate is False and shown is False:
        raise InvalidRequest(
            "include_reasoning can leave out only what separate_reasoning tells from the answer.",
            param="include_reasoning",
        )
    return ReasoningUse(separate is not False, shown is not False, _budget(fields, chat_format))


def budget_field(fields: Fields) -> str:
    """The name under which the body gives a budget."""
    return next(name for name in _BUDGETS if fields.any(name) is not None)


def _budget(fields: Fields, chat_format: ChatFormat) -> int | None:
    """-1 means no limit."""
    found: int | None = None
    by = ""
    for name in _BUDGETS:
        budget = fields.integer(name, -1, 2**31 - 1)
        if budget is None or budget < 0:
            continue
        if found not in (None, budget):
            raise InvalidRequest(f"{name} contradicts {by}; give one of them.", param=name)
        found, by = budget, name
    if found is not None and not chat_format.reasoning:
        raise InvalidRequest(f"{by} needs a model that marks its reasoning.", param=by)
    return found


FLEX = NUM_PRIORITY_CLASSES - 1
_TIERS = ("auto", "default", "flex", "priority", "scale", "standard_only")


def read_class(fields: Fields) -> int | None:
    """None: the tenant's own. Raises InvalidRequest naming the field."""
    asked = fields.integer("priority_class", 0, FLEX)
    tier = fields.text("service_tier")
    if tier is None:
        return asked
    try:
        check_name(tier[:100], _TIERS, "service_tier")
    except ConfigError as error:
        raise InvalidRequest(error.message, param="service_tier") from None
    if tier == "flex" and asked is None:
        return FLEX
    if tier == "flex" and asked != FLEX:
        raise InvalidRequest(f"service_tier 'flex' is priority_class {FLEX}; give one of them.", param="service_tier")
    return asked


def with_class(terms: Terms, asked: int | None) -> Terms:
    """Raises InvalidRequest for a class that comes before the tenant's."""
    if asked is None or asked == terms.priority_class:
        return terms
    if asked < terms.priority_class:
        raise InvalidRequest(
            f"priority_class must be from {terms.priority_class}, the caller's own, to {FLEX}; got {asked}.",
            param="priority_class",
        )
    return terms._replace(priority_class=asked)
