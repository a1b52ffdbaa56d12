"""Calls as JSON objects with a name and arguments: one, or several in a list. What Hermes, Llama, Granite and others
share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from .parser import MAX_NAME, Calls, Malformed, Reading, as_json, ending, is_whole, space

MAX_DEPTH = 64
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("name", "function", "type", "id", "index")
_CLOSING = {"{": "}", "[": "]"}
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_IN_SCALAR = frozenset("+-.0123456789eEabdfilnrstu")

Give = Callable[[str], object]


def read_calls(calls: Calls, end: str = "", char: str = "") -> Reading:
    """Objects with white space, commas or semicolons between, or a list of objects; then `end`, which may be missing.
    Raises Malformed."""
    char = yield from space(char)
    is_list = char == "["
    if is_list:
        char = yield from space()
    while True:
        yield from read_call(calls, char)
        char = yield from space()
        if char in (",", ";"):
            char = yield from space()
        elif is_list and char == "]":
            char = yield from space()
            break
        elif is_list or char != "{":
            break
    return (yield from ending(end, char)) if end else char


@dataclass(slots=True)
class _Call:
    name: str | None = None
    arguments: list[str] = field(default_factory=list)
    has_arguments: bool = False
    is_nested: bool = False


def read_call(calls: Calls, char: str) -> Generator[None, str, None]:
    """One object, which begins with `char`. Raises Malformed."""
    if char != "{":
        raise Malformed
    call = _Call()
    yield from _members(calls, call)
    if call.name is None:
        raise Malformed
    if not call.has_arguments:
        _tell_at_once(calls, call.name, call.arguments)


def _members(calls: Calls, call: _Call) -> Generator[None, str, None]:
    char = yield from space()
    while char != "}":
        key = yield from _text(char)
        if calls.is_bare and not call.has_arguments and key not in (*_ARGUMENTS, *_OTHERS):
            raise Malformed
        if (yield from space()) != ":":
            raise Malformed
        char = yield from space()
        rest = ""
        if key == "name":
            call.name = yield from _text(char)
            if call.name not in calls.tools:
                raise Malformed
            if call.arguments:
                _tell_at_once(calls, call.name, call.arguments)
                call.has_arguments = True
        elif key in _ARGUMENTS and call.name is not None and char == "{" and not call.has_arguments:
            calls.start(call.name)
            call.has_arguments = True
            rest = yield from read_value(char, calls.give)
            calls.finish()
        elif key in _ARGUMENTS and not call.has_arguments:
            rest = yield from read_value(char, call.arguments.append)
        elif key == "function" and char == "{" and not call.is_nested:
            call.is_nested = True
            yield from _members(calls, call)
        else:
            rest = yield from read_value(char, _ignore)
        char = yield from space(rest)
        if char == ",":
            char = yield from space()
            if char == "}":
                raise Malformed
        elif char != "}":
            raise Malformed


def _tell_at_once(calls: Calls, name: str, arguments: list[str]) -> None:
    """Of arguments that came before the name, as a string of JSON, or not at all. Raises Malformed."""
    text = "".join(arguments).strip() or "{}"
    value: Any = json.loads(text)
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Malformed from None
        fit = as_json(value)
        text = text if is_whole(text) else fit
    if value is None:
        text, value = "{}", {}
    if not isinstance(value, dict):
        raise Malformed
    calls.start(name)
    calls.give(text)
    calls.finish()


def _ignore(text: str) -> None:
    pass


def _text(char: str) -> Reading:
    """A string that begins with `char`."""
    if char != '"':
        raise Malformed
    kept: list[str] = [char]

    def keep(text: str) -> None:
        kept.append(text)
        if len(kept) > 2 * MAX_NAME:
            raise Malformed

    yield from _string(keep)
    return str(json.loads("".join(kept)))


def read_value(char: str, give: Give) -> Reading:
    """One value that begins with `char`, a character that is no white space. Every character of it is given as it
    comes. Returns the character behind it, if that had to be read. Raises Malformed where JSON ends."""
    stack: list[str] = []
    while True:
        rest = ""
        if char == '"':
            give(char)
            yield from _string(give)
        elif char in _CLOSING:
            give(char)
            opened = char
            char = yield from _space(give)
            if char == _CLOSING[opened]:
                give(char)
            else:
                if len(stack) == MAX_DEPTH:
                    raise Malformed
                stack.append(opened)
                if opened == "{":
                    char = yield from _key(char, give)
                continue
        else:
            rest = yield from _scalar(char, give)
        while stack:
            char = yield from _space(give, rest)
            rest = ""
            if char == ",":
                give(char)
                char = yield from _space(give)
                if stack[-1] == "{":
                    char = yield from _key(char, give)
                break
            if char != _CLOSING[stack[-1]]:
                raise Malformed
            give(char)
            stack.pop()
        else:
            return rest


def _key(char: str, give: Give) -> Reading:
    """A key and its colon. Returns the first character of what follows."""
    if char != '"':
        raise Malformed
    give(char)
    yield from _string(give)
    char = yield from _space(give)
    if char != ":":
        raise Malformed
    give(char)
    return (yield from _space(give))


def _string(give: Give) -> Generator[None, str, None]:
    """Behind the opening quote."""
    while True:
        char = yield
        if char < " ":
            raise Malformed
        give(char)
        if char == '"':
            return
        if char == "\\":
            char = yield
            if char not in '"\\/bfnrtu':
                raise Malformed
            give(char)
            for _ in range(4 if char == "u" else 0):
                digit = yield
                if digit not in "0123456789abcdefABCDEF":
                    raise Malformed
                give(digit)


def _scalar(char: str, give: Give) -> Reading:
    """Returns the character behind it."""
    text = ""
    while char in _IN_SCALAR:
        give(char)
        text += char
        if len(text) > MAX_NAME:
            raise Malformed
        char = yield
    if _SCALAR.fullmatch(text) is None:
        raise Malformed
    return char


def _space(give: Give, char: str = "") -> Reading:
    """As `space`, of JSON's own white space, which is given too."""
    char = char or (yield)
    while char in " \t\n\r":
        give(char)
        char = yield
    return char
