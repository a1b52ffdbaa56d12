"""Reading a checkpoint's settings, so that every complaint names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.config_key import Keys

_LARGEST_NUMBER = 1e30
"""Beyond any setting; what is past it, infinite or not a number is damage."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to metadata.

    keys       of a config.json, those its type reads (formats/config_keys.py); None for a GGUF file, which says what
               it says
    defaults   what a GGUF key means where it is missing
    names      usual name of a key -> another that the file may have for it, and which then counts
    """

    metadata: Mapping[str, Any]
    where: str
    keys: Keys | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def named(self, key: str) -> str:
        """The key as the file has it."""
        own = self.names.get(key, key)
        is_usual = self.keys is not None and key in self.keys and own not in self.metadata
        return self.prefix + (key if is_usual else own)

    def get(self, key: str, default: Any = None) -> Any:
        """What the file says; where it has no such key, what that means; `default` where that is nothing, where the
        file says null and may, and where the key is not one that its type reads. Raises BadCheckpoint for a null that
        means nothing."""
        key = self.named(key)
        if self.keys is None:
            value = self.metadata.get(key, self.defaults.get(key))
        else:
            known = self.keys.get(key)
            if known is None:
                return default
            value = self.metadata.get(key, known.default)
            if value is None and not known.nullable and (known.required or key in self.metadata):
                raise BadCheckpoint(f"{self.where}: {key} must not be {'null' if key in self.metadata else 'missing'}.")
        return default if value is None else value

    def check_nulls(self) -> None:
        """Raises BadCheckpoint for the first key that is null, or missing, and must not be."""
        for key in self.keys or ():
            self.get(key)

    def reads(self, key: str) -> bool:
        """Whether `key` decides anything."""
        return self.keys is None or self.named(key) in self.keys

    def meaning_of_missing(self, key: str) -> Any:
        """What `key` of a config.json means where it is missing, whatever this file says."""
        return self.keys[key].default if self.keys is not None else None

    def text(self, key: str, default: str) -> str:
        return str(self.get(key, default))

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise BadCheckpoint(f"{self.where}: {self.named(key)} must be true or false, got {value!r}.")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST_NUMBER:
            raise BadCheckpoint(f"{self.where}: {self.named(key)} must be a number, got {value!r}.")
        if positive and not value > 0:
            raise BadCheckpoint(f"{self.where}: {self.named(key)} must be positive, got {value!r}.")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self.get(key)
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise BadCheckpoint(f"{self.where}: {self.named(key)} must be a list of numbers.")
        return tuple(map(float, values))

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            wanted = "a positive" if least else "an"
            raise BadCheckpoint(f"{self.where}: {self.named(key)} must be {wanted} integer, got {value!r}.")
        return value

    def must_equal(self, key: str, expected: int) -> None:
        if self.count(key, expected) != expected:
            raise BadCheckpoint(
                f"{self.where}: {self.named(key)} = {self.get(key)} is not supported (must be {expected})."
            )
