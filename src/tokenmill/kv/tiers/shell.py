"""Runs a KV store's manager, live and simulated: messages of clients in, effects out.

    link.say -> manager.handle -> answers   to the links of their clients
                               -> jobs      to the tiers, each a task; their ends go to the manager
                               -> freed     given back to the system, at once
    time that the manager asked for -> Tick

Messages are handled as they come, in one turn of the loop each. It does no I/O of its own and knows no bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ...core.errors import TokenmillError
from ...core.ports import Clock
from ...core.tiers import (
    DropFrom,
    FromStore,
    Gone,
    HostResized,
    LoadFrom,
    LookIn,
    Said,
    SaveTo,
    Tick,
    Tier,
    TierInput,
    TierJob,
    TierJobEnded,
    TierManaging,
    TierOpened,
    ToStore,
)

log = logging.getLogger(__name__)

MAX_UNHEARD = 100_000
"""Messages that a client may leave unheard; one that is further behind is dropped."""

SHORTEST_TICK_S = 0.001
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


class TierLink:
    """A client's end, in the process of the store."""

    def __init__(self, shell: TierShell, client: int) -> None:
        self._shell = shell
        self._client = client
        self._unheard: deque[FromStore] = deque()
        self._has_come = asyncio.Event()
        self._is_over = False

    async def say(self, message: ToStore) -> None:
        """Raises EOFError when the store or this link is over."""
        if self._is_over:
            raise EOFError("The KV store has gone.")
        self._shell.handle(Said(self._client, message))

    async def hear(self) -> FromStore:
        """The next message; EOFError once there is none and none can come."""
        while not self._unheard:
            if self._is_over:
                raise EOFError("The KV store has gone.")
            self._has_come.clear()
            await self._has_come.wait()
        return self._unheard.popleft()

    def close(self) -> None:
        """The client has gone."""
        if not self._is_over:
            self.end()
            self._shell.forget(self._client)

    def put(self, message: FromStore) -> bool:
        """For the shell. False where the client is too far behind."""
        self._unheard.append(message)
        self._has_come.set()
        return len(self._unheard) <= MAX_UNHEARD

    def end(self) -> None:
        """For the shell: nothing more comes."""
        self._is_over = True
        self._has_come.set()


class TierShell:
    """tiers  by name, those below host memory
    free   (offset, bytes) of host memory that is to go back to the system
    """

    def __init__(
        self, manager: TierManaging, tiers: Mapping[str, Tier], clock: Clock, free: Callable[[int, int], None]
    ) -> None:
        self.manager = manager
        self._tiers = tiers
        self._clock = clock
        self._free = free
        self._links: dict[int, TierLink] = {}
        self._num_links = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._tick_s: float | None = None
        self._unopened = dict.fromkeys(tiers)
        self._has_opened = asyncio.Event()
        self._is_over = False
        self._failed: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Until cancelled. Raises what the manager fails with, and TokenmillError where a tier cannot be used as asked.
        Ends the links; jobs of tiers that are under way end before it does."""
        self._failed = asyncio.get_running_loop().create_future()
        for name, tier in self._tiers.items():
            self._start(self._open(name, tier), f"kv-open-{name}")
        try:
            if self._failure is None:
                await self._failed
            assert self._failure is not None
            raise self._failure
        finally:
            self._is_over = True
            self._forget_timer()
            for link in self._links.values():
                link.end()
            self._links.clear()
            await self._end()

    async def wait_opened(self) -> None:
        """Until each tier is there, or was found not to be for now."""
        while self._unopened:
            await self._has_opened.wait()

    def connect(self) -> TierLink:
        """A client, which has yet to say Join."""
        self._num_links += 1
        link = TierLink(self, self._num_links)
        if self._is_over:
            link.end()
        else:
            self._links[self._num_links] = link
        return link

    def resize(self, num_bytes: int) -> None:
        """Host memory may take so much from now on."""
        self.handle(HostResized(num_bytes))

    def handle(self, event: TierInput) -> None:
        if self._is_over:
            return
        try:
            effects = self.manager.handle(event, self._clock.now())
        except Exception as error:
            log.exception("The KV store failed at %s.", type(event).__name__)
            self._fail(error)
            return
        for offset, num_bytes in effects.freed:
            self._free(offset, num_bytes)
        for client, message in effects.answers:
            link = self._links.get(client)
            if link is not None and not link.put(message):
                log.warning("A client of the KV store does not listen: its connection is ended.")
                link.close()
        for job in effects.jobs:
            self._start(self._run_job(job), f"kv-{type(job).__name__}-{job.number}")
        self._set_timer()

    def forget(self, client: int) -> None:
        """For a link that is closed."""
        if self._links.pop(client, None) is not None:
            self.handle(Gone(client))

    async def _run_job(self, job: TierJob) -> None:
        tier, result, error = self._tiers[job.tier], tuple[int, ...](), ""
        try:
            match job:
                case LookIn():
                    result = tuple(await tier.look(job))
                case LoadFrom():
                    result = tuple(await tier.load(job))
                case SaveTo():
                    result = tuple(await tier.save(job))
                case DropFrom():
                    await tier.drop(job)
        except OSError as failure:
            error = str(failure) or type(failure).__name__
        except Exception as failure:
            log.exception("The tier %s failed at %s.", job.tier, type(job).__name__)
            error = f"{type(failure).__name__}: {failure}"
        self.handle(TierJobEnded(job, result, error))

    async def _open(self, name: str, tier: Tier) -> None:
        """Try until the tier is there."""
        retry_s, is_told = FIRST_RETRY_S, False
        while True:
            try:
                entries = await tier.open()
            except OSError as error:
                self._note_opened(name)
                if not is_told:
                    log.warning("The tier %s of the KV store cannot be used now: %s", name, error)
                is_told = True
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
            except TokenmillError as error:
                return self._fail(error)
            else:
                self.handle(TierOpened(name, tuple(entries)))
                return self._note_opened(name)

    def _note_opened(self, name: str) -> None:
        self._unopened.pop(name, None)
        if not self._unopened:
            self._has_opened.set()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            if self._failed is not None and not self._failed.done():
                self._failed.set_result(None)

    def _set_timer(self) -> None:
        tick_s = self.manager.next_s
        if tick_s == self._tick_s:
            return
        self._forget_timer()
        if tick_s is not None:
            self._tick_s = tick_s
            left_s = max(tick_s - self._clock.now(), SHORTEST_TICK_S)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tick)

    def _tick(self) -> None:
        self._timer = self._tick_s = None
        self.handle(Tick())

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._tick_s = None

    async def _end(self) -> None:
        """Jobs that are under way end, for tiers may still read and write slots; openings are given up."""
        for task in list(self._tasks):
            if task.get_name().startswith("kv-open-"):
                task.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for tier in self._tiers.values():
            await tier.close()
