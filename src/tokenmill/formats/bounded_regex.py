"""Matches a stranger's regular expression in bounded time.

The patterns of an adapter's config choose modules by name. Python's own engine tries paths one by one, which a hostile
pattern makes endless; this one follows all paths at once, as a set of places in the text (Thompson, 1968), and gives up
after a fixed number of steps. It knows what such patterns are made of: characters, '.', classes, escapes \\d \\w \\s
and their opposites, groups, '|', '*', '+', '?', '{m,n}', '^' and '$'.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_CHARS = 2000
MAX_STEPS = 200_000
MAX_REPEATS = 100

_CLASSES = "dDwWsS"
_COUNT = re.compile(r"\{(\d{1,3})(,?)(\d{0,3})\}")

Places = frozenset[int]
_Part = Callable[[str, Places], Places]
"""(text, where the part may begin) -> where it may end"""


class BadPattern(ValueError):
    """A pattern that cannot be read, or takes too long."""


class Pattern:
    """Raises BadPattern, here and in `ends`."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARS:
            raise BadPattern(f"it has more than {MAX_CHARS} characters")
        self._source = source
        self._at = 0
        self._steps = 0
        self._part = self._either()
        if self._at < len(source):
            raise BadPattern(f"unexpected {source[self._at]!r} at {self._at}")

    def ends(self, text: str, begins: Places) -> Places:
        """Where a match may end that begins at one of the places."""
        self._steps = 0
        return self._part(text, begins)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _either(self) -> _Part:
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        return lambda text, begins: frozenset[int]().union(*(part(text, begins) for part in parts))

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            parts.append(self._repeated(self._atom()))

        def run(text: str, begins: Places) -> Places:
            for part in parts:
                begins = part(text, begins) if begins else begins
            return begins

        return run

    def _repeated(self, part: _Part) -> _Part:
        least, most = 1, 1
        found = _COUNT.match(self._source, self._at)
        if found is not None:
            self._at = found.end()
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else -1
        elif self._take("*"):
            least, most = 0, -1
        elif self._take("+"):
            least, most = 1, -1
        elif self._take("?"):
            least = 0
        else:
            return part
        if max(least, most) > MAX_REPEATS or 0 <= most < least:
            raise BadPattern(f"a part repeats {least} to {most} times; at most {MAX_REPEATS} are supported")
        self._take("?")  # whether a repeat is greedy does not change where it may end
        if self._at < len(self._source) and self._source[self._at] in "*+?{":
            raise BadPattern("a repeat of a repeat")

        def run(text: str, begins: Places) -> Places:
            for _ in range(least):
                begins = part(text, begins)
            ends, fresh, count = begins, begins, least
            while fresh and count != most:
                fresh = part(text, fresh) - ends
                ends |= fresh
                count += 1
            return ends

        return run

    def _atom(self) -> _Part:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise BadPattern("groups that begin with '(?' are supported as '(?:' only")
            inside = self._either()
            if not self._take(")"):
                raise BadPattern("a group is not closed")
            return inside
        if char == "^":
            return lambda text, begins: begins & {0}
        if char == "$":
            return lambda text, begins: begins & {len(text)}
        if char in "*+?{":
            raise BadPattern(f"nothing to repeat before {char!r}")
        one = re.compile(self._one_char(char), re.DOTALL)

        def run(text: str, begins: Places) -> Places:
            self._steps += 1 + len(begins)
            if self._steps > MAX_STEPS:
                raise BadPattern("it takes too long")
            return frozenset(at + 1 for at in begins if at < len(text) and one.match(text[at]))

        return run

    def _one_char(self, char: str) -> str:
        """A Python pattern of one character."""
        if char == ".":
            return "."
        if char == "\\":
            return self._escape()
        if char != "[":
            return re.escape(char)
        inside = "[^" if self._take("^") else "["
        while True:
            char = self._next()
            if char == "]" and inside not in ("[", "[^"):
                break
            inside += self._escape() if char == "\\" else "\\" + char if char in "[]^&~|" else char
        try:
            re.compile(inside + "]")
        except re.error as error:
            raise BadPattern(f"a class of characters is malformed: {error}") from None
        return inside + "]"

    def _escape(self) -> str:
        char = self._next()
        if char.isalnum() and char not in _CLASSES:
            raise BadPattern(f"\\{char} is not supported")
        return f"\\{char}"

    def _next(self) -> str:
        if self._at == len(self._source):
            raise BadPattern("it ends too early")
        self._at += 1
        return self._source[self._at - 1]

    def _take(self, char: str) -> bool:
        found = self._source.startswith(char, self._at)
        self._at += found
        return found


def matches_tail(source: str, name: str) -> bool:
    """Whether the pattern matches a dotted name, or what follows one of its dots, to the end: as PEFT chooses modules.
    Raises BadPattern."""
    begins = frozenset({0, *(at + 1 for at, char in enumerate(name) if char == ".")})
    return len(name) in Pattern(source).ends(name, begins)
