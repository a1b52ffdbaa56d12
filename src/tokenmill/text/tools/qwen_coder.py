"""Qwen3-Coder: <tool_call>, <function=name>, and for each argument <parameter=key>, its value as text and </parameter>.

A value is what the tool's schema says it is: text is text, anything else JSON. Now and then such a model leaves the
outer mark out, or writes an object as Hermes does; both are read.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from .family import TEXT_VALUE, VALUE_END, Family, Form, Spell
from .json_calls import read_calls
from .parser import MAX_NAME, Calls, Malformed, Reading, as_json, ending, literal, space, until
from .tool_choice import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)
_MAX_VALUE = 1 << 20


def _read(calls: Calls, marker: str) -> Reading:
    if marker == BEGIN:
        char = yield from space()
        if char in "{[":
            return (yield from read_calls(calls, END, char))
        yield from literal(FUNCTION, char)
    name = (yield from until((">",), most=MAX_NAME)).strip()
    calls.start(name)
    calls.give("{")
    has_any = False
    while True:
        yield from literal("<", (yield from space()))
        char = yield
        if char == "/":
            yield from literal(FUNCTION_END[2:])
            break
        yield from literal(PARAMETER[1:], char)
        key = (yield from until((">",), most=MAX_NAME)).strip()
        calls.give((", " if has_any else "") + json.dumps(key, ensure_ascii=False) + ": ")
        has_any = True
        yield from _read_value(calls, _schema_of(calls.tools[name], key))
    calls.give("}")
    calls.finish()
    return (yield from ending(END, (yield from space())))


def _read_value(calls: Calls, schema: dict[str, Any]) -> Reading:
    char = yield
    char = "" if char == "\n" else char
    if is_text(schema):
        calls.give('"')
        yield from until(_VALUE_ENDS, lambda text: calls.give(json.dumps(text, ensure_ascii=False)[1:-1]), char)
        calls.give('"')
    else:
        text = yield from until(_VALUE_ENDS, None, char, most=_MAX_VALUE)
        calls.give(_value_of(text))
    return ""


def _schema_of(tool: Tool, key: str) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return schema if isinstance(schema, dict) else {}


def is_text(schema: dict[str, Any]) -> bool:
    """Whether a value can be nothing but text."""
    if schema.get("type") == "string":
        return True
    choices = schema.get("enum")
    return isinstance(choices, list) and "type" not in schema and all(isinstance(each, str) for each in choices)


def _value_of(text: str) -> str:
    """As JSON: what JSON or one of Python's literals says, or else the text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return as_json(read(text.strip()))
        except (Malformed, ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return as_json(text)


def _lark(schema: dict[str, Any], spell: Spell, value_of: Callable[[dict[str, Any]], str]) -> str | None:
    """Arguments in the order of the schema's properties, those that are not required left out at will."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not schema.keys() <= _SIMPLE:
        return None
    required = schema.get("required") or []
    found = []
    for key, part in properties.items():
        if not isinstance(part, dict) or '"$ref"' in json.dumps(part) or ">" in key:
            return None
        if not is_text(part):
            value = f"{value_of(part)} {spell(VALUE_END)}"
        elif "enum" in part:
            value = f"({' | '.join(spell(each) for each in part['enum'])}) {spell(VALUE_END)}"
        elif part.keys() <= _FREE_TEXT:
            value = TEXT_VALUE
        else:
            return None
        found.append(f"({spell(f'{PARAMETER}{key}>' + chr(10))} {value})" + ("" if key in required else "?"))
    return " ".join(found)


_SIMPLE = {"type", "properties", "required", "additionalProperties", "description", "title", "$schema", "$id"}
_FREE_TEXT = {"type", "description", "title", "default", "examples"}
_FORM = Form(
    opening=BEGIN + "\n" + FUNCTION + "{name}>\n",
    closing=FUNCTION_END + "\n" + END,
    between="\n",
    trigger=BEGIN,
    arguments=_lark,
)

QWEN_CODER = Family("qwen3_coder", (BEGIN, FUNCTION), _read, _FORM, ends=(FUNCTION_END, END))
