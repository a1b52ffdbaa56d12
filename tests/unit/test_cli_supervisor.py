"""The supervisor of an engine process, where no process is needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenmill.cli.supervisor import Supervisor
from tokenmill.net.clock import MonotonicClock
from tokenmill.net.unix import UnixFrontEnd, private_address


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
