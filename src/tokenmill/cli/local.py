"""The launcher of this machine: engines are processes beside the front end, each kept alive by a supervisor.

One engine loads for itself. Several are forked by a zygote, so that they share the weights, where the system can do
that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from ..core.events import Ready
from ..net.mapped_files import prune
from ..node.machine import read_machine
from .engine_process import Launch
from .engines import until_first_ends
from .supervisor import EngineProcess, Supervisor
from .zygote import Zygote, can_fork

if TYPE_CHECKING:
    from ..server.client import EngineClient


class LocalEngines:
    """An engines.Launcher. pools: of each engine, where it serves. They divide the machine's processors and memory.
    engine_timeout_s, flight_dir: see Supervisor. forks: they are forked by a zygote."""

    joins = False

    def __init__(
        self,
        launch: Launch,
        pools: Sequence[str],
        engine_timeout_s: float = 0.0,
        flight_dir: str = "",
        forks: bool = False,
    ) -> None:
        assert pools, "no engine"
        machine = launch.machine
        if forks or len(pools) > 1:
            machine = machine or read_machine()
            machine = replace(machine, num_sharing=machine.num_sharing * len(pools))
        self._zygote = Zygote(replace(launch, machine=machine)) if forks and can_fork() else None
        self._supervisors = [
            Supervisor(
                replace(
                    launch,
                    worker=f"w{index}",
                    pool=pool,
                    rank=index,
                    machine=machine,
                    journal=_own(launch.journal, index, len(pools)),
                    step_log=_own(launch.step_log, index, len(pools)),
                ),
                engine_timeout_s,
                flight_dir,
                EngineProcess.start if self._zygote is None else self._zygote.start,
            )
            for index, pool in enumerate(pools)
        ]
        self._flight_dir = flight_dir
        self._held = contextlib.ExitStack()
        counts = {pool: pools.count(pool) for pool in pools}
        self.summary = ", ".join(f"{count} {pool}" for pool, count in counts.items()) if len(pools) > 1 else ""

    def __enter__(self) -> Self:
        if self._flight_dir:
            prune(self._flight_dir)
        with contextlib.ExitStack() as held:
            if self._zygote is not None:
                held.enter_context(self._zygote)
            for supervisor in self._supervisors:
                held.enter_context(supervisor)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    async def run(self, client: EngineClient, complete: Callable[[Ready], Ready], address: str = "") -> None:
        def note(ready: Ready) -> Ready:
            return complete(replace(ready, memory=self._memory(ready)))

        forking = [] if self._zygote is None else [self._zygote.run()]
        await until_first_ends(*forking, *(each.run(client, note, self._has_begun) for each in self._supervisors))

    def _memory(self, ready: Ready) -> tuple[tuple[str, int], ...]:
        """Of all engines together, by what one tells. A zygote has the weights once, and is a process more."""
        count = len(self._supervisors)
        if count == 1:
            return ready.memory
        counts = {} if self._zygote is None else {"engine": count + 1}
        return tuple(
            (name, size)
            if name == "weights" and self._zygote is not None
            else (f"{name} of {count} workers", size * counts.get(name, count))
            for name, size in ready.memory
        )

    def _has_begun(self) -> bool:
        """What one engine could load, another can: its end is then no reason to end all."""
        return any(each.was_ready for each in self._supervisors)

    async def drain(self, within_s: float) -> None:
        await asyncio.gather(*(each.drain(within_s) for each in self._supervisors))

    def keep_flight(self) -> None:
        for each in self._supervisors:
            each.keep_flight()


def _own(path: str, index: int, number: int) -> str:
    """Of that engine, where each of several has a file of its own."""
    return f"{path}.w{index}" if path and number > 1 else path
