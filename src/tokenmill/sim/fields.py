"""Fields of a table that was read from TOML, each with its type and range; what nobody asked for is an error.

A reader takes the fields that it knows, one by one, and then says `end`. Every error is one line that begins with the
place of the field in the file.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import ConfigError
from ..core.units import parse_bytes


class Fields:
    """One table. where: its place in the file, as `workers[1]`; "" for the whole."""

    def __init__(self, table: Mapping[str, Any], where: str = "") -> None:
        self._table = table
        self.where = where
        self._known: dict[str, None] = {}

    def at(self, name: str) -> str:
        """The place of one of its fields."""
        return f"{self.where}.{name}" if self.where else name

    def error(self, name: str, what: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
        """Of one of its fields; `what` says what it must be."""
        return kind(f"{self.at(name)}: {what}", param=self.at(name))

    @property
    def plain(self) -> Mapping[str, Any]:
        """The table itself, where another reader takes it."""
        return self._table

    @property
    def names(self) -> tuple[str, ...]:
        """Its keys, where these are for the file to choose."""
        return tuple(self._table)

    def has(self, name: str) -> bool:
        self._known[name] = None
        return name in self._table

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        most: float = math.inf,
        is_open: bool = False,
    ) -> float:
        """A finite number from `least` to `most`; is_open: more than `least`. default: None where it must be there."""
        value = self._take(name, default, "a number")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not least <= value <= most or (is_open and value == least):
            more = f"more than {least:g}" if is_open else f"{least:g} or more"
            span = more if most == math.inf else f"{more} and at most {most:g}"
            raise self.error(name, f"a number that is {span} is needed, not {value!r}")
        return float(value)

    def count(self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None) -> int:
        """A whole number, `least` or more, and not above `most`."""
        value = self._take(name, default, "a whole number")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"a whole number of {least} or more is needed, not {value!r}")
        if most is not None and value > most:
            raise self.error(name, f"{most} at most are simulated, not {value}")
        return value

    def text(self, name: str, default: str | None = None, *, among: Sequence[str] = ()) -> str:
        """A word; among: those there are, if not any will do."""
        value = self._take(name, default, "a word")
        if not isinstance(value, str):
            raise self.error(name, f"a word in quotes is needed, not {value!r}")
        if among and value not in among and not (value == default and name not in self._table):
            near = difflib.get_close_matches(value, among, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(among)} is needed"
            raise self.error(name, f"{value!r} is unknown; {hint}")
        return value

    def size(self, name: str, default: int | None = None, *, least: int = 0) -> int:
        """Bytes: a number of them, or a text such as "64GiB"."""
        value = self._take(name, default, "a size")
        if isinstance(value, str):
            value = parse_bytes(value, self.at(name))
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or value < least
            or not math.isfinite(value)
            or value % 1
        ):
            raise self.error(name, f'a size of {least} bytes or more is needed, such as "64GiB", not {value!r}')
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._take(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, f"true or false is needed, not {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of words; empty where it is not there."""
        value = self._take(name, (), "a list of words")
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            raise self.error(name, f"a list of words is needed, not {value!r}")
        return tuple(value)

    def table(self, name: str) -> Fields:
        """A table in it; an empty one where it is not there."""
        value = self._take(name, {}, "a table")
        if not isinstance(value, Mapping):
            raise self.error(name, f"a table is needed, [{self.at(name)}], not {value!r}")
        return Fields(value, self.at(name))

    def tables(self, name: str) -> list[Fields]:
        """A list of tables in it; empty where it is not there."""
        value = self._take(name, [], "tables")
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            raise self.error(name, f"tables are needed, each under [[{self.at(name)}]], not {value!r}")
        return [Fields(each, f"{self.at(name)}[{number}]") for number, each in enumerate(value)]

    def end(self) -> None:
        """Raises ConfigError for the first key that was not asked for, with the nearest one that was."""
        for key in self._table:
            if key not in self._known:
                near = difflib.get_close_matches(key, list(self._known), n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self._known)}"
                raise self.error(key, f"no such key; {hint}")

    def _take(self, name: str, default: Any, kind: str) -> Any:
        self._known[name] = None
        value = self._table.get(name, default)
        if value is None:
            raise self.error(name, f"{kind} is needed here")
        return value
