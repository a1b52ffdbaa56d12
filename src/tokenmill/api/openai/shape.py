"""The parts of an answer in OpenAI's words: the message of a whole answer, and the delta of a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...text.choice import Choice, Piece
from ...text.parts import CallArguments, CallStart, Content, Part, Reasoning


def message_of(choice: Choice, pieces: Sequence[Piece], *, is_old: bool = False) -> dict[str, Any]:
    """The message of a choice that has ended. Content is null where the model did nothing but think or call. `is_old`:
    a call is a `function_call`."""
    delta = delta_of((part for piece in pieces for part in piece.parts), is_old=is_old)
    message: dict[str, Any] = {"role": "assistant", "content": delta.pop("content", None), "refusal": None}
    if message["content"] is None and not delta:
        message["content"] = ""
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return message | delta


def delta_of(parts: Iterable[Part], *, is_old: bool = False) -> dict[str, Any]:
    """What the parts add to a message, each field once. Reasoning has two names, an older and a newer one."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, Content):
            content.append(part.text)
        elif isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
        else:
            assert isinstance(part, CallArguments)
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    delta: dict[str, Any] = {}
    if reasoning:
        delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
    if content:
        delta["content"] = "".join(content)
    if calls and is_old:
        delta["function_call"] = calls[min(calls)]["function"]
    elif calls:
        delta["tool_calls"] = list(calls.values())
    return delta
