"""The record of one EngineCore: what it was told, and what it planned.

The core is deterministic, so a fresh core that is told the same makes the same plans (`replay`). This holds only from
the core's start, because plans depend on everything that its prefix cache has seen. A journal therefore records one run
of an engine from its start; if it must be cut, it is cut at the end.

In a file it is lines of JSON (`encode`): a header with the version and the engine's settings, then one entry a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from ..core.config import EngineConfig
from ..core.effects import Event
from ..core.errors import TokenmillError
from ..core.step import PlanRow, RowResult, StepPlan, StepResult

# Core types as JSON and back: what a journal is written in.
#
#     dataclass    {"type": its name, field: value, ...}, without fields that have their defaults
#     NamedTuple   a list of its values; those that are missing at the end get their defaults
#     tuple        a list
#     bytes        hexadecimal digits
#
# The types are read from the annotations of the fields, so that a new one needs no line here. A field added with a
# default, to a NamedTuple at its end, leaves older journals readable.


Decoder = Callable[[Any], Any]


def encode(value: object) -> str:
    """One line of JSON."""
    return _ENCODER.encode(value)


def decode(line: str, kind: Any) -> Any:
    """The value of type `kind` (a class, a tuple type or a union) that `encode` was given. Raises ValueError."""
    try:
        return _decoder(kind)(json.loads(line))
    except (LookupError, TypeError, AttributeError, AssertionError, TokenmillError) as error:
        raise ValueError(f"not {kind}: {type(error).__name__}: {error}") from error


def whole(value: Any) -> dict[str, Any]:
    """A dataclass, to be encoded with the fields that have their defaults too, but for those that say None."""
    kind: Any = type(value)
    given = {name: getattr(value, name) for name, _ in _defaults(kind)}
    return {"type": kind.__name__, **{name: field for name, field in given.items() if field is not None}}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    kind: Any = type(value)
    plain = {"type": kind.__name__}
    for name, default in _defaults(kind):
        field = getattr(value, name)
        if field is not default and field != default:
            plain[name] = _shortened(field) if type(field) is tuple and field else field
    return plain


_SHORTEST: dict[type, int] = {PlanRow: 8, RowResult: 11}
"""How many values are written of what a journal has many of, where all others have their defaults."""


def _shortened(rows: tuple[Any, ...]) -> tuple[Any, ...] | list[Any]:
    kind: Any = type(rows[0])
    num = _SHORTEST.get(kind)
    if num is None:
        return rows
    others = tuple(kind._field_defaults.values())[num - len(kind._fields) :]
    return [row[:num] if row[num:] == others else row for row in rows]


_ENCODER = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False)


@cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.default) for field in fields(kind) if field.init)


@cache
def _decoder(kind: Any) -> Decoder:
    if kind in (int, str, bool, NoneType):
        return partial(_same, kind)
    if kind is float:
        return float
    if kind is bytes:
        return bytes.fromhex
    if get_origin(kind) is tuple:
        return _tuple_decoder(*get_args(kind))
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(_dataclass, kind, _field_decoders(kind))
    if isinstance(kind, type) and issubclass(kind, tuple):
        return partial(_named_tuple, kind, tuple(_field_decoders(kind).values()))
    return _union_decoder(get_args(kind))


@cache
def _field_decoders(kind: Any) -> dict[str, Decoder]:
    return {name: _decoder(hint) for name, hint in get_type_hints(kind).items()}


def _tuple_decoder(first: Any, *others: Any) -> Decoder:
    if others != (...,):
        decoders = [_decoder(kind) for kind in (first, *others)]
        return lambda values: tuple(decode(value) for decode, value in zip(decoders, values, strict=True))
    if first in (int, str):
        return tuple
    one = _decoder(first)
    return lambda values: tuple(map(one, values))


def _union_decoder(kinds: tuple[Any, ...]) -> Decoder:
    """Members that are dataclasses are told by their names; of others there is at most one beside None."""
    named: list[Any] = [kind for kind in kinds if is_dataclass(kind)]
    by_name = {kind.__name__: _decoder(kind) for kind in named}
    others = [_decoder(kind) for kind in kinds if kind is not NoneType and kind not in named]

    def decode(value: Any) -> Any:
        if value is None and NoneType in kinds:
            return None
        return by_name[value["type"]](value) if isinstance(value, dict) else others[0](value)

    return decode


def _same(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _dataclass(kind: Any, decoders: dict[str, Decoder], value: dict[str, Any]) -> Any:
    if value["type"] != kind.__name__:
        raise TypeError(f"{value['type']} instead of {kind.__name__}")
    return kind(**{name: decoders[name](field) for name, field in value.items() if name != "type"})


def _named_tuple(kind: Any, decoders: tuple[Decoder, ...], values: list[Any]) -> Any:
    if len(values) > len(decoders):
        raise TypeError(f"{len(values)} values for {kind.__name__}")
    return kind(*[decode(value) for decode, value in zip(decoders, values, strict=False)])


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
