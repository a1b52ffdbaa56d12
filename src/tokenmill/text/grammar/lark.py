"""Spelling texts and patterns as Lark wants them."""

from __future__ import annotations

import re

from .patterns import plain_sets


def quote(text: str) -> str:
    """A string of Lark that matches `text` alone."""
    return '"' + "".join(map(_spell, text)) + '"'


def quote_regex(pattern: str) -> str:
    """A regular expression of Lark that matches as `pattern` does. Digits and letters of \\d and \\w are ASCII ones:
    nobody who asks for a number wants it in another script."""
    return "/" + _OUTSIDE.sub(_respell, plain_sets(pattern)) + "/"


def _respell(found: re.Match[str]) -> str:
    text = found[0]
    return _ASCII.get(text) or {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(text, text)


_OUTSIDE = re.compile(r"\\.|/|\n", re.DOTALL)
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[a-zA-Z0-9_]", r"\W": "[^a-zA-Z0-9_]"}
"""Sets, which may stand within other sets."""


def _spell(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char
