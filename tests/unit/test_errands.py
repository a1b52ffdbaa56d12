"""A thread that does an event loop's errands: in order, to the end, and whatever one of them does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tokenmill.core.errors import Unavailable
from tokenmill.server.errands import Errands


def fail() -> None:
    raise ValueError("odd")


def test_errands_are_done_in_order_and_what_one_raises_stays_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Also what nobody waits for, and what is done each period."""
    done: list[int] = []
    again = threading.Event()

    def each_period() -> None:
        again.set()
        fail()

    errands = Errands("test", each_period=each_period, period_s=0.01, end=lambda: done.append(99))
    errands.open()

    async def main() -> None:
        for number in range(3):
            errands.put(lambda number=number: done.append(number))  # type: ignore[misc]
        errands.put(fail)
        with pytest.raises(ValueError, match="odd"):
            await errands.do(fail)
        assert await errands.do(lambda: list(done)) == [0, 1, 2]
        assert await asyncio.to_thread(again.wait, 10)
        assert await errands.do(lambda: 7) == 7
        waiting = asyncio.create_task(errands.do(lambda: 8))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await errands.do(lambda: 9) == 9

    asyncio.run(asyncio.wait_for(main(), 20))
    errands.put(lambda: done.append(5))
    errands.close()
    assert done == [0, 1, 2, 5, 99] and "An errand failed" in caplog.text


def test_one_that_cannot_begin_says_so_and_one_that_is_closed_refuses() -> None:
    with pytest.raises(ValueError, match="odd"):
        Errands("test", begin=fail).open()
    errands = Errands("test")
    errands.open()
    errands.close()
    errands.close()
    with pytest.raises(Unavailable):
        asyncio.run(errands.do(lambda: 1))
