"""`worker`: the engine process, started by hand on any machine, working for front ends elsewhere.

    load --> join A -> Ready, requests and outputs -> A goes -> join again, after a while -> ...
         '-> join B -> ...

One engine serves all its front ends (`engine.front_ends`). When one goes, the weights stay loaded and the prefix cache
warm; what it had asked for is dropped, and neither the others nor the next one hear of it. On SIGTERM the worker takes
no new requests, finishes those it has and leaves; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .. import __version__
from ..core.errors import LinkRefused
from ..core.events import Leaving, Ready
from ..engine.background import reclaim_idle_memory, send_expert_load, send_heartbeats
from ..engine.core import EngineCore
from ..engine.front_ends import FrontEnds
from ..engine.shell import EngineShell
from ..formats.checkpoint import weights_digest
from ..formats.hub import default_cache_dir
from ..kv.events.relay import TierEventRelay
from ..kv.store.options import TierOptions
from ..net.child_process import exit_when_parent_ends
from ..net.handshake import Identity
from ..net.mapped_files import keep_copy, new_path, prune
from ..net.system import MonotonicClock, run_event_loop
from ..net.tcp import Credentials, join
from ..node.joining import join_store, joining_later
from ..node.memory import Pressure
from ..node.options import EngineOptions
from ..server.listen import listening
from .adapter_link import AdapterCache, AdapterLink
from .engine_process import SWITCH_S, Launch, flight_recorder, load, recording, step_logging, warm_up
from .kv_events_options import KVEventsOptions, publish_tiers, published_facts, publishing, tell
from .kv_peers import LOOPBACK, open_to_peers
from .kv_tiers import KVTiers, kv_tiers
from .launchers.child import LIFELINE_VARIABLE
from .logs import print_facts, set_up_logging
from .models import resolve_model
from .options import engine_options, given_options
from .serve_options import ServeOptions
from .supervisor import FIRST_DELAY_S, LONGEST_DELAY_S, LOOK_S, SETTLED_S, Watchdog
from .worker_options import LinkOptions, WorkerOptions, shown_address

if TYPE_CHECKING:
    from ..engine.recorders import Watcher
    from ..net.kv_endpoints import KVEventsConfig
    from ..net.kv_publisher import KVPublisher
    from ..net.link import EngineLink
    from ..node.load import Engine

_REQUEST_BYTES = 8192
_REQUEST_S = 5.0

Probe = Callable[[], tuple[str, Mapping[str, Any]]]
"""What is wrong, "" for nothing, and facts to tell."""


@asynccontextmanager
async def answering_probes(address: tuple[str, int] | None, probes: Mapping[str, Probe]) -> AsyncIterator[None]:
    """Answers at `address`, if there is one: GET /live, whether steps get on, and GET /ready, whether a front end has
    this worker.

        200 {"status": "ok", ...}       503 {"status": "stuck" | "not joined", ...}

    A process that is stopped, or whose event loop is blocked, answers nothing: probes count that as a failure too.
    `probes`: by path. Raises ConfigError where the address is taken."""
    if address is None:
        yield
        return
    with listening(*address) as listener:
        server = await asyncio.start_server(_ProbeServer(probes).answer, sock=listener, limit=_REQUEST_BYTES)
        async with server:
            print(f"tokenmill: probes are answered at {shown_address(*listener.getsockname()[:2])}", flush=True)
            yield


class _ProbeServer:
    def __init__(self, probes: Mapping[str, Probe]) -> None:
        self._probes = probes

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass
        finally:
            writer.close()

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        probe = self._probes.get(rest.split(b" ", 1)[0].split(b"?", 1)[0].decode("latin-1"))
        if method not in (b"GET", b"HEAD") or probe is None:
            status, body = "404 Not Found", {"status": "not found"}
        else:
            wrong, facts = probe()
            status = "503 Service Unavailable" if wrong else "200 OK"
            body = {"status": wrong or "ok", **facts}
        data = json.dumps(body).encode()
        lines = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return f"{lines}Connection: close\r\n\r\n".encode() + (b"" if method == b"HEAD" else data)


STUCK_STATUS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """All that the command line of `worker` says, read once. serve: of its flags those that it shares with `serve`."""

    model: str
    worker: WorkerOptions
    serve: ServeOptions
    link: LinkOptions
    tiers: TierOptions
    kv_events: KVEventsConfig | None
    engine: EngineOptions

    @classmethod
    def of(cls, args: argparse.Namespace) -> WorkerConfig:
        """Raises ConfigError."""
        return cls(
            model=args.model,
            worker=given_options(WorkerOptions, args),
            serve=given_options(ServeOptions, args),
            link=given_options(LinkOptions, args),
            tiers=given_options(TierOptions, args),
            kv_events=given_options(KVEventsOptions, args).config,
            engine=engine_options(args),
        )


def worker(args: argparse.Namespace) -> int:
    if lifeline := os.environ.pop(LIFELINE_VARIABLE, ""):
        exit_when_parent_ends(int(lifeline), grace_s=1.0)
    given = WorkerConfig.of(args)
    levels = given.serve.log_level, given.serve.log_format
    set_up_logging(*levels)
    with kv_tiers(given.tiers, given.engine, *levels) as (engine, tiers):
        return _compute(replace(given, engine=engine), tiers)


def _compute(given: WorkerConfig, tiers: KVTiers) -> int:
    """given.engine: with the KV store that the engine joins."""
    joining, serving, link = given.worker, given.serve, given.link
    hosts, where = [host for host, _ in joining.connect], joining.kv_address or LOOPBACK
    credentials = link.credentials(*hosts, where[0], is_front_end=False)
    auth = link.peer_auth(credentials)
    model = resolve_model(given.model)
    name = joining.worker_id or f"{socket.gethostname()}-{os.getpid()}"
    launch = Launch(
        str(model.path), model.served_name, str(default_cache_dir()), given.engine,
        worker=name, pool=joining.pool, machine=tiers.machine_if_shared,
    )  # fmt: skip

    sys.setswitchinterval(SWITCH_S)
    engine, ready = load(launch)
    ready = replace(ready, worker=open_to_peers(engine, ready.worker, where, link.kv_transfer, auth))
    path = new_path(serving.flight_dir, "0") if serving.flight_dir else ""
    if path:
        prune(serving.flight_dir)
    with (
        contextlib.closing(engine),
        flight_recorder(path, ready.model) as recorder,
        step_logging(serving.step_log or "", engine, ready.model, recorder) as flight,
        recording(serving.journal or "", engine.config) as record,
        publishing(given.kv_events) as publisher,
    ):
        ready = replace(ready, facts=(*ready.facts, *published_facts(publisher)))
        print_facts(f"tokenmill {__version__} computes {ready.model} from {model.path}", ready.facts)
        identity = Identity(weights_digest(model.path, Path(launch.cache_dir)), ready)
        core = EngineCore(engine.config, record)
        tell(core, publisher)
        if recorder is not None:
            signal.signal(signal.SIGUSR2, lambda *_: _keep_flight(path))
        life = _Worker(engine, core, identity, joining.connect, credentials, serving.engine_timeout_s, flight, tiers)
        life.publisher = publisher
        run_event_loop(life.run(joining.health_address))
        if engine.worker.saved is not None:
            print(f"tokenmill: {engine.worker.saved.summary()}", file=sys.stderr, flush=True)
    return 0


class _Worker:
    """An engine and the front ends that it works for, several at once and one after the other."""

    def __init__(
        self,
        engine: Engine,
        core: EngineCore,
        identity: Identity,
        addresses: Sequence[tuple[str, int]],
        credentials: Credentials,
        timeout_s: float,
        flight: Watcher | None = None,
        tiers: KVTiers | None = None,
    ) -> None:
        self._engine = engine
        self._kv_tiers = tiers
        self._core = core
        self._flight = flight
        self._identity = identity
        self._addresses = addresses
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._watchdog = Watchdog(timeout_s)
        self._clock = MonotonicClock()
        self._front_ends = FrontEnds()
        self._tiers = TierEventRelay(lambda hear: engine.watch_tiers(hear))
        self._adapters = AdapterCache(default_cache_dir() / "adapters")
        self.publisher: KVPublisher | None = None
        self._is_leaving = False
        self._outside: set[asyncio.Task[LinkRefused | None]] = set()  # those that look for their front ends

    async def run(self, health_address: tuple[str, int] | None = None) -> None:
        """Until a signal, or no front end wants it. Raises LinkRefused when none does, or none is the right one, and
        ConfigError where probes cannot be answered at their address."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._leave, me)
        await self._join_store()
        pressure = Pressure()
        publish_tiers(self._core, self.publisher, self._tiers)
        shell = EngineShell(self._core, self._engine.worker.executor, self._front_ends, self._clock, self._flight)
        for event in self._engine.first_events():
            shell.hear(event)
        serving = asyncio.create_task(shell.run(), name="engine")
        joining = [asyncio.create_task(self._work_for(*address), name="join") for address in self._addresses]
        self._outside.update(joining)
        beside = [
            asyncio.create_task(self._end_when_stuck(), name="engine-watch"),
            asyncio.create_task(warm_up(self._engine, self._core), name="engine-warming"),
            asyncio.create_task(
                send_heartbeats(shell, self._front_ends, self._engine.ops.progress), name="engine-beats"
            ),
            asyncio.create_task(reclaim_idle_memory(shell, pressure.is_short), name="engine-memory"),
            asyncio.create_task(
                send_expert_load(self._core, self._front_ends, self._engine.worker.expert_load), name="engine-experts"
            ),
        ]
        if self._kv_tiers is not None:
            beside += [asyncio.create_task(work, name="kv-store") for work in self._kv_tiers.works()]
        try:
            async with (
                joining_later(self._engine, self._identity.ready, self._tiers.before(shell.hear)),
                answering_probes(health_address, {"/live": self._is_live, "/ready": self._is_ready}),
            ):
                await self._until_over(serving, joining)
        except asyncio.CancelledError:
            if not self._is_leaving:
                raise
        finally:
            for task in (serving, *joining, *beside):
                task.cancel()

    async def _join_store(self) -> None:
        ready = await join_store(self._engine, self._identity.ready)
        self._identity = replace(self._identity, ready=ready)
        for name, value in ready.facts:
            if name == "kv_tiers":
                print(f"tokenmill: KV tiers: {value}", flush=True)

    async def _until_over(self, serving: asyncio.Task[None], joining: Sequence[asyncio.Task[Any]]) -> None:
        all_joining = asyncio.gather(*joining, return_exceptions=True)
        until: list[asyncio.Future[Any]] = [serving, all_joining]
        await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            refusals = [each for each in await all_joining if isinstance(each, BaseException)]
            if len(refusals) == len(joining) and not self._is_leaving:
                raise refusals[0] if len(joining) == 1 else LinkRefused("No front end takes this worker.")
            self._front_ends.drain()
        await serving

    def _is_live(self) -> tuple[str, dict[str, Any]]:
        """Halfway to where this process ends itself."""
        stalled_s = self._watchdog.stalled_s
        is_stuck = 0 < self._timeout_s < 2 * stalled_s
        facts = {"has_work": self._core.has_work, "num_steps": self._core.stats().num_steps, "quiet_s": stalled_s}
        return "stuck" if is_stuck else "", facts

    def _is_ready(self) -> tuple[str, dict[str, Any]]:
        num_front_ends = self._front_ends.num_attached
        return "" if num_front_ends and not self._is_leaving else "not joined", {"front_ends": num_front_ends}

    async def _work_for(self, host: str, port: int) -> LinkRefused | None:
        """One front end after the other at this address, until one wants no more of this worker, or none of it."""
        me = cast("asyncio.Task[LinkRefused | None]", asyncio.current_task())
        where, delay_s = shown_address(host, port), FIRST_DELAY_S
        while not self._is_leaving:
            joined_s = time.monotonic()
            try:
                link = await join(host, port, self._credentials, self._identity, self._clock)
            except (OSError, EOFError) as error:
                _log.info("The front end at %s cannot be reached: %s", where, str(error) or "no answer in time")
            except LinkRefused as refusal:
                told = f"{where}: {refusal.message}"
                if len(self._addresses) > 1:  # this process goes on for the others
                    _log.error("%s", told)
                return LinkRefused(told)
            else:
                self._outside.discard(me)
                if await self._serve(link, where):
                    return None
                self._outside.add(me)
            if time.monotonic() - joined_s > SETTLED_S:
                delay_s = FIRST_DELAY_S
            if not self._is_leaving:
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # not all workers at the same moment
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        return None

    async def _serve(self, link: EngineLink, where: str) -> bool:
        """Until the link ends; whether the front end wants no more."""
        _log.info("Joined the front end at %s.", where)
        why = ""
        try:
            await link.send(self._ready())
            if self._is_leaving:
                await link.send(Leaving())
            adapters = AdapterLink(link, self._adapters)
            tiers = self._tiers.over(adapters)
            try:
                return await self._front_ends.serve(tiers, link.close)
            finally:
                tiers.close()
                adapters.close()
        except EOFError:
            return False
        except ValueError as error:
            why = str(error)
            return False
        finally:
            link.close()
            _log.info("The link to the front end at %s is over: %s", where, why or link.why_ended)

    def _ready(self) -> Ready:
        """With what it has done for others, and the pool that one of them may have put it into."""
        ready, membership = self._identity.ready, self._core.state.membership
        pool = membership.pool or ready.worker.pool
        worker, stats = ready.worker._replace(pool=pool, epoch=membership.epoch), self._core.stats()
        load = self._engine.worker.expert_load()
        told = None if load is None else replace(load, num_steps=stats.num_steps)
        return replace(ready, stats=stats, worker=worker, expert_load=told)

    def _leave(self, me: asyncio.Task[None]) -> None:
        """What a signal does."""
        if self._is_leaving:
            me.cancel()
            return
        self._is_leaving = True
        if self._front_ends.num_attached:
            _log.info("Leaving when the requests that are open here are done; again to leave at once.")
        self._front_ends.leave()
        for task in self._outside:
            task.cancel()

    async def _end_when_stuck(self) -> None:
        """The front end sees that this process lives, not that its steps get on; this process sees to that itself."""
        watchdog, progress = self._watchdog, self._engine.ops.progress
        before = progress()
        while True:
            await asyncio.sleep(LOOK_S)
            now = progress()
            if watchdog.finds_stuck(
                time.monotonic(),
                has_work=self._core.has_work,
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
