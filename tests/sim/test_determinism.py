"""One seed, one run: whatever order Python's hashes give sets and dicts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

SCENE = Path(__file__).with_name("seeded_service.py")


def run(seed: int, hash_seed: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.Popen(
        [sys.executable, str(SCENE), str(seed)], env=environment, stdout=subprocess.PIPE, text=True
    )  # fmt: skip


def test_a_seed_gives_one_run_under_three_hash_seeds() -> None:
    """With hand-overs from prefill to decode, tiers, faults, moves, conversations and clients that ask again; another
    seed gives another one. All that the run is meant to have has happened."""
    started = [run(3, 0), run(3, 1), run(3, 2), run(4, 0)]
    said = []
    for process in started:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        said.append(out)
    assert said[0] == said[1] == said[2]
    assert re.match(r"[0-9a-f]{16} ", said[0]) and said[0].split()[0] != said[3].split()[0]
    found = re.search(r"\{.*\}", said[0])
    assert found is not None
    happened = json.loads(found[0])
    assert all(happened[name] for name in ("struck", "moved", "fetched", "resumed", "preempted", "refused", "ok")), (
        happened
    )
