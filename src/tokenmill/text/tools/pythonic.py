"""Calls in Python's form: name(key=value, ...), the values being literals."""

from __future__ import annotations

import ast
from typing import Any

from .json_calls import MAX_DEPTH
from .parser import MAX_NAME, Calls, Malformed, Reading, as_json, space

_MAX_CHARS, _MAX_UNQUOTED = 100_000, 4096
_OPENING, _CLOSING = "([{", ")]}"
_CONSTANTS = {"true": True, "false": False, "null": None}


def read_python_list(calls: Calls) -> Reading:
    """Behind the opening bracket of a list of calls."""
    char = yield from space()
    while True:
        char = yield from space((yield from read_python_call(calls, char)))
        if char == "]":
            return (yield from space())
        if char != ",":
            raise Malformed
        char = yield from space()


def read_python_call(calls: Calls, char: str) -> Reading:
    """One call that begins with `char`. Its arguments are known when it has ended. Returns nothing."""
    name = ""
    while char != "(":
        if not (char.isalnum() or char in "_-.:/") or len(name) == MAX_NAME:
            raise Malformed
        name += char
        char = yield
    name = name if name in calls.tools else name.removesuffix(".call")
    if name not in calls.tools:
        raise Malformed
    text = yield from _arguments()
    arguments = _evaluate(text)
    calls.start(name)
    calls.give(arguments)
    calls.finish()
    return ""


def _arguments() -> Reading:
    """The text up to the closing bracket."""
    text: list[str] = []
    depth, quote, unquoted = 0, "", 0
    while True:
        char = yield
        unquoted += not quote
        if quote:
            if char == "\\":
                text.append(char)
                char = yield
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _OPENING:
            depth += 1
        elif char in _CLOSING:
            depth -= 1
        if depth < 0:
            return "".join(text)
        if depth > MAX_DEPTH or len(text) > _MAX_CHARS or unquoted > _MAX_UNQUOTED:
            raise Malformed
        text.append(char)


def _evaluate(text: str) -> str:
    """The arguments as JSON."""
    try:
        return as_json(_read_keywords(ast.parse(f"f({text})", mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


def _read_keywords(call: ast.expr) -> dict[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise Malformed
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise Malformed
        found[keyword.arg] = _value(keyword.value)
    return found


def _value(node: ast.expr, num_signs: int = 0) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)) and num_signs < MAX_DEPTH:
        number = _value(node.operand, num_signs + 1)
        if type(number) in (int, float):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise Malformed
