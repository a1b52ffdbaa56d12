"""Workers that are killed and stopped under streams cost clients a pause, and nothing else.

`python tests/live/kill_workers.py` and `kill_storm.py` do the same at length.
"""

from __future__ import annotations

import kill_storm
import kill_workers
import pytest

ARGS = ("--kv-cache-memory-bytes", "64MiB", "--threads", "1")


@pytest.mark.sampled(1 / 3)
def test_no_stream_notices_that_workers_are_killed_and_stopped() -> None:
    args = (*ARGS, "--workers", "3")
    count = kill_workers.run("tiny", args, num_kills=3, num_stops=1, num_streams=4, seed=1)
    assert count.is_clean and count.num_streams >= 4, count.failed


@pytest.mark.sampled(1 / 3)
def test_nobody_but_a_poison_is_blamed_for_kills_faster_than_engines_come_back() -> None:
    args = (*kill_storm.ARGS, "--workers", "3")
    count, told = kill_storm.run("tiny", args, num_streams=8, num_kills=15, every_s=0.5, num_poisons=1, seed=3)
    assert count.is_clean and count.num_streams >= 8, count.failed
    assert [was for found in told.values() for was, _ in found] == [True, True]


@pytest.mark.sampled(1 / 3)
@pytest.mark.slow
def test_no_stream_of_a_real_model_notices_that_workers_are_killed() -> None:
    args = (*ARGS, "--workers", "3")
    count = kill_workers.run("smollm2", args, num_kills=5, num_stops=1, num_streams=4, seed=2)
    assert count.is_clean and count.num_streams >= 4, count.failed
