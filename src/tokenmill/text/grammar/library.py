"""What llguidance says of a schema. The only place that knows its words."""

from __future__ import annotations

import json
from typing import Any

ONE_OF = "oneOf"


def refusal(schema: dict[str, Any]) -> str:
    """Why the library refuses `schema`, or what of it it would not enforce; "" where it takes all of it. Costs a
    compilation: a fraction of a millisecond as a rule."""
    from llguidance import LLMatcher

    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    _, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if messages else ""


def is_about_one_of(message: str) -> bool:
    return message.startswith("oneOf constraints")


def plain(message: str) -> str:
    """The library's message as one line of ours."""
    line = " ".join(message.split("\n  while")[0].split())
    return line if len(line) <= 300 else line[:297] + "..."
