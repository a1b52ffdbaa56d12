"""What was chosen for an engine and why, as it is printed at the start."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """A line each, names and values in columns."""
    print(title)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"  {name:<{width}}  {value}")
    sys.stdout.flush()
