"""The keeper of an outside job: it runs and stops as a group, its end is told, and it never outlives its server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.cli.idle_job import IdleCommand

MAKER = """
import asyncio, sys
from tokenmill.cli.idle_job import IdleCommand

async def main():
    job = IdleCommand(sys.argv[1])
    job.run()
    await asyncio.sleep(1000)

asyncio.run(main())
"""
"""A server that has nothing but a job."""


def command(folder: Path, *, end: str = "sleep 1000") -> str:
    """Two processes, whose numbers are written down."""
    return f"sleep 1000 & echo $! > {folder}/child.new; mv {folder}/child.new {folder}/child; echo $$ > {folder}/leader.new; mv {folder}/leader.new {folder}/leader; {end}"  # noqa: E501


def pids_of(folder: Path) -> list[int]:
    files = [folder / name for name in ("child", "leader")]
    until(lambda: all(each.exists() for each in files))
    return [int(each.read_text()) for each in files]


def state(pid: int) -> str:
    """A letter of ps, "X": there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except OSError:
        return "X"


def until(condition: Callable[[], bool]) -> None:
    """Polls: what is waited for happens in other processes."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited 20 s"
        time.sleep(0.005)


async def until_told(job: IdleCommand) -> None:
    async with asyncio.timeout(20):
        while not job.outcome:
            await asyncio.sleep(0.005)


async def until_begun(job: IdleCommand, folder: Path) -> list[int]:
    """And the loop has heard of the job's group."""
    pids = await asyncio.to_thread(pids_of, folder)
    async with asyncio.timeout(20):
        while not job._group:
            await asyncio.sleep(0.005)
    return pids


def test_the_whole_group_stops_and_goes_on(tmp_path: Path) -> None:
    """It starts when it may run for the first time; children of the shell are stopped and ended with it."""

    async def run() -> list[int]:
        job = IdleCommand(command(tmp_path))
        job.run()
        pids = await until_begun(job, tmp_path)
        job.stop()
        # "D": a shell that has just made a child by vfork waits for it to begin its program, and it has stopped before.
        until(lambda: all(state(pid) in "TD" for pid in pids))
        job.run()
        until(lambda: all(state(pid) == "S" for pid in pids))
        job.stop()
        await job.close()
        return pids

    pids = asyncio.run(run())
    until(lambda: all(state(pid) in "XZ" for pid in pids))


def test_a_job_that_never_may_run_never_starts(tmp_path: Path) -> None:
    """A server that is busy from its first moment on, and ends, has not started it."""

    async def run() -> None:
        job = IdleCommand(command(tmp_path))
        job.stop()
        await job.close()

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_the_end_is_told_and_takes_the_rest_along(tmp_path: Path) -> None:
    """By status or by signal; what the command left in its group ends with it, and signals go nowhere then."""

    async def run(end: str) -> tuple[str, list[int]]:
        job = IdleCommand(command(tmp_path, end=end))
        job.run()
        await until_told(job)
        job.stop(), job.run()
        await job.close()
        return job.outcome, pids_of(tmp_path)

    for end, told in (("exit 3", "ended with status 3"), ("kill -USR1 $$", "was ended by SIGUSR1")):
        outcome, pids = asyncio.run(run(end))
        assert outcome == told
        until(lambda pids=pids: all(state(pid) in "XZ" for pid in pids))  # type: ignore[misc]


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    """Also where the job is stopped, or its keeper is what was killed."""
    for victim in ("server", "keeper"):
        folder = tmp_path / victim
        folder.mkdir()
        server = subprocess.Popen([sys.executable, "-P", "-c", MAKER, command(folder)])
        pids = pids_of(folder)
        keeper = int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()[0])
        if victim == "server":
            os.killpg(pids[1], signal.SIGSTOP)
            server.kill()
        else:
            os.kill(keeper, signal.SIGKILL)
        until(lambda pids=pids: all(state(pid) in "XZ" for pid in pids))  # type: ignore[misc]
        server.kill()
        server.wait()
        until(lambda keeper=keeper: state(keeper) in "XZ")  # type: ignore[misc]
