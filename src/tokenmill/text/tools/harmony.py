"""Harmony, the format of GPT-OSS: its marks, its calls, and histories as its chat template reads them.

A call is a message to `functions.NAME`, which <|call|>, an end token, closes; so an answer has one. The recipient
stands behind the channel, as models write it, or behind the role, as templates do. The format is OpenAI's ("OpenAI
harmony response format", 2025). Whole answers are read by `text.harmony`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .family import Family, Form
from .reading import Calls, Malformed, Reading

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = "functions."
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}"
NEXT = f"{START}assistant"
"""What the header of a further message begins with."""


def _read(calls: Calls, marker: str) -> Reading:
    """Never used: calls are messages among others, which `text.harmony` reads."""
    yield
    raise Malformed


def describe_all(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The tools, each with a description, as the template adds a text to it."""
    functions = [(tool, tool["function"]) for tool in tools]
    return tuple(
        {**tool, "function": {**function, "description": function.get("description") or ""}}
        for tool, function in functions
    )


def arrange(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A history in which each message of the assistant makes at most one call, which its result follows, as the
    template writes only the first; with reasoning where the template looks for it. A message that calls has either
    reasoning or content there: what was said before the call joins the reasoning."""
    arranged: list[dict[str, Any]] = []
    results = {message.get("tool_call_id"): dict(message) for message in messages if message["role"] == "tool"}
    placed = set()
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in placed:
            placed.discard(message.get("tool_call_id"))
            continue
        message = _with_thinking(message)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            arranged.append(message)
            continue
        for number, call in enumerate(calls):
            bare = {"role": "assistant", "content": ""}
            arranged.append({**(message if number == 0 else bare), "tool_calls": [call]})
            if call["id"] in results:
                arranged.append(results[call["id"]])
                placed.add(call["id"])
    return arranged


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    message = dict(message)
    thought = message.pop("reasoning_content", None)
    if not thought:
        return message
    if message.get("tool_calls") and (content := message.get("content")):
        said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        return {**message, "thinking": f"{thought}\n{said}", "content": ""}
    return {**message, "thinking": thought}


HARMONY = Family(
    "harmony",
    (),
    _read,
    Form(
        opening=f"{CHANNEL}commentary to={RECIPIENT}{{name}} {CONSTRAIN}json{MESSAGE}",
        is_parallel=False,
        lead=FINAL,
        preamble=(PREAMBLE, END + NEXT),
    ),
    ends=(CALL, END, RETURN, START),
    arrange=arrange,
    arrange_tools=describe_all,
)
