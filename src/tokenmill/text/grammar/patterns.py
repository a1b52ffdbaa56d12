"""Patterns and texts of strings, spelled so that the library enforces them; string formats, and all strings but some,
as patterns.

JSON text escapes quotes, backslashes and control characters. There llguidance 1.9 takes more than it is told to:

- for a set of characters that has NUL but lacks a quote or backslash, the escaped ones too; without NUL in the set it
  does not, and no answer has a use for NUL;
- for a control character that has no escape of its own (it has neither \n nor \t, ...), no character at all. Such are
  refused.

`tests/unit/test_grammar_patterns.py` looks whether that is still so. The pattern of a format may take less than the
format allows (no leap seconds, no rare forms of hosts), never more: what it takes passes the checkers of formats that
callers use. Source: RFC 3339 (dates), RFC 3986 (URIs), RFC 6901 (JSON pointers), RFC 1123 (host names).
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence

_ESCAPED = ('"', "\\")
_NAMED = frozenset("\b\t\n\f\r")
CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|x\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|([0ave]))")
ESCAPE = re.compile(r"\\(?:[pP]\{[^}]*\}|.)", re.DOTALL)
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
            if code := CODE.match(pattern, place):
                end = code.end()
                check_text(code_point(code))
            out.append(pattern[place:end])
        elif pattern[place] == "[":
            end, members = plain_set(pattern, place)
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


def code_point(code: re.Match[str]) -> str:
    """The character. Raises CannotMend where there is none of that number."""
    *numbers, letter = code.groups()
    if letter:
        return _LETTERS[letter]
    value = int(next(digits for digits in numbers if digits), 16)
    if value > sys.maxunicode or 0xD800 <= value < 0xE000:
        raise CannotMend(f"the escape {code[0]}, which is no character")
    return chr(value)


def plain_sets(pattern: str) -> str:
    """`pattern` with its sets spelled so that the library reads them as others do: for it "&&", "--" and "~~" are
    operators, and "[" begins a set within the set."""
    out, place = [], 0
    while place < len(pattern):
        if pattern[place] == "[":
            end, piece = plain_set(pattern, place)
        else:
            end = place + (2 if pattern[place] == "\\" else 1)
            piece = pattern[place:end]
        out.append(piece)
        place = end
    return "".join(out)


def plain_set(pattern: str, start: int) -> tuple[int, str]:
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
    if found := CODE.match(pattern, place) or ESCAPE.match(pattern, place) or _CLASS.match(pattern, place):
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


_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{_HOUR})"

_END, _MID = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_HOST_LABEL = (  # without "--" in the third and fourth place, which only encoded international names may have
    f"(?:{_END}(?:{_MID}?{_END})?"
    f"|{_END}{_MID}{{2}}{_END}"
    f"|{_END}{_MID}(?:{_MID}{_END}|{_END}{_MID}){_MID}{{0,58}}{_END})"
)

_PERCENT = "%[0-9a-fA-F]{2}"
_CHAR = r"[a-zA-Z0-9\-._~!$&'()*+,;=:@]"
_SEGMENT = f"(?:{_CHAR}|{_PERCENT})*"
_SEGMENT_NZ = f"(?:{_CHAR}|{_PERCENT})+"
_SEGMENT_NC = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=@]|{_PERCENT})+"
_REG_NAME = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|{_PERCENT})*"
_TAIL = rf"(?:\?(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|{_PERCENT})*)?(?:#(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|{_PERCENT})*)?"
_AUTHORITY = rf"{_REG_NAME}(?::[0-9]{{0,5}})?"
_PATH = f"//{_AUTHORITY}(?:/{_SEGMENT})*|/(?:{_SEGMENT_NZ}(?:/{_SEGMENT})*)?"
_URI_REFERENCE = (
    rf"(?:[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_PATH}|{_SEGMENT_NZ}(?:/{_SEGMENT})*|)"
    rf"|(?:{_PATH}|{_SEGMENT_NC}(?:/{_SEGMENT})*|)){_TAIL}"
)

_POINTER = "(?:/(?:[^~/]|~[01])*)*"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "hostname": rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*",
    "uri-reference": _URI_REFERENCE,
    "json-pointer": _POINTER,
}
"""Formats that are enforced by a pattern of ours, which matches a whole string."""

BUILT_IN = frozenset({"duration", "email", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that the library enforces."""

FREE = frozenset({"binary", "byte", "password", "unknown"})
"""Formats of strings that say how a text is meant, not what it is, as OpenAPI has them."""

NUMERIC = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double"})
"""Formats that say something of numbers only: hints on how to keep them, as OpenAPI has it."""


MAX_CHARS = 4000

_ANY = r"[\s\S]*"
_SPECIAL = frozenset(r"\.^$*+?()[]{}|/-&~#")

_Trie = dict[str, "_Trie"]
_WHOLE = ""
"""The key that says that a text ends here."""


class TooLong(Exception):
    """The texts together are longer than a pattern should be."""


def other_strings(texts: Sequence[str]) -> str:
    """A pattern that matches a whole string that is none of `texts`; "" where there are none. It begins with one text's
    first letters and then leaves all of them, as paths out of a trie."""
    if not texts:
        return ""
    if sum(map(len, texts)) > MAX_CHARS:
        raise TooLong
    trie: _Trie = {}
    for text in texts:
        place = trie
        for char in text:
            place = place.setdefault(char, {})
        place[_WHOLE] = {}
    return mend(f"^(?:{_leave(trie)})$")


def _leave(trie: _Trie) -> str:
    chars = sorted(char for char in trie if char != _WHOLE)
    ways = [] if _WHOLE in trie else [""]
    ways.append(f"[^{''.join(map(_escape, chars))}]{_ANY}" if chars else rf"[\s\S]{_ANY}")
    ways += [f"{_escape(char)}(?:{_leave(trie[char])})" for char in chars]
    return "|".join(ways)


def _escape(char: str) -> str:
    if char in _SPECIAL:
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 else char
