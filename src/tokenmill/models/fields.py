"""Reading a checkpoint's settings, so that every complaint names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import BadCheckpoint

_LARGEST_NUMBER = 1e30
"""Beyond any setting; what is past it, infinite or not a number is damage."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to metadata. A null counts as absent."""

    metadata: Mapping[str, Any]
    where: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        key = self.prefix + key
        value = self.metadata.get(key)
        value = self.defaults.get(key) if value is None else value
        return default if value is None else value

    def text(self, key: str, default: str) -> str:
        return str(self.get(key, default))

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST_NUMBER:
            raise BadCheckpoint(f"{self.where}: {self.prefix}{key} must be a number, got {value!r}.")
        if positive and not value > 0:
            raise BadCheckpoint(f"{self.where}: {self.prefix}{key} must be positive, got {value!r}.")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self.get(key)
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise BadCheckpoint(f"{self.where}: {self.prefix}{key} must be a list of numbers.")
        return tuple(map(float, values))

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            wanted = "a positive" if least else "an"
            raise BadCheckpoint(f"{self.where}: {self.prefix}{key} must be {wanted} integer, got {value!r}.")
        return value

    def must_equal(self, key: str, expected: int) -> None:
        if self.count(key, expected) != expected:
            raise BadCheckpoint(
                f"{self.where}: {self.prefix}{key} = {self.get(key)} is not supported (must be {expected})."
            )
