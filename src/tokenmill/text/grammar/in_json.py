r"""Grammars of texts that are written within a string of JSON: what a tool that takes free text is given.

A call's arguments are JSON in the form of every model family, so its text stands there escaped. A Lark grammar of the
text becomes one of the escaped text: each character is spelled as JSON spells it. What JSON can only write as \uXXXX
(control characters but the usual ones) is in no answer.

The library reads a terminal as far as it goes and never goes back. That is wrong for escapes, which all begin with a
backslash: behind "[^\n]+" it would take the backslash of a line break for that of a tab. So terminals become rules over
single characters, which the library's parser follows. That is slower, by a millisecond or so a token, and right.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator

from .patterns import CODE, ESCAPE, CannotMend, check_text, code_point, plain_set

_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_NAMED_IN_TEXT = {**_NAMED, "b": "\b"}
"""In a pattern it is the border of a word."""
_ESCAPE_IN_TEXT = re.compile(
    r"\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|.)",
    re.DOTALL,
)
"""As JSON has them, a surrogate pair for one character among them."""
_CLASSES = {"d": "[0-9]", "w": "[a-zA-Z0-9_]", "s": r"[\s]", "D": "[^0-9]", "W": "[^a-zA-Z0-9_]", "S": r"[^\s]"}
_PLAIN = r"[^\x22\x5c\x00-\x1f\x7f]"
"""What stands in a string of JSON as it is."""

_TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<range>"(?:[^"\\\n]|\\.)+"\s*\.\.\s*"(?:[^"\\\n]|\\.)+")
    |(?P<text>"(?:[^"\\\n]|\\.)*")(?P<fold>i?)
    |(?P<regex>/(?!/)(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/)(?P<flags>[a-z]*)
    |%import\s+common\.(?P<common>[A-Z_]+)(?:\s*->\s*(?P<alias>[A-Z_0-9]+))?
    |(?P<ignore>%ignore\b)|(?P<directive>%[a-z]+)|(?P<mark><[^>\n]*>|@|&|~(?!\s*\d))
    |(?P<name>[A-Za-z_][A-Za-z_0-9]*)(?P<defined>(?:\.-?\d+)?\s*:)?|(?P<other>->|.)""",
    re.VERBOSE | re.DOTALL,
)
_GROUP = re.compile(r"\(\?(?:P?<[A-Za-z_]\w*>|(?P<on>[a-z]*)(?:-(?P<off>[a-z]+))?(?P<end>[:)]))")
_SLASH = r"\x2f"
_TIMES = re.compile(r"\{\d+(?:,\d*)?\}|[*+?]")

_COMMON = {
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "NUMBER": r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+([eE][+-]?[0-9]+)?)",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": "[ \\t]+", "WS": "[ \\t\\f\\r\\n]+", "CR": "\\r", "LF": "\\n",
    "NEWLINE": "(\\r?\\n)+", "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
}  # fmt: skip
"""Terminals that Lark's library of common ones has."""


def lark_in_json(text: str) -> str:
    """The Lark grammar of what JSON makes of the texts of `text`. Raises CannotMend."""
    return "".join(_Grammar(text).pieces())


def regex_in_json(pattern: str) -> str:
    """The same of a pattern, which a whole text must match."""
    return f"start: {pattern_in_json(pattern)}\n"


class _Grammar:
    """One on the way. Terminals have the names of rules; what is ignored stands behind each of them in a rule."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ignores = "%ignore" in text
        self._is_rule = False

    def pieces(self) -> Iterator[str]:
        ignored = []
        found = iter(_TOKEN.finditer(self._text))
        for token in found:
            if token["ignore"] is not None:
                self._is_rule = False
                ignored.append("".join(self._piece(each) for each in _line(found)))
                yield "\n"
            else:
                yield self._piece(token)
        if ignored:
            yield f"\nstart: t__skip t__start\nt__skip: ({' | '.join(f'({each})' for each in ignored)})*\n"

    def _piece(self, found: re.Match[str]) -> str:
        if found["comment"] is not None:
            return ""
        if found["name"] is not None:
            return self._name(found["name"], is_defined=found["defined"] is not None)
        if found["range"] is not None:
            first, last = (_unescaped(each) for each in re.findall(r'"((?:[^"\\\n]|\\.)+)"', found["range"]))
            if len(first) != 1 or len(last) != 1:
                raise CannotMend(f"the range {found['range']}")
            return self._terminal(_set(f"[{_in_set(first)}-{_in_set(last)}]"))
        if found["text"] is not None:
            chars = [_char(char, found["fold"]) for char in _unescaped(found["text"][1:-1])]
            return self._terminal(f"({' '.join(chars)})" if chars else '""')
        if found["regex"] is not None:
            flags = found["flags"]
            pattern = f"(?{flags}:{found['regex'][1:-1]})" if flags else found["regex"][1:-1]
            return self._terminal(f"({pattern_in_json(pattern)})")
        if found["common"] is not None:
            if found["common"] not in _COMMON:
                raise CannotMend(f"common.{found['common']}")
            self._is_rule = False
            name = self._name(found["alias"] or found["common"], is_defined=True)
            return f"{name} {pattern_in_json(_COMMON[found['common']])}"
        if found["directive"] is not None or found["mark"] is not None:
            raise CannotMend(found[0][:40])
        return found[0]

    def _name(self, name: str, *, is_defined: bool) -> str:
        is_terminal = name.upper() == name
        if is_terminal:
            name = f"t_{name.lower()}"
        elif name == "start" and self._ignores:
            name = "t__start"
        if is_defined:
            self._is_rule = not is_terminal
            return f"{name}:"
        return self._terminal(name) if is_terminal else name

    def _terminal(self, text: str) -> str:
        return f"({text} t__skip)" if self._ignores and self._is_rule else text


def _line(found: Iterator[re.Match[str]]) -> Iterator[re.Match[str]]:
    """The tokens up to the end of the line."""
    for token in found:
        if token[0] == "\n":
            return
        yield token


def pattern_in_json(pattern: str) -> str:
    """As Lark: its characters are terminals. Raises CannotMend."""
    out: list[str] = []
    groups = [
        ("", False)
    ]  # of each open group, whether case counts ("i": it does not), and whether "." is a line break
    place = 0
    is_open = True  # an alternative begins
    while place < len(pattern):
        char, (fold, has_dots) = pattern[place], groups[-1]
        end, piece, opens = place + 1, "", False
        if times := _TIMES.match(pattern, place):
            end, piece = times.end(), times[0]
            end += pattern[end : end + 1] == "?"  # of the ways to match a text, it says which is found first
        elif char == "\\":
            end, piece = _escape(pattern, place, fold)
        elif char == "[":
            end, members = plain_set(pattern, place)
            piece = _set(members, fold)
        elif char == ".":
            piece = _set(r"[\s\S]" if has_dots else r"[^\n]")
        elif char == "(":
            end, piece, opens = _open(pattern, place, groups)
        elif char in ")|":
            piece, opens = ('"" ' * is_open) + char, char == "|"
            if char == ")" and len(groups) > 1:
                groups.pop()
        elif char in "^$":
            if place not in (0, len(pattern) - 1):  # a pattern stands for a whole text
                raise CannotMend(f"{char!r} within a pattern")
        else:
            piece = _char(char, fold)
        out.append(piece)
        is_open = opens or (is_open and not piece)
        place = end
    return " ".join([*filter(None, out), *(['""'] if is_open else [])])


def _open(pattern: str, place: int, groups: list[tuple[str, bool]]) -> tuple[int, str, bool]:
    """(where it ends, its spelling, whether a group begins) of a parenthesis; `groups` gets its flags."""
    fold, has_dots = groups[-1]
    group = _GROUP.match(pattern, place)
    if group is None:
        if pattern.startswith("(?", place):
            raise CannotMend(f"{pattern[place : place + 4]!r} in a pattern")
        groups.append((fold, has_dots))
        return place + 1, "(", True
    on, off = group["on"] or "", group["off"] or ""
    if (on + off).strip("isu"):
        raise CannotMend(f"the flags {group[0]}")
    fold = "" if "i" in off else "i" if "i" in on else fold
    has_dots = "s" not in off and ("s" in on or has_dots)
    if group["end"] == ")":
        groups[-1] = (fold, has_dots)
        return group.end(), "", False
    groups.append((fold, has_dots))
    return group.end(), "(", True


def _escape(pattern: str, place: int, fold: str) -> tuple[int, str]:
    if code := CODE.match(pattern, place):
        return code.end(), _char(code_point(code), fold)
    found = ESCAPE.match(pattern, place)
    if found is None:
        raise CannotMend("a backslash at the end of a pattern")
    letter = found[0][1]
    if letter in _CLASSES:
        return found.end(), _set(_CLASSES[letter])
    if letter in "pP":
        return found.end(), _set(f"[{found[0]}]")
    if letter.isalnum() and letter not in _NAMED:
        raise CannotMend(f"{found[0]} in a pattern")
    return found.end(), _char(_NAMED.get(letter, letter), fold)


def _char(char: str, fold: str = "") -> str:
    """One character, as a string of Lark of its spelling in JSON. Letters of escapes have one case."""
    check_text(char)
    return json.dumps(_ESCAPED.get(char, char), ensure_ascii=False) + ("" if char in _ESCAPED else fold)


def _set(text: str, fold: str = "") -> str:
    """A set of characters as a choice of their spellings. One that Python cannot read has those that its negation
    shows."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(text, re.ASCII)
        escaped = [char for char in _ESCAPED if compiled.match(char)]
    except re.error:
        escaped = list(_ESCAPED) if text.startswith(("[^", r"[\P")) else []
    plain = f"[{text.replace('/', _SLASH)}&&{_PLAIN}]"
    ways = [f"/(?i:{plain})/" if fold else f"/{plain}/"]
    return f"({' | '.join([*ways, *(_char(char) for char in escaped)])})"


def _in_set(char: str) -> str:
    return f"\\x{{{ord(char):x}}}" if ord(char) > 255 else f"\\x{ord(char):02x}"


def _unescaped(text: str) -> str:
    """A string of Lark as what it means. Raises CannotMend."""

    def meaning(found: re.Match[str]) -> str:
        if found["high"] is not None:
            return bytes.fromhex(found["high"] + found["low"]).decode("utf-16-be")
        if code := CODE.match(found[0]):
            return code_point(code)
        letter = found[0][1]
        if letter.isalnum() and letter not in _NAMED_IN_TEXT:
            raise CannotMend(f"{found[0]} in a text")
        return _NAMED_IN_TEXT.get(letter, letter)

    return _ESCAPE_IN_TEXT.sub(meaning, text)
