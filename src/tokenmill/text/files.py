"""Texts of files: lines, rows of JSON lines, and what a template makes of a row. Names that end in .gz are unpacked."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, unpacked if its name ends in .gz. Raises ConfigError."""
    try:
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rt", encoding="utf-8-sig") as lines:
            yield from lines
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as text: {reason}.", param="dataset_path") from None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Its rows, one at a time. Raises ConfigError naming the row that is not a JSON object."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}, is not a JSON object.", param="dataset_path")
        yield row


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """The text that a template in Python's format, in which \\n is a line break, makes of a row's fields. Raises
    ConfigError that names the fields there are."""
    try:
        return template.replace("\\n", "\n").format(**row)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--template {template!r} does not fit a row: {error!r}. Its fields: {', '.join(row)}.", param="template"
        ) from error
