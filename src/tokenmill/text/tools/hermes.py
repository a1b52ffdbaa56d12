"""Hermes and Qwen (2.5, 3), and models that were trained for no form of their own: an object between <tool_call> and
</tool_call> for each call.

For chat templates that list no tools, these are described in a system message, in the form that the family's parser
reads; for templates that know no calls either, calls and their results become text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .family import Family, Form
from .json_calls import read_calls
from .parser import Calls, Reading

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(calls: Calls, marker: str) -> Reading:
    return read_calls(calls, END if marker else "")


_FORM = Form(opening=BEGIN + '\n{"name": "{name}", "arguments": ', closing="}\n" + END, between="\n", trigger=BEGIN)

HERMES = Family("hermes", (BEGIN,), _read, _FORM, ends=(END,))

GENERIC = Family("json", (BEGIN,), _read, _FORM, bare="{", ends=(END,))
"""The same, and an object without marks where the answer begins with it. For templates that know no tools: these are
told of by `generic.describe`."""


_INTRODUCTION = """\
You can call functions. These are the functions, each as JSON with its name, what it does, and the JSON schema of its \
parameters:
"""
_INSTRUCTION = """
To call a function, answer with nothing but its name and arguments, in this form:
{form}
{several}Call a function only where it helps; otherwise answer in plain words."""
_SEVERAL = "Write one such block for each call. "


def describe(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: Form
) -> list[dict[str, Any]]:
    """The messages with `tools` told of in the first, a system message; without any, as they are."""
    told = [dict(message) for message in messages]
    if not tools:
        return told
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    arguments = "{...}" if form.arguments is None else "<parameter=KEY>\nVALUE\n</parameter>\n"
    shown = form.before + form.opening.replace("{name}", "NAME") + arguments + form.closing + form.after
    several = _SEVERAL if form.is_parallel else ""
    text = _INTRODUCTION + listed + _INSTRUCTION.format(form=shown, several=several)
    if told and told[0]["role"] == "system":
        return [{**told[0], "content": f"{_text_of(told[0]['content'])}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def as_text(messages: Sequence[Mapping[str, Any]], form: Form) -> list[dict[str, Any]]:
    """The messages with results as text, and calls in the form."""
    return [_as_text(message, form if form.arguments is None else HERMES.form) for message in messages]


def _as_text(message: Mapping[str, Any], form: Form) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if calls:
        blocks = form.between.join(_call(call["function"], form) for call in calls)
        said = _text_of(message.get("content"))
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**rest, "content": f"{said}\n" * bool(said) + form.before + blocks + form.after}
    if message["role"] == "tool":
        name, text = message.get("name", ""), _text_of(message.get("content"))
        return {"role": "user", "content": f'<tool_response name="{name}">\n{text}\n</tool_response>'}
    return dict(message)


def _call(function: Mapping[str, Any], form: Form) -> str:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return form.opening.replace("{name}", function["name"]) + arguments + form.closing


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
