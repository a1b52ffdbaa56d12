"""Processes that share cores: full speed while there are enough, equal parts beyond, one job of a process at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from tokenmill.sim.cores import Host, Process
from tokenmill.sim.loop import VirtualLoop

Job = tuple[float, str, int, float]
"""(begin_s, process, its threads, seconds)"""


async def compute(process: Process, seconds: float) -> None:
    """Returns when it has done a job of so many seconds."""
    ended = asyncio.Event()
    process.submit(seconds, ended.set)
    await ended.wait()


def ends_of(cores: int, jobs: Sequence[Job]) -> list[float]:
    loop = VirtualLoop()
    host = Host(loop, cores)
    for _, name, threads, _ in jobs:
        if name not in host.processes:
            host.process(name, threads)
    ends = [0.0] * len(jobs)

    async def do(nth: int) -> None:
        begin_s, name, _, seconds = jobs[nth]
        await asyncio.sleep(begin_s)
        await compute(host.processes[name], seconds)
        ends[nth] = loop.time()

    async def main() -> None:
        for task in [loop.spawn(do(nth), f"job {nth}") for nth in range(len(jobs))]:
            await task

    loop.run(main())
    return ends


def by_steps(cores: int, jobs: Sequence[Job]) -> list[float]:
    """From event to event, with the speed that all threads have in between."""
    left = [job[3] for job in jobs]
    ends = [0.0] * len(jobs)
    now = 0.0
    while any(each > 0 for each in left):
        running: dict[str, int] = {}
        for i in sorted(range(len(jobs)), key=lambda i: (jobs[i][0], i)):
            if jobs[i][0] <= now and left[i] > 0:
                running.setdefault(jobs[i][1], i)
        threads = sum(jobs[i][2] for i in running.values())
        speed = min(1.0, cores / threads) if threads else 1.0
        step = min([job[0] - now for job in jobs if job[0] > now] + [left[i] / speed for i in running.values()])
        now += step
        for i in running.values():
            left[i] -= step * speed
            if left[i] < 1e-9:
                left[i], ends[i] = 0.0, now
    return ends


def test_what_has_cores_of_its_own_runs_at_full_speed() -> None:
    """A step of two threads and a front end on four cores do not see each other."""
    assert ends_of(4, [(0, "w0", 2, 1.0), (0, "front", 1, 0.5)]) == pytest.approx([1.0, 0.5])


def test_threads_beyond_the_cores_share_them() -> None:
    """A step of two threads and a front end on two cores: each thread has two thirds of one; alone it is fast again."""
    assert ends_of(2, [(0, "w0", 2, 1.0), (0, "front", 1, 0.5)]) == pytest.approx([1.25, 0.75])
    assert ends_of(2, [(0, "w0", 2, 1.0), (0, "w1", 2, 1.0)]) == pytest.approx([2.0, 2.0])


def test_a_process_does_one_job_after_the_other() -> None:
    """Two requests at once in one event loop: the second waits, though a core is free."""
    assert ends_of(2, [(0, "front", 1, 0.5), (0.1, "front", 1, 0.5)]) == pytest.approx([0.5, 1.0])


@pytest.mark.parametrize("seed", range(40))
def test_ends_are_those_of_stepping_from_event_to_event(seed: int) -> None:
    """Random processes, threads and jobs: the same ends as counting every interval by itself."""
    rng = random.Random(seed)
    threads = {f"p{n}": rng.randint(1, 4) for n in range(rng.randint(1, 5))}
    jobs: list[Job] = []
    for _ in range(25):
        name = rng.choice(list(threads))
        jobs.append((rng.choice([0.0, rng.uniform(0, 2)]), name, threads[name], rng.uniform(0.001, 0.3)))
    cores = rng.randint(1, 6)
    assert ends_of(cores, jobs) == pytest.approx(by_steps(cores, jobs), abs=1e-6)


def test_a_process_that_dies_leaves_its_cores_to_the_others() -> None:
    """Half a second of half a core, then the rest alone; the next life of the process begins anew."""
    loop = VirtualLoop()
    host = Host(loop, 1)
    one, other = host.process("one"), host.process("other")

    async def main() -> float:
        one.submit(1.0, lambda: pytest.fail("it has died"))
        loop.call_later(0.5, one.kill)
        await compute(other, 1.0)
        end_s = loop.time()
        await compute(one, 0.1)
        assert loop.time() == pytest.approx(end_s + 0.1)
        return end_s

    assert loop.run(main()) == pytest.approx(1.25)
    assert (one.busy_s, other.busy_s) == pytest.approx((0.6, 1.25))


def test_steps_take_longer_beside_steps_of_others() -> None:
    """By all that they can where the others have every other core as they begin, by half for half of these; a front end
    takes nothing from them while there are cores."""
    loop = VirtualLoop()
    host = Host(loop, 3)
    names = ("one", "two", "three")
    one, two, three = (host.process(name, is_steps=True) for name in names)
    front = host.process("front")

    async def main() -> list[float]:
        ends = []
        for others in ((), (two,), (two, three), (front,)):
            begin_s, ended = loop.time(), asyncio.Event()
            for other in others:
                other.submit(2.0, lambda: None)
            one.submit(1.0, ended.set, crowded_s=0.4)
            await ended.wait()
            ends.append(loop.time() - begin_s)
            await asyncio.sleep(5.0)
        return ends

    assert loop.run(main()) == pytest.approx([1.0, 1.2, 1.4, 1.0])


def test_a_slow_host_takes_its_factor_more() -> None:
    """Three times as long from when it is slow, and as before once it is sound."""
    loop = VirtualLoop()
    host = Host(loop, 0)
    process = host.process("w0", 8)

    async def main() -> float:
        loop.call_later(0.25, host.slow, 3.0)
        loop.call_later(1.0, host.slow, 1.0)
        await compute(process, 1.0)
        return loop.time()

    assert loop.run(main()) == pytest.approx(1.5)
