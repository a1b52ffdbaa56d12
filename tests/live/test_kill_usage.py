"""A few kills of the engine and of the front end: what is billed is what clients received (kill_usage.py has many)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill_usage import run


@pytest.mark.sampled(1 / 3)
def test_what_is_billed_is_what_was_received() -> None:
    """Exactly, through kills of the engine; through those of the front end never less, and at most a step more."""
    assert run(2, 3, 3, 800) == []
