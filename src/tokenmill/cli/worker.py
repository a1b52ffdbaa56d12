"""`worker`: the engine process, started by hand on any machine, working for a front end elsewhere.

    load -> join -> Ready, requests and outputs -> the front end goes -> join again, after a while -> ...

When the front end goes, the weights stay loaded and the prefix cache warm; what it had asked for is dropped, and the
next one hears of none of it. On SIGTERM the worker takes no new requests, finishes those it has and leaves; a second
one ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..core.effects import Event
from ..core.events import Abort, Leaving, UnloadAdapter
from ..engine.core import EngineCore
from ..engine.shell import EngineShell
from ..formats.checkpoint import weights_digest
from ..formats.hub import default_cache_dir
from ..net.clock import MonotonicClock
from ..net.flight_file import keep_copy, new_path, prune
from ..net.handshake import Identity
from ..net.loop import run_event_loop
from ..net.tcp import Credentials, join
from .engine_process import SWITCH_S, flight_recorder, load, recording, warm_up
from .launch import Launch
from .logs import set_up_logging
from .models import resolve_model
from .options import engine_options, given_options
from .plan import print_facts
from .serve_options import ServeOptions
from .supervisor import FIRST_DELAY_S, LONGEST_DELAY_S, SETTLED_S
from .watchdog import LOOK_S, Watchdog
from .worker_options import LinkOptions, WorkerOptions, shown_address

if TYPE_CHECKING:
    from ..engine.flight import FlightRecorder
    from ..net.link import EngineLink
    from ..node.load import Engine

STUCK_STATUS = 3

_log = logging.getLogger(__name__)


def worker(args: argparse.Namespace) -> int:
    serving = given_options(ServeOptions, args)
    set_up_logging(serving.log_level, serving.log_format)
    address = given_options(WorkerOptions, args).connect
    assert address is not None
    credentials = given_options(LinkOptions, args).credentials(address[0], is_front_end=False)
    model = resolve_model(args.model)
    launch = Launch(str(model.path), model.served_name, str(default_cache_dir()), engine_options(args))

    sys.setswitchinterval(SWITCH_S)
    engine, ready = load(launch)
    path = new_path(serving.flight_dir, "0") if serving.flight_dir else ""
    if path:
        prune(serving.flight_dir)
    with (
        contextlib.closing(engine),
        flight_recorder(path, ready.model) as flight,
        recording(serving.journal or "", engine.config) as record,
    ):
        print_facts(f"tokenmill {__version__} computes {ready.model} from {model.path}", ready.facts)
        identity = Identity(ready.worker.incarnation, weights_digest(model.path, Path(launch.cache_dir)), ready)
        core = EngineCore(engine.config, record)
        if flight is not None:
            signal.signal(signal.SIGUSR2, lambda *_: _keep_flight(path))
        run_event_loop(_Worker(engine, core, identity, address, credentials, serving.engine_timeout_s, flight).run())
        if engine.worker.saved is not None:
            print(f"tokenmill: {engine.worker.saved.summary()}", file=sys.stderr, flush=True)
    return 0


class _Worker:
    """An engine and the front ends that it works for, one after the other."""

    def __init__(
        self,
        engine: Engine,
        core: EngineCore,
        identity: Identity,
        address: tuple[str, int],
        credentials: Credentials,
        timeout_s: float,
        flight: FlightRecorder | None = None,
    ) -> None:
        self._engine = engine
        self._core = core
        self._flight = flight
        self._identity = identity
        self._address = address
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._clock = MonotonicClock()
        self._link: EngineLink | None = None
        self._is_leaving = False
        self._first = engine.first_events()  # for the core, before what the next front end says
        self._farewell: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until a signal. Raises LinkRefused when the front end does not want this worker, or is not the right one."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave, me)
        watch = asyncio.create_task(self._end_when_stuck(), name="engine-watch")
        warming = asyncio.create_task(warm_up(self._engine, self._core), name="engine-warming")
        delay_s = FIRST_DELAY_S
        try:
            while not self._is_leaving:
                joined_s = time.monotonic()
                await self._work_once()
                if time.monotonic() - joined_s > SETTLED_S:
                    delay_s = FIRST_DELAY_S
                if not self._is_leaving:
                    await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # not all workers at the same moment
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        except asyncio.CancelledError:
            if not self._is_leaving:
                raise
        finally:
            watch.cancel()
            warming.cancel()

    async def _work_once(self) -> None:
        """From joining a front end to its end."""
        where = shown_address(*self._address)
        try:
            link = await join(*self._address, self._credentials, self._identity, self._clock)
        except (OSError, EOFError) as error:
            _log.info("The front end at %s cannot be reached: %s", where, str(error) or "no answer in time")
            return
        self._link = link
        _log.info("Joined the front end at %s.", where)
        try:
            await link.send(replace(self._identity.ready, stats=self._core.stats()))
            shell = EngineShell(self._core, self._engine.worker.executor, link, self._clock, self._flight)
            await self._serve(shell, self._first)
            self._first = ()
            if self._core.is_drained:
                self._is_leaving = True  # also where the front end has asked for it
            else:  # the next front end may give requests the same ids: nothing may be left
                await self._serve(shell, self._farewells())
        except EOFError:
            pass
        finally:
            self._link = None
            link.close()
        _log.info("The link to the front end at %s is over: %s", where, link.why_ended)

    @staticmethod
    async def _serve(shell: EngineShell, first: tuple[Event, ...]) -> None:
        for event in first:
            shell.hear(event)
        await shell.run()

    def _farewells(self) -> tuple[Event, ...]:
        """What takes back all that a front end that has gone had asked for."""
        return (Abort(self._core.open_ids), *map(UnloadAdapter, self._core.state.adapters.loads()))

    def _leave(self, me: asyncio.Task[None]) -> None:
        """What a signal does."""
        if self._is_leaving or self._link is None:
            me.cancel()
        else:
            _log.info("Leaving the front end when the requests that are open here are done; again to leave at once.")
            self._farewell = asyncio.create_task(_say_farewell(self._link))
        self._is_leaving = True

    async def _end_when_stuck(self) -> None:
        """The front end sees that this process lives, not that its steps get on; this process sees to that itself."""
        watchdog, progress = Watchdog(self._timeout_s), self._engine.ops.progress
        before = progress()
        while True:
            await asyncio.sleep(LOOK_S)
            now = progress()
            if watchdog.finds_stuck(
                time.monotonic(),
                has_work=self._link is not None and self._core.has_work,
                has_beaten=now is not None and now != before,
                num_steps=self._core.stats().num_steps,
            ):
                _log.error("The engine has made no progress for %g s; this worker ends.", self._timeout_s)
                os._exit(STUCK_STATUS)
            before = now


def _keep_flight(path: str) -> None:
    kept = keep_copy(path, "asked")
    if kept is not None:
        _log.warning("What the engine did lately is in %s.", kept)


async def _say_farewell(link: EngineLink) -> None:
    with contextlib.suppress(EOFError):
        await link.send(Leaving())
