"""One life of an engine as the front end sees it: what comes over its link, and what is to be sent. And while no engine
serves: why, until when if that is known, and who waits for one.

What is to be sent goes in a few messages a turn of the event loop: requests, their aborts and what moves them in the
order in which it was said, and then all else. That an adapter goes is told behind all requests that name it, also those
that no engine has yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import groupby
from typing import Any, cast

from ..cluster.failures import Liveness
from ..core.errors import Unavailable
from ..core.events import Abort, Drain, FilePart, FromEngine, Ready, Submit, ToEngine
from ..core.ports import FrontEnd
from ..core.request import Request


class Absence:
    """why      there is no engine, told to whoever asks
    find_ready  the facts of the engines that serve; None: none does
    """

    def __init__(self, why: str, find_ready: Callable[[], Ready | None]) -> None:
        self.why = why
        self._find_ready = find_ready
        self._back_s: float | None = None
        self._callers: set[asyncio.Future[None]] = set()
        self._is_for_good = False

    def expect(self, back_s: float | None) -> None:
        """One comes in so many seconds from now, if that is known."""
        self._back_s = None if back_s is None else asyncio.get_running_loop().time() + back_s

    def close(self, why: str) -> None:
        """None will come any more."""
        self._is_for_good = True
        self.why = why
        self.wake()

    def wake(self) -> None:
        """Those who wait look again."""
        for woken in self._callers:
            if not woken.done():
                woken.set_result(None)

    def require_hope(self) -> None:
        """Raises Unavailable where none will come."""
        if self._is_for_good:
            raise Unavailable(self.why)

    def require_ready(self) -> Ready:
        """Raises Unavailable while no engine is ready."""
        ready = self._find_ready()
        if ready is None:
            back_s = self._back_s
            left_s = None if back_s is None else max(0.0, back_s - asyncio.get_running_loop().time())
            raise Unavailable(self.why, retry_after_s=left_s)
        return ready

    async def wait_ready(self, longest_s: float) -> Ready:
        """Waits for an engine. Raises Unavailable where none is ready in time, at once where that is known."""
        loop = asyncio.get_running_loop()
        is_near = self._back_s is None or self._back_s - loop.time() <= longest_s
        if self._find_ready() is None and is_near and not self._is_for_good:
            woken = loop.create_future()
            self._callers.add(woken)
            try:
                async with asyncio.timeout(longest_s):
                    await woken
            except TimeoutError:
                pass
            finally:
                self._callers.discard(woken)
        return self.require_ready()


class Timer:
    """Calls `ring` once `set` has said when; what `ring` gives is when next, None: not again until it is set."""

    def __init__(self, ring: Callable[[], float | None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0

    def set(self, at_s: float | None) -> None:
        """At that time of the loop's clock, or when it was set to, if that is sooner."""
        if at_s is None or (self._timer is not None and self._at_s <= at_s):
            return
        self.cancel()
        self._at_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._call)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
        self.set(self._ring())


_log = logging.getLogger(__name__)


class AttachedEngine:
    """number     which no other life has
    num_steps  committed, as far as told
    num_open   requests that it has
    is_leaving  it is told to take no more, maybe before it has had any
    address    where its link comes from; "": this machine
    since_s    when it was taken up
    epoch      of the last change of its pool, as far as told
    flight     file of its flight recorder, where it has one on this machine; else ""
    liveness   tells when it is lost though its link is open

    take is given what comes. must_wait tells of a notice whether it must wait, with all after it. lost is called when
    the link has ended or what came cannot be used, with what to say of it; in that case on_broken is called, too: the
    engine may live on, and hears of it from nobody else. So it is by `end_after`.
    """

    def __init__(
        self,
        number: int,
        link: FrontEnd,
        *,
        take: Callable[[AttachedEngine, FromEngine], None],
        must_wait: Callable[[ToEngine], bool],
        count_open: Callable[[int], int],
        lost: Callable[[AttachedEngine, str], None],
        on_broken: Callable[[], None],
        flight: str = "",
        address: str = "",
        liveness: Liveness | None = None,
    ) -> None:
        self.number = number
        self.liveness = liveness or Liveness(0.0)
        self.num_steps = 0
        self.epoch = 0
        self.since_s = 0.0
        self.is_leaving = False
        self.flight = flight
        self.address = address
        self.on_broken = on_broken
        self._link = link
        self._take = take
        self._must_wait = must_wait
        self._count_open = count_open
        self._lost = lost
        self._tasks: set[asyncio.Task[None]] = set()
        self._orders: list[Request | str | ToEngine] = []
        self._notices: list[ToEngine] = []
        self._wake = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self._count_open(self.number)

    def open(self) -> None:
        """Read and write from now on; needs a running loop."""
        self.spawn(self._read, "read")
        self.spawn(self._write, "write")

    def close(self) -> None:
        """Neither read nor write any more. The link itself is its maker's to close."""
        for task in self._tasks:
            task.cancel()
        self._tasks = set()

    def submit(self, request: Request) -> None:
        self._orders.append(request)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        self._orders.append(request_id)
        self._wake.set()

    def order(self, message: ToEngine) -> None:
        """Send what moves a request, between the requests and aborts that were given before and after it."""
        self._orders.append(message)
        self._wake.set()

    def tell(self, notice: ToEngine) -> None:
        """Send anything but what `submit`, `abort` and `order` send. A Drain passes what waits: the engine is to have
        no more of the requests that it waits for."""
        self._notices.insert(0 if isinstance(notice, Drain) else len(self._notices), notice)
        self._wake.set()

    async def send_part(self, part: FilePart) -> None:
        """Between the messages that wait, as soon as the link takes it; waits until then."""
        with contextlib.suppress(EOFError):  # the reader hears of it, too
            await self._link.send(cast(ToEngine, part))

    def look_again(self) -> None:
        """What a notice waits for may be over."""
        if self._notices:
            self._wake.set()

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Do `work` as long as the link is open; its failure is the link's. A task that is cancelled before it begins
        calls nothing, so that no coroutine is left that nobody awaits."""
        task = asyncio.create_task(self._guard(work), name=f"engine-client-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end_after(self, longest_s: float) -> None:
        """Have whoever runs the engine end it if it is not let go within this time."""

        async def end() -> None:
            await asyncio.sleep(longest_s)
            self.on_broken()

        self.spawn(end, "end")

    async def _read(self) -> None:
        """One message at a time, also where several have come: in the first turn between them readers write what they
        were given, and after the second it is with the system. So no more than a step is counted (`usage.meter`) and
        not sent if this process is killed."""
        while True:
            message = await self._link.receive()
            self.liveness.hear(message)
            self._take(self, message)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            orders, self._orders = self._orders, []
            waiting = next((i for i, notice in enumerate(self._notices) if self._must_wait(notice)), len(self._notices))
            notices, self._notices = self._notices[:waiting], self._notices[waiting:]
            for message in _messages(orders):
                await self._link.send(message)
            for notice in notices:
                await self._link.send(notice)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Whatever ends the link's reading or writing is the end of this engine."""
        try:
            await work()
        except EOFError:
            self._lost(self, "The engine has gone; another is awaited.")
        except Exception:
            _log.exception("The link to the engine failed.")
            self._lost(self, "The link to the engine failed; another engine is awaited.")
            self.on_broken()


def _messages(orders: Sequence[Request | str | ToEngine]) -> Iterator[ToEngine]:
    """Neighbours of one kind together."""
    for kind, group in groupby(orders, key=lambda each: Submit if isinstance(each, Request) else type(each)):
        if kind is Submit:
            yield Submit(tuple(each for each in group if isinstance(each, Request)))
        elif kind is str:
            yield Abort(tuple(each for each in group if isinstance(each, str)))
        else:
            yield from (each for each in group if not isinstance(each, Request | str))
