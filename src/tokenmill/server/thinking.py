"""What a chat call says of reasoning, under the names of vLLM, SGLang and llama-server."""

from __future__ import annotations

from ..core.errors import InvalidRequest
from ..text.reasoning import ReasoningUse
from ..text.speech import Speech
from .fields import Fields

_FORMATS = ("none", "auto", "deepseek", "deepseek-legacy")
BUDGET = "thinking_token_budget"
_BUDGETS = (BUDGET, "thinking_budget_tokens", "reasoning_budget")


def template_switch(thinks: bool) -> dict[str, bool]:
    """What tells a chat template whether the model is to think: most read the first name, Granite's and DeepSeek's the
    second."""
    return {"enable_thinking": thinks, "thinking": thinks}


def read_reasoning(fields: Fields, speech: Speech) -> ReasoningUse:
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
    return ReasoningUse(separate is not False, shown is not False, _budget(fields, speech))


def budget_field(fields: Fields) -> str:
    """The name under which the body gives a budget."""
    return next(name for name in _BUDGETS if fields.any(name) is not None)


def _budget(fields: Fields, speech: Speech) -> int | None:
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
    if found is not None and not speech.reasoning:
        raise InvalidRequest(f"{by} needs a model that marks its reasoning.", param=by)
    return found
