"""A few kills of the front end: every stream is read to its end by clients that come back (kill_front.py has many)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill_front import run


@pytest.mark.sampled(1 / 3)
def test_streams_outlive_the_front_end() -> None:
    """The same events as without a kill, none missing or twice, and each call billed once."""
    assert run(3, 3, 500) == []
