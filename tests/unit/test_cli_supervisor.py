"""The supervisor of an engine process, where no process is needed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.cli import zygote
from tokenmill.cli.engine_process import Launch
from tokenmill.cli.local import LocalEngines
from tokenmill.cli.supervisor import (
    Channels,
    EngineCrashed,
    EngineProcess,
    ProcessExit,
    Supervisor,
    next_delay_s,
    peak_bytes,
)
from tokenmill.cli.zygote import ForkedEngine, can_fork
from tokenmill.cluster.events import Cause
from tokenmill.core.events import Ready
from tokenmill.core.units import KiB, MiB
from tokenmill.net.system import MonotonicClock
from tokenmill.net.unix import UnixFrontEnd, private_address
from tokenmill.node.options import EngineOptions


def test_draining_an_engine_that_is_still_loading_ends_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has connected to its link yet."""

    async def main() -> None:
        launch: Any = None
        supervisor = Supervisor(launch)
        with private_address() as address:
            supervisor._link = UnixFrontEnd(address, MonotonicClock())
            await asyncio.wait_for(supervisor.drain(0.02), 30)
            supervisor._link.close()

    asyncio.run(main())
    assert "had not saved all" in caplog.text


@pytest.mark.parametrize(("was_alive", "cause"), [(True, Cause.FAULT), (False, Cause.OUTSIDE)])
def test_an_engine_that_its_supervisor_kills_has_died_of_a_fault(was_alive: bool, cause: Cause) -> None:
    """What it sent could not be used: the kill is no outside cause, though it is a SIGKILL. One that another had killed
    before has not died of that."""
    killed, causes = asyncio.Event(), []

    class Life:
        address, flight = "", ""

        async def ended(self) -> ProcessExit:
            await killed.wait()
            return ProcessExit(EngineCrashed("gone"), -signal.SIGKILL)

        def has_beaten(self) -> bool:
            return True

        def kill(self) -> bool:
            killed.set()
            return was_alive

        def close(self) -> None:
            raise asyncio.CancelledError

    class Front:
        """Of a client, what a supervisor needs: its engine sends what nobody understands."""

        num_open = 1
        roster: Any = SimpleNamespace(start=lambda *_: None, lose=lambda *_: None)

        def attach(self, link: Any, *, on_broken: Callable[[], None], **_: Any) -> Any:
            on_broken()
            return SimpleNamespace(num_open=1, num_steps=1)

        def detach(self, attached: Any, why: str, delay_s: float, cause: Cause) -> None:
            causes.append(cause)

    async def main() -> None:
        with private_address() as address:
            Life.address = address
            supervisor = Supervisor(Launch("path", "model", "", EngineOptions()), start=lambda _: Life())
            front: Any = Front()
            with pytest.raises(asyncio.CancelledError):
                await supervisor.run(front, lambda ready: ready)

    asyncio.run(main())
    assert causes == [cause]


def test_a_process_that_has_ended_is_not_killed_any_more_and_its_size_is_known() -> None:
    taken = 64 * MiB
    program = f"import os, signal; x = b'x' * {taken}; os.kill(os.getpid(), signal.SIGKILL)"

    async def main() -> tuple[bool, ProcessExit]:
        process = subprocess.Popen([sys.executable, "-c", program])
        channels = Channels.open()
        channels.given()
        life = EngineProcess(process, channels, "")
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has been told
        was_alive = life.kill()
        death = await life.ended()
        life.close()
        return was_alive, death

    own = peak_bytes(resource.getrusage(resource.RUSAGE_SELF))
    was_alive, death = asyncio.run(main())
    assert was_alive is False and death.status == -signal.SIGKILL
    assert death.peak_bytes > taken or death.peak_bytes == 0 < own


@pytest.mark.parametrize(("status", "cause"), [(-signal.SIGKILL, Cause.OUTSIDE), (None, Cause.UNKNOWN)])
def test_no_clock_decides_how_a_forked_engine_ended(
    status: int | None, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report ends before its zygote tells the status, or that nobody will; that is waited for."""
    monkeypatch.setattr(zygote, "_END_S", 0.0)

    async def main() -> ProcessExit:
        channels = Channels.open()
        life = ForkedEngine(channels, "")
        ended = asyncio.create_task(life.ended())
        channels.given()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not ended.done()
        life.told(status)
        death = await ended
        life.close()
        return death

    death = asyncio.run(main())
    assert death.status == status and death.cause(0) is cause


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system keeps a process's peak for ever")
def test_what_loading_took_is_forgotten_when_an_engine_serves() -> None:
    """By the system, which tells the peak of a process that has ended."""
    # A small process begins it: what a large one had when it forked counts as its child's.
    begin = "import resource, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True);"
    begin += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    load = f"from tokenmill.node.memory import forget_peak; x = b'x' * {256 * MiB}; del x; "
    peaks = []
    for serve in ("pass", "forget_peak()"):
        told = subprocess.run([sys.executable, "-c", begin, load + serve], check=True, capture_output=True).stdout
        peaks.append(KiB * int(told))
    assert peaks[0] > 256 * MiB > peaks[1], peaks


def test_the_plan_counts_weights_once_where_a_zygote_has_them() -> None:
    launch = Launch("path", "model", "", EngineOptions())
    ready = Ready("m", 1, 1, (), "n", 1, 1, memory=(("weights", 100), ("KV", 10), ("engine", 1)))

    def told(engines: LocalEngines) -> dict[str, int]:
        return dict(engines._memory(ready))

    assert told(LocalEngines(launch, ("mixed",))) == {"weights": 100, "KV": 10, "engine": 1}
    own = {"weights of 3 workers": 300, "KV of 3 workers": 30, "engine of 3 workers": 3}
    assert told(LocalEngines(launch, ("mixed",) * 3)) == own
    kept = LocalEngines(launch, ("prefill", "decode", "decode"), forks=True)
    shared = {"weights": 100, "KV of 3 workers": 30, "engine of 3 workers": 4}
    assert told(kept) == (shared if can_fork() else own)
    assert kept.summary == "1 prefill, 2 decode"


def test_delays_grow_with_starts_that_fail_and_not_with_kills_of_what_served() -> None:
    delays, delay_s = [], 0.0
    for _ in range(8):
        delay_s = next_delay_s(delay_s, 1.0, has_served=False, is_awaited=False)
        delays.append(delay_s)
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert next_delay_s(30.0, 1.0, has_served=False, is_awaited=True) == 5.0, "while somebody waits"
    assert next_delay_s(30.0, 61.0, has_served=False, is_awaited=False) == 0.5, "it lived long"
    assert next_delay_s(30.0, 1.0, has_served=True, is_awaited=False) == 0.0


@pytest.mark.parametrize(
    ("status", "peak_bytes", "facts", "cause"),
    [
        (-signal.SIGKILL, 0, {}, Cause.OUTSIDE),
        (-signal.SIGKILL, 1249, {}, Cause.OUTSIDE),
        (-signal.SIGKILL, 1251, {}, Cause.FAULT),
        (-signal.SIGKILL, 0, {"has_oom_kill": True}, Cause.FAULT),
        (-signal.SIGKILL, 0, {"was_killed_by_us": True}, Cause.FAULT),
        (-signal.SIGTERM, 1251, {"has_oom_kill": True}, Cause.OUTSIDE),
        (-signal.SIGSEGV, 0, {}, Cause.FAULT),
        (-signal.SIGABRT, 0, {}, Cause.FAULT),
        (1, 0, {}, Cause.FAULT),
        (None, 0, {}, Cause.UNKNOWN),
    ],
)
def test_the_end_of_a_process_tells_whether_what_it_ran_may_have_done_it(
    status: int | None, peak_bytes: int, facts: dict[str, bool], cause: Cause
) -> None:
    assert ProcessExit(EngineCrashed("gone"), status, peak_bytes).cause(1000, **facts) is cause
