"""kill -9 of a server in the middle of a batch (kill_batch.py has many): the next one goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill_batch import run


@pytest.mark.sampled(1 / 3)
def test_a_batch_outlives_its_servers(tmp_path: Path) -> None:
    """Killed three times on the way, whole process group, and once stopped in order, it ends with the answers that an
    undisturbed batch gets, each once and in whole lines; and each line is billed once."""
    assert run(tmp_path, 120, 3) == []
