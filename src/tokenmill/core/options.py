"""How an option is declared: once, as a field of the frozen dataclass whose code uses it.

The field has the type and the default; `option` adds the help, other spellings, how text becomes a value, and the
range. The command line makes flags from these declarations (cli/options.py), and `LLM` keyword arguments
(llm/arguments.py). `check` compares a value with its declaration; a dataclass calls it in `__post_init__`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from .config import check_name
from .errors import ConfigError
from .units import parse_bytes

_KEY = "option"
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line needs to know of a field besides its name, type and default.

    help      one line, which names the default where that is not False
    flag      its name on the command line, if that is not the field's own with hyphens; also: further spellings
    read      text -> value; raises ConfigError or ValueError with what the value must be
    metavar   what stands for the value in the help
    choices   all the values there are
    least     smallest value of a number
    takes_own a value may also be a policy of one's own: FILE.py or FILE.py:NAME
    several   "each": the flag is repeated for more values; "all": it also takes several at once
    has_no    an option that is off by default has a --no- form too
    group     the heading of the help that it is under, if not that of all options of its dataclass
    """

    help: str
    flag: str = ""
    also: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    least: float | None = None
    takes_own: bool = False
    several: str = ""
    has_no: bool = False
    group: str = ""

    def flags(self, name: str) -> tuple[str, ...]:
        """All spellings of the flag, where the field is called `name`."""
        return (self.flag or f"--{name.replace('_', '-')}", *self.also)


def option(default: Any, help: str, *, also: str = "", choices: Iterable[Any] = (), **rest: Any) -> Any:
    """A field that is an option. also: further spellings of the flag, between spaces; rest: see Option."""
    declared = Option(help, also=tuple(also.split()), choices=tuple(choices), **rest)
    return field(default=default, metadata={_KEY: declared})


def options_of(kind: type) -> dict[str, tuple[Option, Any, str]]:
    """Of each field that is an option: its declaration, its default and its type as it is written."""
    found = ((each, each.metadata.get(_KEY)) for each in fields(kind))
    return {each.name: (declared, each.default, str(each.type)) for each, declared in found if declared is not None}


def check(given: Any) -> None:
    """Raise ConfigError for the first value of `given` that its declaration does not allow."""
    for name, (declared, _, written) in options_of(type(given)).items():
        value = getattr(given, name)
        base, _, rest = written.partition(" | ")
        if value is None and rest == "None":
            continue
        kinds = _TYPES.get(base)
        if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and base != "bool")):
            wanted = f"{base} or None" if rest else base
            raise ConfigError(f"{name} must be {wanted}, got {type(value).__name__}.", param=name)
        flag = declared.flags(name)[0]
        if declared.choices:
            check_name(value, declared.choices, name, flag)
        if declared.least is not None and not declared.least <= value < math.inf:
            raise ConfigError(f"{flag} must be at least {declared.least:g}, got {value}.", param=name)


def size(text: str) -> int:
    """Bytes: 2GiB, 512MB, 1073741824. Raises ValueError."""
    try:
        return parse_bytes(text, "It")
    except ConfigError as error:
        raise ValueError(error.message.removeprefix("It ")) from None


def seconds(text: str) -> float:
    """Raises ValueError."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ValueError(f"must be a number of seconds, at least 0, got {text!r}.")
