"""Mistral: behind [TOOL_CALLS], a list of objects (until v7 of its tokenizer), or a name, [ARGS] and arguments, with
the mark again before each further call (since v11; [CALL_ID] and an id may come between)."""

from __future__ import annotations

from .family import Family, Form
from .json_calls import read_calls, read_value
from .parser import MAX_NAME, Calls, Malformed, Reading, literal, space

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_SIZE = 9


def _read(calls: Calls, marker: str) -> Reading:
    char = yield from space()
    if char in "[{":
        return (yield from read_calls(calls, "", char))
    name = ""
    while char not in "[{" and not char.isspace():
        name += char
        if len(name) > MAX_NAME:
            raise Malformed
        char = yield
    if name not in calls.tools:
        raise Malformed
    char = yield from space(char)
    if char == "[":
        char = yield from _marks()
    if char != "{":
        raise Malformed
    calls.start(name)
    yield from read_value(char, calls.give)
    calls.finish()
    return ""


def _marks() -> Reading:
    """Behind a bracket that opens [ARGS] or [CALL_ID]. Returns the first character of the arguments."""
    char = yield
    if char == "C":
        yield from literal(CALL_ID[1:], char)
        size = 0
        while (char := (yield)) != "[":
            size += 1
            if size > MAX_NAME:
                raise Malformed
        char = ""
    yield from literal(ARGS[1:], char)
    return (yield from space())


_LIST = Form(
    opening='{"name": "{name}", "arguments": ', closing="}", before=MARK + "[", between=", ", after="]", trigger=MARK
)
MISTRAL = Family("mistral", (MARK,), _read, Form(opening=MARK + "{name}" + ARGS, trigger=MARK), id_size=ID_SIZE)
MISTRAL_LIST = Family("mistral_list", (MARK,), _read, _LIST, id_size=ID_SIZE)
