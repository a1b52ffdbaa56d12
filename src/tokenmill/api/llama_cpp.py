"""What llama-server's API and Ollama's share, as llama.cpp is below both: schemas, gaps, durations. Pure.

In their schemas an object has the properties that it lists and no others, unless it says otherwise: what their callers
write relies on it. Whatever such a schema takes, the schema as written takes too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import InvalidRequest
from ..text.choice import Choice
from ..text.fim import FimTokens, infill
from .call import Call
from .rules import Rules

_OPEN = frozenset(
    {
        "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "minProperties",
        "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas",
    }
)  # fmt: skip
"""An object that says one of these may have others, or is put together with other schemas."""

_DATA = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords whose values are no schemas."""

_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords whose values are schemas by name."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties` false where an object lists its properties. Schemas that are joined by
    allOf describe one object in parts: then nothing is closed."""
    return schema if _joins(schema) else _close(schema)


def _close(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: _close(each) for name, each in value.items()}
        else:
            found[key] = value if key in _DATA else _close(value)
    if isinstance(schema.get("properties"), dict) and _OPEN.isdisjoint(schema):
        found["additionalProperties"] = False
    return found


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, dict):
        return False
    return "allOf" in schema or any(_joins(value) for key, value in schema.items() if key not in _DATA)


@dataclass(frozen=True, slots=True)
class Durations:
    """In seconds. wait_s: until the engine began; prompt_s: from there to the first token; output_s: from there on."""

    wait_s: float
    prompt_s: float
    output_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prompt_s + self.output_s


def durations(choice: Choice, now_s: float) -> Durations:
    """Of a choice as far as it is. What the engine has not told counts as happening now."""
    timing = choice.timing
    gates = () if timing is None else (timing.scheduled_s, timing.first_token_s, timing.finished_s)
    begun_s, first_s, end_s = (at if at >= 0 else now_s for at in gates or (now_s,) * 3)
    arrival_s = choice.request.arrival_s
    begun_s = max(arrival_s, begun_s)
    first_s = max(begun_s, first_s)
    return Durations(begun_s - arrival_s, first_s - begun_s, max(first_s, end_s) - first_s)


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
