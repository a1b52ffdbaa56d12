"""Files of earlier starts, kept under numbers when a new start takes their name."""

from __future__ import annotations

import contextlib
import os


def keep_older(path: str, num_kept: int) -> None:
    """FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on up to FILE.num_kept; the oldest goes. Raises OSError."""
    names = [path, *(f"{path}.{number}" for number in range(1, num_kept + 1))]
    for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)
