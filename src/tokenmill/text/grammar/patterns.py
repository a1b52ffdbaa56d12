"""Patterns and texts of strings, spelled so that the library enforces them.

JSON text escapes quotes, backslashes and control characters. There llguidance 1.9 takes more than it is told to:

- for a set of characters that has NUL but lacks a quote or backslash, the escaped ones too; without NUL in the set it
  does not, and no answer has a use for NUL;
- for a control character that has no escape of its own (it has neither \\n nor \\t, ...), no character at all. Such are
  refused.

`tests/unit/test_grammar_patterns.py` looks whether that is still so.
"""

from __future__ import annotations

import re
import warnings

_ESCAPED = ('"', "\\")
_NAMED = frozenset("\b\t\n\f\r")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|x\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|([0ave]))")
_LETTERS = {"0": "\0", "a": "\a", "v": "\v", "e": "\x1b"}


class CannotMend(Exception):
    """`args[0]`: what of a pattern or text cannot be spelled safely."""


def check_text(text: str) -> None:
    """Raises CannotMend for a text with a character that no answer can have."""
    for char in text:
        if _is_unspeakable(char):
            raise CannotMend(f"the character U+{ord(char):04X}")


def mend(pattern: str) -> str:
    """`pattern` as the library is to be told it. Raises CannotMend."""
    out, place = [], 0
    while place < len(pattern):
        if pattern[place] == "\\":
            end = place + 2
            if code := _CODE.match(pattern, place):
                end = code.end()
                check_text(_meaning(code))
            out.append(pattern[place:end])
        elif pattern[place] == "[":
            end = _end_of_set(pattern, place)
            out.append(_mend_set(pattern[place:end]))
        else:
            end = place + 1
            check_text(pattern[place])
            out.append(pattern[place])
        place = end
    return "".join(out)


def _is_unspeakable(char: str) -> bool:
    code = ord(char)
    return (code < 32 and char not in _NAMED) or code == 127 or 0xD800 <= code < 0xE000


def _meaning(code: re.Match[str]) -> str:
    *numbers, letter = code.groups()
    if letter:
        return _LETTERS[letter]
    value = int(next(digits for digits in numbers if digits), 16)
    return chr(value) if value < 0xD800 else "?"


def _end_of_set(pattern: str, start: int) -> int:
    place = start + 1
    if pattern[place : place + 1] == "^":
        place += 1
    if pattern[place : place + 1] == "]":
        place += 1
    depth = 1
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1
        elif pattern[place] == "[":
            depth += 1
        elif pattern[place] == "]":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return len(pattern)


def _mend_set(text: str) -> str:
    is_negated = text.startswith("[^")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(text, re.ASCII)
    except re.error:  # a spelling that Python lacks
        return text[:-1] + r"\x00]" if is_negated else text
    if compiled.match("\0") and not all(map(compiled.match, _ESCAPED)):
        if not is_negated:
            raise CannotMend(f"the set {text}")
        return text[:-1] + r"\x00]"
    members = [char for char in map(chr, range(256)) if compiled.match(char)]
    if len(members) == 1 and _is_unspeakable(members[0]):
        raise CannotMend(f"the set {text}")
    return text
