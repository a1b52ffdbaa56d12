"""All strings but some, as a pattern without look-around."""

from __future__ import annotations

from collections.abc import Sequence

from .patterns import mend

MAX_CHARS = 4000

_ANY = r"[\s\S]*"
_SPECIAL = frozenset(r"\.^$*+?()[]{}|/-&~#")

_Trie = dict[str, "_Trie"]
_END = ""
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
        place[_END] = {}
    return mend(f"^(?:{_leave(trie)})$")


def _leave(trie: _Trie) -> str:
    chars = sorted(char for char in trie if char != _END)
    ways = [] if _END in trie else [""]
    ways.append(f"[^{''.join(map(_escape, chars))}]{_ANY}" if chars else rf"[\s\S]{_ANY}")
    ways += [f"{_escape(char)}(?:{_leave(trie[char])})" for char in chars]
    return "|".join(ways)


def _escape(char: str) -> str:
    if char in _SPECIAL:
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 else char
