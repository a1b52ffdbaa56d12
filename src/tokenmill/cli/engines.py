"""The engines of `serve`: those that a launcher starts and keeps alive, and workers that join by themselves.

    Launcher   of this machine (`local`), or one that has workers started elsewhere, which then join by the network
    Workers    takes these in (`workers`)
    Engines    both, as the front end sees them

All engines of a front end must give equal answers. So workers join once an engine of its own is ready, and are compared
with that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, Self

from ..core.events import Ready

if TYPE_CHECKING:
    from ..server.client import EngineClient
    from .workers import Workers


class Launcher(Protocol):
    """Starts engines for a front end and keeps them alive. A context manager: entering begins to start them, so that
    they load while the front end does, and leaving ends them.

    joins    its engines are workers (`tokenmill worker --connect`), which join by the network; else it attaches them to
             the client itself
    summary  how many there are of what, for the printed plan
    """

    joins: bool
    summary: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    async def run(self, client: EngineClient, complete: Callable[[Ready], Ready], address: str) -> None:
        """Never returns; raises the reason when no engine can be started, and ends when cancelled. `complete` is given
        each Ready and returns it with what only the front end knows. `address`: where workers may join; "" where they
        may not."""
        ...

    async def drain(self, within_s: float) -> None:
        """Have engines save what they keep and end, which they may take `within_s` for. To be called when no request is
        open; `run` goes on until then."""
        ...

    def keep_flight(self) -> None:
        """Copy what engines have done lately to files that stay, and tell of them in the log."""
        ...


class Engines:
    """A context manager, as its launcher is. Where neither is given there are none: models are loaded on demand."""

    def __init__(self, launcher: Launcher | None, workers: Workers | None) -> None:
        self._launcher = launcher
        self._workers = workers
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._launcher is not None:
            self._held.enter_context(self._launcher)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def are_here(self) -> bool:
        """Whether there are engines of this machine's from the start, whose memory is the front end's to plan."""
        return self._launcher is not None and not self._launcher.joins

    @property
    def are_none(self) -> bool:
        """Whether whoever loads models on demand starts all that there are."""
        return self._launcher is None and self._workers is None

    @property
    def summary(self) -> str:
        return "" if self._launcher is None else self._launcher.summary

    async def run(
        self, client: EngineClient, complete: Callable[[Ready], Ready], prepared: asyncio.Future[None]
    ) -> None:
        """Never returns; raises the reason when no engine can be started, and ends when cancelled. `complete`: see
        Launcher; `prepared`: done when the first engine serves."""
        launcher, workers = self._launcher, self._workers
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        first: list[Ready] = []

        def note(ready: Ready) -> Ready:
            first.append(ready)
            return complete(ready)

        def note_listening(address: str) -> None:
            print(f"tokenmill: workers may join at {address}", flush=True)
            if not self.are_here:
                print(f"tokenmill: waiting for the first: tokenmill worker MODEL --connect {address}", flush=True)
            listening.set_result(address)

        async def launch() -> None:
            assert launcher is not None
            await launcher.run(client, note, await listening if launcher.joins else "")

        async def take_in() -> None:
            assert workers is not None
            if not self.are_here:
                return await workers.run(client, complete, note_listening)
            await asyncio.wait([prepared])  # workers are measured by this engine, and it by none of them
            await workers.run(client, complete, note_listening, first[0])

        if self.are_none:
            await asyncio.get_running_loop().create_future()  # never: what starts engines ends them
        works = [] if launcher is None else [launch()]
        if workers is not None:
            works.append(take_in())
        await until_first_ends(*works)

    async def drain(self, within_s: float) -> None:
        if self._launcher is not None:
            await self._launcher.drain(within_s)

    def keep_flight(self) -> None:
        if self._launcher is not None:
            self._launcher.keep_flight()


async def until_first_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first ends, cancels the rest, and raises what the first raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
