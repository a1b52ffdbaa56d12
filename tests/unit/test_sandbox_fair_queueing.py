"""FairQueue: places go round the clients, small jobs first, and nobody takes all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tokenmill.sandbox.fair_queueing import FairQueue


class Jobs:
    """Jobs that hold their place until they are told to end; `started` is the order in which they got it."""

    def __init__(self, turns: FairQueue) -> None:
        self._turns = turns
        self.started: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def add(self, name: str, client: str, size: int = 1) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, client, size))
        await asyncio.sleep(0)

    async def _run(self, name: str, client: str, size: int) -> None:
        async with self._turns.turn(client, size):
            self.started.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def end_all(self) -> None:
        for event in self._ends.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def run(places: int, per_client: int, work: Callable[[Jobs, FairQueue], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        turns = FairQueue(places, per_client)
        jobs = Jobs(turns)
        await work(jobs, turns)
        await jobs.end_all()
        assert not turns._waiting and not turns._held and turns._num_free == places

    asyncio.run(main())


def test_clients_take_turns() -> None:
    async def work(jobs: Jobs, turns: FairQueue) -> None:
        for number in range(4):
            await jobs.add(f"a{number}", "a")
        await jobs.add("b0", "b")
        await jobs.add("b1", "b")
        for name in ("a0", "a1", "b0", "a2", "b1", "a3"):
            await jobs.end(name)
        assert jobs.started == ["a0", "a1", "b0", "a2", "b1", "a3"]

    run(1, 1, work)


def test_of_one_client_the_smallest_goes_first() -> None:
    async def work(jobs: Jobs, turns: FairQueue) -> None:
        for name, size in (("first", 9), ("large", 8), ("small", 1), ("small too", 1)):
            await jobs.add(name, "a", size)
        await jobs.end_all()
        assert jobs.started == ["first", "small", "small too", "large"]

    run(1, 1, work)


def test_no_client_holds_all_places() -> None:
    async def work(jobs: Jobs, turns: FairQueue) -> None:
        await jobs.add("a0", "a")
        await jobs.add("a1", "a")
        assert jobs.started == ["a0"]
        await jobs.add("b0", "b")
        assert jobs.started == ["a0", "b0"]
        await jobs.end("b0")
        assert jobs.started == ["a0", "b0"], "the place stays free for others"

    run(2, 1, work)


def test_who_had_a_job_killed_comes_last_until_one_ends_well() -> None:
    async def work(jobs: Jobs, turns: FairQueue) -> None:
        await jobs.add("x", "x")
        turns.note_end("a", was_killed=True)
        await jobs.add("a0", "a")
        for name in ("b", "c", "d"):
            await jobs.add(name, name)
        for name in ("x", "b", "c", "d"):
            await jobs.end(name)
        assert jobs.started == ["x", "b", "c", "d", "a0"]
        turns.note_end("a", was_killed=False)
        await jobs.add("a1", "a")
        await jobs.add("e", "e")
        await jobs.end("a0")
        assert jobs.started[-1] == "a1"

    run(1, 1, work)


def test_one_that_leaves_gives_its_place_up() -> None:
    async def work(jobs: Jobs, turns: FairQueue) -> None:
        for name in ("a", "b", "c"):
            await jobs.add(name, name)
        jobs.tasks["b"].cancel()
        jobs.tasks["a"].cancel()
        await asyncio.gather(jobs.tasks["a"], jobs.tasks["b"], return_exceptions=True)
        await asyncio.sleep(0)
        assert jobs.started == ["a", "c"]

    run(1, 1, work)
