"""When an engine counts as stuck, and the heartbeat that says it is not."""

from __future__ import annotations

import os
import select
import time

import numpy as np
import pytest

from tokenmill.cli.supervisor import LOOK_S, Watchdog
from tokenmill.net import child_process as heartbeat
from tokenmill.net.child_process import open_heartbeat, sending_heartbeats, take_heartbeats
from tokenmill.ops.api import RawTensor
from tokenmill.ops.native import NativeOps, available


def _looks_until_stuck(watchdog: Watchdog, start_s: float = 0.0, most: int = 100) -> int:
    for look in range(most):
        if watchdog.finds_stuck(start_s + look * LOOK_S, has_work=True, has_beaten=False, num_steps=3):
            return look
    return most


def test_work_without_a_sign_is_stuck_after_the_limit() -> None:
    """Not before, and never with a limit of 0. The step before the first look is a sign."""
    assert _looks_until_stuck(Watchdog(10.0)) == 10 / LOOK_S
    assert _looks_until_stuck(Watchdog(0.0)) == 100


@pytest.mark.parametrize(
    "sign",
    [
        {"has_work": False, "has_beaten": False, "num_steps": 3},
        {"has_work": True, "has_beaten": True, "num_steps": 3},
        {"has_work": True, "has_beaten": False, "num_steps": 4},
    ],
)
def test_each_sign_begins_the_time_anew(sign: dict[str, int]) -> None:
    """No work, a heartbeat within a step, or a step."""
    watchdog = Watchdog(5.0)
    for look in range(40):
        assert not watchdog.finds_stuck(look * LOOK_S, has_work=True, has_beaten=False, num_steps=3) or look % 4 == 3
        if look % 4 == 3:
            assert not watchdog.finds_stuck((look + 0.5) * LOOK_S, **sign)  # type: ignore[arg-type]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """After an hour of sleep, or stopped, the engine has its time still."""
    watchdog = Watchdog(5.0)
    assert not watchdog.finds_stuck(0.0, has_work=True, has_beaten=False, num_steps=0)
    assert not watchdog.finds_stuck(3600.0, has_work=True, has_beaten=False, num_steps=0)
    assert _looks_until_stuck(watchdog, 3600.0 + LOOK_S) >= 3


def test_the_pulse_beats_while_there_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """And always where progress cannot be told; never after its context."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)
    read_fd, write_fd = open_heartbeat()
    try:
        for progress, beats in ((iter(range(10**9)).__next__, True), (lambda: None, True), (lambda: 7, False)):
            with sending_heartbeats(write_fd, progress):
                # Where none is to come, none within a while; where one is, there is no haste.
                has_beaten = bool(select.select([read_fd], [], [], 30 if beats else 0.1)[0])
            assert take_heartbeats(read_fd) is has_beaten is beats
            assert not take_heartbeats(read_fd)
    finally:
        os.close(read_fd)
        os.close(write_fd)


@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_the_native_backend_tells_of_progress() -> None:
    """Any call changes the number; an idle team does not."""
    ops = NativeOps(2)
    before = ops.progress()
    time.sleep(0.01)
    assert ops.progress() == before
    values = np.zeros((64, 64), np.float32)
    ops.linear(values, ops.pack([RawTensor("f32", 64, 64, values.view(np.uint8).reshape(-1))]))
    assert ops.progress() != before
    ops.close()
