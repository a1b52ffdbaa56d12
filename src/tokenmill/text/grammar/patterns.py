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
_ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|.)", re.DOTALL)
_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
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
            end, members = _plain_set(pattern, place)
            out.append(_mend_set(members))
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


def plain_sets(pattern: str) -> str:
    """`pattern` with its sets spelled so that the library reads them as others do: for it "&&", "--" and "~~" are
    operators, and "[" begins a set within the set."""
    out, place = [], 0
    while place < len(pattern):
        if pattern[place] == "[":
            end, piece = _plain_set(pattern, place)
        else:
            end = place + (2 if pattern[place] == "\\" else 1)
            piece = pattern[place:end]
        out.append(piece)
        place = end
    return "".join(out)


def _plain_set(pattern: str, start: int) -> tuple[int, str]:
    """(where the set that begins at `start` ends, its spelling). One that does not end stays as it is."""
    opening = "[^" if pattern.startswith("[^", start) else "["
    out, place = [opening], start + len(opening)
    while place < len(pattern):
        if pattern[place] == "]" and len(out) > 1:
            return place + 1, "".join([*out, "]"])
        place, member = _member(pattern, place)
        if pattern[place : place + 1] == "-" and pattern[place + 1 : place + 2] not in ("", "]"):
            place, last = _member(pattern, place + 1)
            member = f"{member}-{last}"
        out.append(member)
    return len(pattern), pattern[start:]


def _member(pattern: str, place: int) -> tuple[int, str]:
    """(where the character or class of a set that begins at `place` ends, its spelling)."""
    if found := _CODE.match(pattern, place) or _ESCAPE.match(pattern, place) or _CLASS.match(pattern, place):
        return found.end(), found[0]
    char = pattern[place]
    return place + 1, f"\\x{ord(char):02x}" if char in "[]&~-" else char


def _mend_set(text: str) -> str:
    if found := _CLASS.search(text, 1):
        raise CannotMend(f"the class {found[0]}")
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
