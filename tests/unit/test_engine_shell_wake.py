"""What wakes the loop of an engine."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill.engine.shell import Wake


def test_it_stays_set_until_somebody_has_waited() -> None:
    async def main() -> None:
        wake = Wake()
        wake.set()
        wake.set()
        assert wake.is_set
        await wake.wait()
        assert not wake.is_set
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wake.wait(), 0.01)

    asyncio.run(main())


def test_who_waits_is_woken_and_may_be_cancelled() -> None:
    async def main() -> None:
        wake = Wake()
        waiting = asyncio.create_task(wake.wait())
        await asyncio.sleep(0)
        wake.set()
        wake.set()
        await waiting
        assert not wake.is_set
        cancelled = asyncio.create_task(wake.wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        wake.set()
        await wake.wait()

    asyncio.run(main())
