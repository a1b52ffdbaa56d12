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
