"""JSON that stops in the middle, as the arguments of a call do that max_tokens has cut off. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

_CLOSER = {"{": "}", "[": "]"}


def read_object(text: str) -> dict[str, Any]:
    """The object that `text` writes, as far as it goes: what is open is closed, what has no value is left out. An empty
    object where there is none."""
    for candidate in _candidates(text):
        try:
            value = msgspec.json.decode(candidate)
        except msgspec.MsgspecError:
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _candidates(text: str) -> list[str]:
    """The text as it is, then closed at its end, then where the value before its last ended."""
    open_: list[str] = []
    ends: list[tuple[int, str]] = []  # where a closing may follow, and which
    in_string = is_escaped = False
    for position, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = not is_escaped and char == "\\"
            continue
        if char == '"':
            in_string = True
        elif char == ",":
            ends.append((position, _closing(open_)))
        elif char in _CLOSER:
            open_.append(char)
            ends.append((position + 1, _closing(open_)))
        elif char in "}]" and open_:
            open_.pop()
    closing = _closing(open_)
    found = [text, text + closing]
    if in_string:
        cut = text.rfind("\\")
        found += [f'{text}"{closing}', f'{text[:cut]}"{closing}'] if cut >= 0 else [f'{text}"{closing}']
    return found + [text[:position] + rest for position, rest in ends[-1:]]


def _closing(open_: list[str]) -> str:
    return "".join(_CLOSER[char] for char in reversed(open_))
