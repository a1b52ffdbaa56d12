"""The supervisor of an engine process, where no process is needed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill.cli.keeper import can_keep
from tokenmill.cli.launch import Launch
from tokenmill.cli.lives import Death, EngineCrashed
from tokenmill.cli.local import LocalEngines
from tokenmill.cli.supervisor import Supervisor, next_delay_s
from tokenmill.cluster.events import Cause
from tokenmill.core.events import Ready
from tokenmill.net.clock import MonotonicClock
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


def test_an_engine_that_its_supervisor_kills_has_died_of_a_fault() -> None:
    """What it sent could not be used: the kill is no outside cause, though it is a SIGKILL."""
    killed, causes = asyncio.Event(), []

    class Life:
        address, flight = "", ""

        async def ended(self) -> Death:
            await killed.wait()
            return Death(EngineCrashed("gone"), -signal.SIGKILL)

        def has_beaten(self) -> bool:
            return True

        def kill(self) -> None:
            killed.set()

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
    assert causes == [Cause.FAULT]


def test_the_plan_counts_weights_once_where_a_keeper_has_them() -> None:
    launch = Launch("path", "model", "", EngineOptions())
    ready = Ready("m", 1, 1, (), "n", 1, 1, memory=(("weights", 100), ("KV", 10), ("engine", 1)))

    def told(engines: LocalEngines) -> dict[str, int]:
        return dict(engines._memory(ready))

    assert told(LocalEngines(launch, ("mixed",))) == {"weights": 100, "KV": 10, "engine": 1}
    own = {"weights of 3 workers": 300, "KV of 3 workers": 30, "engine of 3 workers": 3}
    assert told(LocalEngines(launch, ("mixed",) * 3)) == own
    kept = LocalEngines(launch, ("prefill", "decode", "decode"), keeps=True)
    shared = {"weights": 100, "KV of 3 workers": 30, "engine of 3 workers": 4}
    assert told(kept) == (shared if can_keep() else own)
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
        (-signal.SIGKILL, 0, {"is_own_kill": True}, Cause.FAULT),
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
    assert Death(EngineCrashed("gone"), status, peak_bytes).cause(1000, **facts) is cause
