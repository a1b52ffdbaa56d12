"""The supervisor of an engine process, where no process is needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenmill.cli.keeper import can_keep
from tokenmill.cli.launch import Launch
from tokenmill.cli.local import LocalEngines
from tokenmill.cli.supervisor import Supervisor
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
            await asyncio.wait_for(supervisor.drain(0.02), 5)
            supervisor._link.close()

    asyncio.run(main())
    assert "had not saved all" in caplog.text


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
