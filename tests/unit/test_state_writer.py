"""A thread that works for an event loop: in order, to the end, and whatever one job does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tokenmill.core.errors import Unavailable
from tokenmill.state.writer import BackgroundWriter


def fail() -> None:
    raise ValueError("odd")


def test_jobs_are_done_in_order_and_what_one_raises_stays_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Also what nobody waits for, and what is done each period."""
    done: list[int] = []
    again = threading.Event()

    def each_period() -> None:
        again.set()
        fail()

    writer = BackgroundWriter("test", end=lambda: done.append(99))
    writer.open()
    writer.every(0.01, each_period)

    async def main() -> None:
        for number in range(3):
            writer.put(lambda number=number: done.append(number))  # type: ignore[misc]
        writer.put(fail)
        with pytest.raises(ValueError, match="odd"):
            await writer.do(fail)
        assert await writer.do(lambda: list(done)) == [0, 1, 2]
        assert await asyncio.to_thread(again.wait, 10)
        assert await writer.do(lambda: 7) == 7
        waiting = asyncio.create_task(writer.do(lambda: 8))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await writer.do(lambda: 9) == 9

    asyncio.run(asyncio.wait_for(main(), 20))
    with pytest.raises(ValueError, match="odd"):
        writer.ask(fail)
    writer.put(lambda: done.append(5))
    writer.close()
    assert done == [0, 1, 2, 5, 99] and "A job failed" in caplog.text


def test_one_that_cannot_begin_says_so_and_one_that_is_closed_refuses() -> None:
    with pytest.raises(ValueError, match="odd"):
        BackgroundWriter("test", begin=fail).open()
    writer = BackgroundWriter("test")
    writer.open()
    writer.close()
    writer.close()
    with pytest.raises(Unavailable):
        asyncio.run(writer.do(lambda: 1))
