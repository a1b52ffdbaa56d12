"""kill -9 of a process that writes KV blocks to disk (kill_kv_disk.py has many)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill_kv_disk import run


@pytest.mark.sampled(1 / 3)
def test_what_was_saved_outlives_kills(tmp_path: Path) -> None:
    """Six times at random moments: nothing is lost whose saving had ended, and nothing wrong is served."""
    assert run(tmp_path, 6, 1) == []
