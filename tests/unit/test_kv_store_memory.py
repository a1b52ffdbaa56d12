"""How a KV store gives memory up when the machine is short of it, and what is read of the machine for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.units import GiB, MiB
from tokenmill.kv.store.process import PIECES, QUIET_S, Elastic
from tokenmill.node.machine import MemoryReader, MemoryState

MOST, LEAST, RESERVE = 8 * GiB, 64 * MiB, 1 * GiB


@pytest.fixture
def elastic() -> Elastic:
    return Elastic(MOST, LEAST, 16 * RESERVE)


def test_all_of_it_where_there_is_enough(elastic: Elastic) -> None:
    """However much of it is taken, and also while others wait for memory somewhere."""
    for nth in range(100):
        assert elastic.look(MemoryState(5 * RESERVE, nth * 0.9), MOST, float(nth)) == MOST
    assert not elastic.num_shrunk


def test_what_is_lacking_is_given_up_at_once(elastic: Elastic) -> None:
    """From what is taken, not from what could be; a piece at least, and never all of it."""
    assert elastic.look(MemoryState(0, 0.0), 4 * GiB, 1.0) == 4 * GiB - RESERVE
    assert elastic.look(MemoryState(RESERVE - MiB, 0.0), 3 * GiB, 2.0) == 3 * GiB - MOST // PIECES
    for nth in range(20):
        elastic.look(MemoryState(0, 0.0), elastic.num_bytes, 3.0 + nth)
    assert elastic.num_bytes == LEAST


def test_stalls_count_where_little_is_left(elastic: Elastic) -> None:
    """Seconds that processes waited, for each second."""
    state = MemoryState(3 * RESERVE, 100.0)
    assert elastic.look(state, MOST, 1.0) == MOST
    assert elastic.look(MemoryState(3 * RESERVE, 100.05), MOST, 2.0) == MOST
    assert elastic.look(MemoryState(3 * RESERVE, 100.3), MOST, 3.0) == MOST - MOST // PIECES


def test_it_grows_again_after_some_quiet(elastic: Elastic) -> None:
    """Piece by piece, up to all of it; unrest in between begins the wait anew."""
    elastic.look(MemoryState(0, 0.0), MOST, 0.0)
    small = elastic.num_bytes
    enough = MemoryState(3 * RESERVE, 0.0)
    assert elastic.look(enough, small, QUIET_S - 1) == small
    assert elastic.look(MemoryState(RESERVE + MiB, 0.0), small, QUIET_S) == small
    assert elastic.look(enough, small, 2 * QUIET_S - 1) == small
    assert elastic.look(enough, small, 2 * QUIET_S) == small + MOST // PIECES
    for nth in range(PIECES):
        elastic.look(enough, small, 2 * QUIET_S + 1 + nth)
    assert elastic.num_bytes == MOST


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    """What the container may still take, where that is less than what the machine has; stalls of the container."""
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    5000 kB\n",
        "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\nfull avg10=0 total=7\n",
    }
    assert MemoryReader(machine(tmp_path / "plain", files)).read() == MemoryState(5_120_000, 2.5)
    files |= {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/cgroup.controllers": "memory",
        "sys/fs/cgroup/box/memory.max": "3000000",
        "sys/fs/cgroup/box/memory.current": "2500000",
        "sys/fs/cgroup/box/memory.stat": "inactive_file 100000\n",
        "sys/fs/cgroup/box/memory.pressure": "some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n",
    }
    assert MemoryReader(machine(tmp_path / "boxed", files)).read() == MemoryState(600_000, 1.0)
    silent = MemoryReader(machine(tmp_path / "silent", {"proc/meminfo": "MemAvailable: 1 kB"}))
    assert silent.read() == MemoryState(1024, 0.0)
