"""The link inside one process: order, and how each side learns that the other is gone."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill.core.events import Abort, Drain, EngineStats, StepOutputs
from tokenmill.engine.build import local_link


def test_messages_arrive_in_order_both_ways() -> None:
    """What one end sends the other receives, waiting or not."""

    async def main() -> None:
        engine_end, front_end = local_link()
        await front_end.send(Abort(("a",)))
        await front_end.send(Drain())
        assert await engine_end.receive() == Abort(("a",))
        assert await engine_end.receive() == Drain()
        message = StepOutputs((), EngineStats(), 1.0)
        await engine_end.send(message)
        assert await front_end.receive() is message

    asyncio.run(main())


def test_a_closed_end_is_an_eof_after_what_was_sent() -> None:
    """Nothing that was sent before closing is lost."""

    async def main() -> None:
        engine_end, front_end = local_link()
        await front_end.send(Drain())
        front_end.close()
        assert await engine_end.receive() == Drain()
        with pytest.raises(EOFError):
            await engine_end.receive()
        engine_end.close()
        with pytest.raises(EOFError):
            await front_end.receive()

    asyncio.run(main())
