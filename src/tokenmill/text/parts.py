"""What a choice says, taken apart: words, reasoning, calls of tools. Knows no model family and no API.

A parser turns the text of one choice into parts as it comes; every API writes its answer from parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's own words."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins. `index`: its number in the choice, from 0; `id` names it in tool results; `is_custom`:
    the tool takes a text, which its arguments are."""

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`: JSON text, whole when the choice or the next call begins; or of the text
    that a custom tool takes."""

    index: int
    text: str
    is_custom: bool = False


Part = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Takes the text of one choice apart. However the text is cut, the same parts come out when equal neighbours are
    joined."""

    def push(self, text: str) -> list[Part]:
        """What has become certain with this text. What may yet turn out to be a marker is held back."""
        ...

    def end(self) -> list[Part]:
        """What was held back, once there is no more text."""
        ...
