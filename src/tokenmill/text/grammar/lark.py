"""Spelling texts and patterns as Lark wants them."""

from __future__ import annotations


def quote(text: str) -> str:
    """A string of Lark that matches `text` alone."""
    return '"' + "".join(map(_spell, text)) + '"'


def quote_regex(pattern: str) -> str:
    """A regular expression of Lark that matches as `pattern` does. Digits and letters of \\d and \\w are ASCII ones:
    nobody who asks for a number wants it in another script."""
    out, place, is_in_set = [], 0, False
    while place < len(pattern):
        char, follower = pattern[place], pattern[place + 1 : place + 2]
        if char == "\\" and follower:
            plain = _ASCII.get(follower)
            if plain is None or (is_in_set and follower.isupper()):
                out.append("\\" + {"\n": "n"}.get(follower, follower))
            else:
                negation = "^" if follower.isupper() else ""
                out.append(plain if is_in_set else f"[{negation}{plain}]")
            place += 2
            continue
        if char == "[" and not is_in_set:
            is_in_set = True
            if follower in ("^", "]"):  # a bracket that comes first is a member
                start = pattern[place : place + 3] if pattern[place + 1 : place + 3] == "^]" else char + follower
                out.append(start)
                place += len(start)
                continue
        elif char == "]":
            is_in_set = False
        out.append({"/": "\\/", "\n": "\\n"}.get(char, char))
        place += 1
    return "/" + "".join(out) + "/"


_ASCII = {"d": "0-9", "D": "0-9", "w": "a-zA-Z0-9_", "W": "a-zA-Z0-9_"}


def _spell(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char
