"""Sizes, durations and texts as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .errors import ConfigError

KiB, MiB, GiB, TiB = 1024, 1024**2, 1024**3, 1024**4
_SIZES = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SIZES |= {"kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB}


def parse_bytes(text: str, param: str) -> int:
    """'2GiB', '512 MB', '1073741824' -> bytes. Raises ConfigError naming `param`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).lower() not in _SIZES:
        raise ConfigError(f"{param} must be a size such as 2GiB or 512MB, got {text!r}.", param=param)
    return int(float(match.group(1)) * _SIZES[match.group(2).lower()])


def format_count(number: int) -> str:
    """As model cards write it: 134_515_008 -> '134.5M', 7_615_616_512 -> '7.6B'."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def format_names(names: Sequence[str], most: int) -> str:
    """(("a", "b", "c"), 2) -> 'a, b and 1 more'."""
    num_more = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_more} more" if num_more > 0 else "")


def visible(text: str) -> str:
    """Of a text that others wrote, what a terminal would obey rather than show, written out: ESC -> '\\x1b'."""
    return _OBEYED.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def format_parts(parts: Iterable[tuple[str, int]]) -> str:
    """(("weights", 2048), ("KV", 1024)) -> '3.0 KiB (weights 2.0 KiB + KV 1.0 KiB)'."""
    parts = tuple(parts)
    listed = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts)
    return f"{format_bytes(sum(size for _, size in parts))} ({listed})"
