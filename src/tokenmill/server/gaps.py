"""A call for what belongs between two texts, by the marks that its model has for that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.errors import InvalidRequest
from ..text.fim import FimTokens, infill
from .openai import Call
from .rules import Rules


def require_marks(rules: Rules, name: str) -> FimTokens:
    """Raises InvalidRequest, which names the field that asks for a gap to be filled."""
    if rules.fim is None:
        message = f"{name} needs a model that fills gaps, and this one has no tokens for that."
        raise InvalidRequest(message, param=name)
    return rules.fim


def fill_gap(
    call: Call, fim: FimTokens, prefix: str, suffix: str, *, extra: Sequence[tuple[str, str]] = (), prompt: str = ""
) -> Call:
    """`call` with the gap for its prompt; arguments as infill has them. What would begin another file ends the
    answer."""
    ends = (*call.sampling.stop_token_ids, *fim.ends)
    gap = infill(fim, prefix, suffix, extra=extra, prompt=prompt)
    return replace(call, prompts=(), infill=gap, sampling=replace(call.sampling, stop_token_ids=ends))
