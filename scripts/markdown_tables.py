"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def table(*heads: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    yield "\n".join(lines)


def _cell(text: str) -> str:
    """Outside of `code`, characters that Markdown reads are escaped; a bar is in both."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{text}`"


def codes(texts: Iterable[str]) -> str:
    return ", ".join(map(code, texts))


def grouped(pairs: Iterable[tuple[str, T]]) -> list[tuple[T, str]]:
    """Each value with the names that have it, in the order in which values were met."""
    found: dict[T, list[str]] = {}
    for name, value in pairs:
        found.setdefault(value, []).append(name)
    return [(value, codes(names)) for value, names in found.items()]
