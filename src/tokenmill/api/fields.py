"""Reading one JSON object, field by field, so that every complaint names the field and what it may hold. Pure.

null always means "not given". What was never read is unknown, and reported as such. A field that nobody reads changes
nothing, which its sender wants only if it was meant for somebody else: so a name that is nearly a known one is a
mistake, and one that other servers read is not. Where a body is rewritten from another API's, `said_as` tells what is
wrong by the names that the caller used."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ..core.errors import InvalidRequest


@contextlib.contextmanager
def said_as(names: Mapping[str, str]) -> Iterator[None]:
    """An InvalidRequest from this block comes out with each field of `names` called what it maps to."""
    try:
        yield
    except InvalidRequest as error:
        if not names:
            raise
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

        def rename(text: str) -> str:
            return pattern.sub(lambda found: names[found[0]], text)

        param = None if error.param is None else rename(error.param)
        raise type(error)(rename(error.message), param=param) from None


OTHERS = frozenset(
    {
        "content", "context", "ec_transfer_params", "inputs", "instruction", "mode", "models", "speed", "texts",
        "top_a", "top_k", "top_n", "top_p", "typ_p",
    }
)  # fmt: skip
"""Fields of other endpoints and servers whose names are nearly those of fields here."""

_MIN_CHARS = 4
_MIN_CHARS_OF_TWO = 9


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` seems to be meant for: the same but for case, dashes and underscores; or another by a
    letter too many, too few, wrong or in its neighbour's place, by two of these in a long name."""
    if name in OTHERS or len(name) < _MIN_CHARS:
        return None
    plain, letters = _plain(name), set(name.lower())
    near: list[tuple[int, str]] = []
    for other in known:
        if len(other) < _MIN_CHARS or abs(len(other) - len(name)) > 2:
            continue
        most = 2 if len(other) >= _MIN_CHARS_OF_TWO else 1
        if len(letters ^ set(other.lower())) > 2 * most:  # the quick way: one change makes two letters differ at most
            continue
        changes = (
            0 if _plain(other) == plain else next((n for n in range(1, most + 1) if _within(name, other, n)), None)
        )
        if changes is not None:
            near.append((changes, other))
    return min(near)[1] if near else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _within(first: str, second: str, changes: int) -> bool:
    """Whether so many changes of a letter make one of the other; a swap of neighbours is one."""
    same = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        same += 1
    first, second = first[same:], second[same:]
    if not first or not second or not changes:
        return len(first) + len(second) <= changes
    return (
        _within(first[1:], second[1:], changes - 1)
        or _within(first[1:], second, changes - 1)
        or _within(first, second[1:], changes - 1)
        or (first[:2] == second[1::-1] and len(second) > 1 and _within(first[2:], second[2:], changes - 1))
    )


_MAX_NAME = 100
MAX_DEPTH = 200
"""Levels of arrays and objects in a body: what is done with them later takes some of Python's 1,000 frames for each."""
MAX_SPELLED = 20
"""Unknown fields of one object that are looked at for misspellings."""
_TOO_DEEP = f"The body is nested too deeply: arrays and objects may be {MAX_DEPTH} deep."


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises InvalidRequest for anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise InvalidRequest(_TOO_DEEP)
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object, got {kind_name(value)}.")
    return value


def is_deeper(value: Any, most: int) -> bool:
    """Whether arrays and objects are nested more than `most` deep."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(most):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for children in inner for child in children if isinstance(child, (dict, list))]
        if not level:
            return False
    return bool(level)


def kind_name(value: Any) -> str:
    """What JSON calls the type of `value`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def has_type(value: Any, types: Collection[str]) -> bool:
    """Whether it is an object whose `type` is one of these."""
    return isinstance(value, dict) and value.get("type") in types


class Fields:
    """One JSON object being read. Each method gives the named field's value, or None where it is absent or null."""

    def __init__(self, body: dict[str, Any], where: str = "") -> None:
        self._body = body
        self._where = where
        self._read: set[str] = set()
        self._known: set[str] = set()

    def name(self, field: str) -> str:
        return f"{self._where}.{field}" if self._where else field

    def any(self, field: str) -> Any:
        self._read.add(field)
        return self._body.get(field)

    def names(self) -> list[str]:
        return list(self._body)

    def know(self, fields: Iterable[str]) -> None:
        """These could be there too, as far as spelling goes."""
        self._known.update(fields)

    def expect(self, fields: Iterable[str]) -> None:
        """Raises InvalidRequest for the misspelled name of one of these, which are all that is read."""
        self._read.update(fields)
        self.unread()

    def unread(self) -> list[str]:
        """What nobody has asked for. Raises InvalidRequest for the misspelled name of what somebody has, if it is among
        the first so many."""
        unread = [field for field in self._body if field not in self._read]
        for field in unread[:MAX_SPELLED]:
            if len(field) > _MAX_NAME:
                continue
            meant = nearest(field, self._read) or nearest(field, self._known)
            if meant is not None:
                name = self.name(field)
                raise InvalidRequest(f"{name} is not known here; {self.name(meant)} is.", param=name)
        return unread

    def text(self, field: str) -> str | None:
        value = self.any(field)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(field, "a string")

    def required_text(self, field: str) -> str:
        """A string that must be there and not be empty."""
        value = self.text(field)
        if not value:
            raise InvalidRequest(f"{self.name(field)} must be a string that is not empty.", param=self.name(field))
        return value

    def flag(self, field: str) -> bool | None:
        value = self.any(field)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(field, "true or false")

    def object(self, field: str) -> dict[str, Any] | None:
        value = self.any(field)
        if value is None or isinstance(value, dict):
            return value
        raise self.wrong(field, "an object")

    def array(self, field: str) -> list[Any] | None:
        value = self.any(field)
        if value is None or isinstance(value, list):
            return value
        raise self.wrong(field, "an array")

    def integer(self, field: str, low: int, high: int) -> int | None:
        value = self.any(field)
        return None if value is None else check_integer(self.name(field), value, low, high)

    def number(self, field: str) -> float | None:
        """A finite number; its range is for SamplingParams to check."""
        value = self.any(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(field, "a number")
        try:
            return float(value)
        except OverflowError:
            raise InvalidRequest(f"{self.name(field)} is too large.", param=self.name(field)) from None

    def wrong(self, field: str, wanted: str) -> InvalidRequest:
        name = self.name(field)
        return InvalidRequest(f"{name} must be {wanted}, got {kind_name(self._body.get(field))}.", param=name)

    def refuse_unread(self) -> None:
        """Raises InvalidRequest for what nobody has asked for, where it must not be passed over."""
        if rest := self.unread():
            name = self.name(rest[0][:100])
            raise InvalidRequest(f"{name} is not known here; leave it out.", param=name)


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """JSON has one kind of number: 3.0 is 3."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {kind_name(value)}.", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}.", param=name)
    return value
