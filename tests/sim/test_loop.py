"""The virtual loop: time advances without waiting, and every way of hanging is an error."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill.sim.loop import Deadlock, TimeLimit, VirtualLoop


def test_sleeping_takes_virtual_time() -> None:
    """Timers fire by their time, whatever the order they were set in; an hour passes at once."""
    loop = VirtualLoop()
    seen: list[tuple[float, str]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((loop.now(), name))

    async def main() -> float:
        tasks = [loop.spawn(sleeper(name, s), name) for name, s in [("a", 2.0), ("b", 1.0), ("c", 3600.0)]]
        for task in tasks:
            await task
        return loop.now()

    assert loop.run(main()) == pytest.approx(3600.0)
    assert [name for _, name in seen] == ["b", "a", "c"]
    assert seen[0][0] == pytest.approx(1.0)


def test_a_loop_with_nothing_to_wait_for_is_a_deadlock() -> None:
    """Waiting for an event that nobody can set is reported, not waited for."""

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        VirtualLoop().run(main())


def test_a_dead_node_ends_the_run_at_once() -> None:
    """The node's own exception comes out, though the main task still waits."""
    loop = VirtualLoop()

    async def node() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("the node died")

    async def main() -> None:
        loop.spawn(node(), "node")
        await asyncio.sleep(1000.0)

    with pytest.raises(ValueError, match="the node died"):
        loop.run(main())
    assert loop.now() == pytest.approx(1.0)


def test_a_failing_callback_ends_the_run() -> None:
    """An error outside any task is not merely logged."""
    loop = VirtualLoop()

    def callback() -> None:
        raise KeyError("callback")

    async def main() -> None:
        loop.call_later(0.5, callback)
        await asyncio.sleep(10.0)

    with pytest.raises(KeyError, match="callback"):
        loop.run(main())


def test_time_is_limited() -> None:
    """A run that would go on for ever is stopped."""

    async def main() -> None:
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(TimeLimit):
        VirtualLoop(limit_s=100.0).run(main())


def test_tiny_timers_do_not_spin() -> None:
    """Timers far below the resolution of a large clock value still fire."""
    loop = VirtualLoop()

    async def main() -> None:
        await asyncio.sleep(1e5)
        for _ in range(100):
            await asyncio.sleep(1e-13)

    loop.run(main())
    assert loop.now() == pytest.approx(1e5)
