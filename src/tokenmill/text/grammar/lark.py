"""Spelling texts and patterns as Lark wants them."""

from __future__ import annotations


def quote(text: str) -> str:
    """A string of Lark that matches `text` alone."""
    return '"' + "".join(map(_spell, text)) + '"'


def quote_regex(pattern: str) -> str:
    """A regular expression of Lark that matches as `pattern` does."""
    out, escaped = [], False
    for char in pattern:
        if escaped:
            out.append("\\" + ("n" if char == "\n" else char))
        elif char != "\\":
            out.append({"/": "\\/", "\n": "\\n"}.get(char, char))
        escaped = char == "\\" and not escaped
    return "/" + "".join(out) + ("\\" if escaped else "") + "/"


def _spell(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char
