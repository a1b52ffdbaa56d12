"""Where a benchmark's result goes: JSON to a file or, as "-", to standard output, which is then nothing else's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

STANDARD_OUTPUT = Path("-")


def write_json(path: Path | None, plain: dict[str, Any], indent: int | None = None) -> None:
    """Nothing where there is no path. NaN and infinity are programming errors."""
    if path is None:
        return
    text = json.dumps(plain, indent=indent, allow_nan=False, ensure_ascii=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf8")


def console_beside(path: Path | None, width: int | None = None) -> Console:
    """For tables: standard error where the JSON takes standard output."""
    return Console(stderr=path == STANDARD_OUTPUT, width=width)
