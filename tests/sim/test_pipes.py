"""Messages on links arrive when they are due: none waits for the next one to push it along."""

from __future__ import annotations

import asyncio
import random

import pytest

from tokenmill.core.events import Abort
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.network import Network, Shape


@pytest.mark.parametrize("seed", range(8))
def test_a_message_arrives_by_itself(seed: int) -> None:
    """Whatever else is due a moment before. A loop that fired timers half a nanosecond early found the message not yet
    due, and nothing came back for it: the last request of a load was never served."""
    loop, rng = VirtualLoop(), random.Random(seed)
    latency_s = rng.choice([0.0002, 0.7, 3.0])
    link = Network(loop, Shape(latency_s=latency_s), rng).connect()

    async def main() -> None:
        for number in range(20):
            await asyncio.sleep(rng.expovariate(1.0))
            sent_s = loop.time()
            await link.front_end.send(Abort((str(number),)))
            loop.call_at(sent_s + latency_s - rng.choice([1e-10, 5e-10, 9e-10]), lambda: None)
            assert await link.engine_end.receive() == Abort((str(number),))
            assert loop.time() == sent_s + latency_s

    loop.run(main())


def test_who_listens_hears_what_came_before_and_after_and_of_the_end() -> None:
    loop, heard = VirtualLoop(), list[tuple[float, str]]()
    link = Network(loop, Shape(latency_s=0.5), random.Random(0)).connect()

    async def main() -> None:
        link.front_end.push(Abort(("first",)))
        await asyncio.sleep(1.0)
        listening = asyncio.create_task(
            link.engine_end.listen(lambda message: heard.append((loop.time(), message.request_ids[0])))
        )
        await asyncio.sleep(1.0)
        link.front_end.push(Abort(("second",)))
        link.front_end.push(Abort(("third",)))
        link.front_end.close()
        link.front_end.push(Abort(("lost",)))
        with pytest.raises(EOFError):
            await listening
        assert loop.time() == 2.5

    loop.run(main())
    assert heard == [(1.0, "first"), (2.5, "second"), (2.5, "third")]
