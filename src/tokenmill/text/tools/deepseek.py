"""DeepSeek: within <｜tool▁calls▁begin｜> and its end, each call with marks of its own.

V3 and R1 write the word "function" before the separator, and the name and a fenced block behind it; V3.1 writes the
name before it and bare JSON behind it.
"""

from __future__ import annotations

from .family import Family, Form
from .json_calls import read_value
from .parser import MAX_NAME, Calls, Malformed, Reading, ending, literal, space, until

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "```json", "```"


def _read(calls: Calls, marker: str) -> Reading:
    if marker == ALL:
        yield from literal(ONE, (yield from space()))
    while True:
        yield from _read_one(calls)
        char = yield from space()
        rest = yield from _either(char)
        if rest != ONE:
            return "" if rest == ALL_END else rest


def _read_one(calls: Calls) -> Reading:
    """Behind its first mark."""
    name = (yield from until((SEPARATOR,), most=MAX_NAME)).strip()
    is_fenced = name == "function"
    if is_fenced:
        name = (yield from until(("\n",), most=MAX_NAME)).strip()
        yield from literal(_FENCE, (yield from space()))
    char = yield from space()
    if name not in calls.tools or char != "{":
        raise Malformed
    calls.start(name)
    yield from read_value(char, calls.give)
    calls.finish()
    char = yield from space()
    if is_fenced:
        char = (yield from ending(_FENCE_END, char)) or (yield from space())
    yield from literal(ONE_END, char)
    return ""


def _either(read: str) -> Reading:
    """Which of the two marks follows; or what was read, which is neither."""
    while any(mark.startswith(read) for mark in (ONE, ALL_END)):
        if read in (ONE, ALL_END):
            return read
        read += yield
    return read


def _form(opening: str, closing: str, between: str) -> Form:
    return Form(
        opening=ONE + opening, closing=closing + ONE_END, before=ALL, after=ALL_END, between=between, trigger=ALL
    )


_MARKERS, _ENDS = (ALL, ONE), (ONE_END, ALL_END)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _MARKERS,
    _read,
    _form(f"function{SEPARATOR}{{name}}\n{_FENCE}\n", f"\n{_FENCE_END}", "\n"),
    ends=_ENDS,
)
DEEPSEEK_V31 = Family("deepseek_v31", _MARKERS, _read, _form("{name}" + SEPARATOR, "", ""), ends=_ENDS)
