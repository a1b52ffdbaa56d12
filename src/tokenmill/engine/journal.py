"""The record of one EngineCore: what it was told, and what it planned.

The core is deterministic, so a fresh core that is told the same makes the same plans (`replay`). This holds only from
the core's start, because plans depend on everything that its prefix cache has seen. A journal therefore records one run
of an engine from its start; if it must be cut, it is cut at the end.

In a file it is lines of JSON (`encoding`): a header with the version and the engine's settings, then one entry a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core.config import EngineConfig
from ..core.effects import Event
from ..core.step import StepPlan, StepResult
from .encoding import decode, encode, whole

VERSION = 1


@dataclass(frozen=True, slots=True)
class Handled:
    event: Event
    now: float


@dataclass(frozen=True, slots=True)
class Planned:
    """`plan` None: there was nothing to run."""

    plan: StepPlan | None
    now: float


@dataclass(frozen=True, slots=True)
class Committed:
    result: StepResult
    now: float


Entry = Handled | Planned | Committed
Recorder = Callable[[Entry], None]
"""Hears of events and results before they take effect, of plans once they are made."""


@dataclass(frozen=True, slots=True)
class Header:
    version: int
    config: EngineConfig


def header_line(config: EngineConfig) -> str:
    """With every setting: the defaults of a later build may be others."""
    return encode({"type": "Header", "version": VERSION, "config": whole(config)})


def entry_line(entry: Entry) -> str:
    return encode(entry)


def read_journal(lines: Iterable[str]) -> tuple[EngineConfig, Iterator[Entry]]:
    """The settings and the entries, read as they are asked for. A last line without an end, of an engine that was
    killed as it wrote, is left out. Raises ValueError, with the number of the line."""
    lines = iter(lines)
    header = _read(next(lines, ""), 1, Header)
    if header.version != VERSION:
        raise ValueError(f"The journal is of version {header.version}; this build reads version {VERSION}.")
    return header.config, (_read(line, number, Entry) for number, line in enumerate(lines, 2) if line.endswith("\n"))


def _read(line: str, number: int, kind: Any) -> Any:
    try:
        return decode(line, kind)
    except ValueError as error:
        raise ValueError(f"Line {number} is not of a journal: {error}") from error
