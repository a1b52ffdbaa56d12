"""Fields that several APIs read: beam search, reasoning, priority class, objectives, limits of drafts, hints on KV.
Pure.

A tenant's priority class is that of its calls; one may ask for less by `priority_class` or OpenAI's `service_tier`.
`flex` is the last class, and every other tier the tenant's own: who is served first is agreed with the tenant, not
claimed by a call.

A request tells its objectives in the field `slo` or in headers, which count more than the body since gateways set them:

    "slo": "chat"                                            a profile
    "slo": {"profile": "chat", "ttft_ms": 300, "tpot_ms": 30}   one with targets of its own; each may be left out
    x-slo-profile, x-slo-ttft-ms, x-slo-tpot-ms              the same; also x-llm-d-slo-* and x-gateway-inference-slo-*
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..core import sampling
from ..core.config import check_name
from ..core.errors import ConfigError, InvalidRequest
from ..core.sampling import MAX_LOGPROBS, SamplingParams
from ..core.slo import MAX_TARGET_S, PROFILES, Wish
from ..core.speculation import MOST_SPECULATIVE_TOKENS
from ..core.terms import NUM_PRIORITY_CLASSES, Terms
from ..text.beams import BeamSearchParams
from ..text.chat_format import ChatFormat
from ..text.reasoning import ReasoningUse
from .fields import Fields

_PREFIXES = (b"x-slo-", b"x-llm-d-slo-", b"x-gateway-inference-slo-")
_MOST_MS = int(MAX_TARGET_S * 1000)


def read_wish(fields: Fields) -> Wish:
    """The field `slo` of a body. Raises InvalidRequest naming the field."""
    given = fields.any("slo")
    if isinstance(given, str):
        return Wish(_profile(given, "slo"))
    if given is not None and not isinstance(given, dict):
        raise fields.wrong("slo", "the name of a profile or an object")
    inner = Fields(given or {}, "slo")
    profile = inner.text("profile")
    ttft_ms, tpot_ms = inner.integer("ttft_ms", 1, _MOST_MS), inner.integer("tpot_ms", 1, _MOST_MS)
    inner.unread()
    return Wish(
        "" if profile is None else _profile(profile, "slo.profile"),
        (ttft_ms or 0) / 1000,
        (tpot_ms or 0) / 1000,
    )


def with_headers(wish: Wish, headers: Iterable[tuple[bytes, bytes]]) -> Wish:
    """The wish, as headers change it. Raises InvalidRequest naming the header."""
    for name, value in headers:
        if b"slo-" in name:
            prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
            if prefix is None:
                continue
            what, told, text = name[len(prefix) :], name.decode("latin-1"), value.decode("latin-1").strip()
            if what == b"profile":
                wish = wish._replace(profile=_profile(text, told))
            elif what == b"ttft-ms":
                wish = wish._replace(ttft_s=_seconds(_number(text, told), told))
            elif what == b"tpot-ms":
                wish = wish._replace(tpot_s=_seconds(_number(text, told), told))
    return wish


def _profile(name: str, param: str) -> str:
    try:
        check_name(name[:100], PROFILES, param)
    except ConfigError as error:
        raise InvalidRequest(error.message, param=param) from None
    return name


def _number(text: str, param: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{param} must be a number of milliseconds, got {text[:40]!r}.", param=param) from None


def _seconds(ms: float, param: str) -> float:
    if not 1 <= ms <= _MOST_MS:
        raise InvalidRequest(f"{param} must be from 1 to {_MOST_MS} milliseconds, got {ms:g}.", param=param)
    return ms / 1000


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


class DraftLimits(NamedTuple):
    """What a call allows to be drafted for it, as in Terms."""

    n_max: int = MOST_SPECULATIVE_TOKENS
    n_min: int = 0
    p_min: float = 0.0


NO_LIMITS = DraftLimits()


def read_drafts(fields: Fields) -> DraftLimits:
    """`speculative`, an object, or llama-server's names for its fields: "speculative.n_max". Raises InvalidRequest
    naming the field."""
    given = fields.object("speculative") or {}
    dotted = {name: fields.any(f"speculative.{name}") for name in DraftLimits._fields}
    inner = Fields({**given, **{name: value for name, value in dotted.items() if value is not None}}, "speculative")
    n_max, n_min = inner.integer("n_max", 0, 2**31 - 1), inner.integer("n_min", 0, 2**31 - 1)
    p_min = inner.number("p_min") or 0.0
    sampling.check_float("speculative.p_min", p_min, 0, 1)
    inner.refuse_unread()
    most = MOST_SPECULATIVE_TOKENS
    return DraftLimits(most if n_max is None else min(most, n_max), min(most, n_min or 0), p_min)


def with_drafts(terms: Terms, limits: DraftLimits) -> Terms:
    if limits == NO_LIMITS:
        return terms
    return terms._replace(draft_n_max=limits.n_max, draft_n_min=limits.n_min, draft_p_min=limits.p_min)


def read_prediction(fields: Fields) -> str | None:
    """`prediction`: what the caller expects of the answer, a text or parts of text. Raises InvalidRequest naming the
    field."""
    given = fields.object("prediction")
    if given is None:
        return None
    inner = Fields(given, "prediction")
    kind, content = inner.text("type"), inner.any("content")
    inner.refuse_unread()
    if kind != "content":
        raise InvalidRequest("prediction.type must be 'content'.", param="prediction.type")
    if isinstance(content, str):
        return content
    is_array = isinstance(content, list)
    parts = (
        [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if is_array
        else []
    )
    texts = [text for text in parts if isinstance(text, str)]
    if not is_array or len(texts) < len(content):
        raise InvalidRequest(
            "prediction.content must be a string or an array of parts of type 'text'.", param="prediction.content"
        )
    return "".join(texts)
