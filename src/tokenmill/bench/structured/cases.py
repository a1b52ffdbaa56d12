"""Schemas with data that fits them and data that does not, from a file of JSON lines."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Case:
    """tests: (data, whether it is valid)"""

    name: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


def read_cases(path: Path, limit: int | None = None) -> list[Case]:
    """Rows of {"name", "schema", "tests": [{"data", "valid"}]}; `limit`: so many of them, spread evenly. Raises
    ConfigError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        cases = [
            Case(
                str(row.get("name") or row.get("description") or number),
                row["schema"],
                tuple((test["data"], bool(test["valid"])) for test in row.get("tests", ())),
            )
            for number, row in enumerate(rows)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"a line has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} cannot be read as JSON lines with a schema each: {what}.", param="data") from None
    if not cases:
        raise ConfigError(f"{path} has no schemas.", param="data")
    if limit is None or limit >= len(cases):
        return cases
    return [cases[number * len(cases) // limit] for number in range(limit)]
