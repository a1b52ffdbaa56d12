"""The process that holds the model: started by `supervisor`, it loads, says Ready on the link, and runs the engine.

    front end                                      this process
    Launch as JSON on standard input    ------->   read once
    link (net room, private folder)     <------>   Ready, then requests and outputs
    report pipe (standard output)       <-------   one line, only if loading fails
    lifeline (inherited descriptor)     -------->  closes when the front end ends, however it ends
    heartbeat (inherited descriptor)    <-------   a byte for each second in which a step got on

Terminal signals are the front end's to answer: Ctrl-C and a group-wide SIGTERM reach this process too, which must live
until the front end has drained it. It ends when the link does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import TokenmillError
from ..core.events import WorkerFacts
from ..net.child_process import exit_when_parent_ends
from ..net.system import run_event_loop
from .launch import Launch
from .logs import set_up_logging
from .quiet import until_quiet
from .step_logging import step_logging

if TYPE_CHECKING:
    from ..core.config import EngineConfig
    from ..core.events import Ready
    from ..engine.core import EngineCore
    from ..engine.journal import Recorder
    from ..engine.recorders import FlightRecorder
    from ..node.load import Engine

SWITCH_S = 0.0002
"""How long the event loop may keep the interpreter once the step thread wants it: then no call can start."""


def main() -> int:
    launch = begin()
    # Standard output is the report pipe; whatever else prints goes where the front end's own messages go.
    report = os.dup(1)
    os.dup2(2, 1)
    return run(launch, report, lambda: load(launch))


def begin() -> Launch:
    """What the process is told on standard input; signals are left to its parent, and messages go where it says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # USR2: the front end copies the flight recorder
        signal.signal(number, signal.SIG_IGN)
    launch = Launch.from_json(sys.stdin.buffer.read())
    set_up_logging(launch.log_level, launch.log_format)
    return launch


def run(launch: Launch, report_fd: int, make: Callable[[], tuple[Engine, Ready]]) -> int:
    """Make the engine and run it as long as its link lasts; the exit status. A reason not to is told by `report_fd`."""
    exit_when_parent_ends(launch.lifeline_fd, grace_s=1.0)
    sys.setswitchinterval(SWITCH_S)
    try:
        run_event_loop(_serve(launch, make))
    except TokenmillError as error:
        os.write(report_fd, json.dumps({"error": error.message}).encode() + b"\n")
        return 2
    return 0


async def _serve(launch: Launch, make: Callable[[], tuple[Engine, Ready]]) -> None:
    # Imported here so that the lifeline is in place before the slow imports.
    from ..engine.background import reclaim_idle_memory, send_expert_load, send_heartbeats
    from ..engine.build import build_engine
    from ..kv.events.relay import TierEventRelay
    from ..net.child_process import sending_heartbeats
    from ..net.system import MonotonicClock
    from ..net.unix import UnixEngineEnd
    from ..node.heap import forget_peak
    from ..node.joining import join_store, joining_later
    from ..node.pressure import Pressure
    from .kv_events_options import publish_tiers, published_facts, publishing, tell
    from .poison import maybe_poisoned

    pressure = Pressure()
    engine, ready = make()
    ready = await join_store(engine, ready)
    forget_peak()  # loading may take more than is planned for serving
    clock = MonotonicClock()
    link = UnixEngineEnd(launch.address, clock)
    relay = TierEventRelay(engine.watch_tiers)
    end = relay.over(link)
    try:
        with (
            flight_recorder(launch.flight, launch.model) as recorder,
            step_logging(launch.step_log, engine, launch.model, recorder) as flight,
            sending_heartbeats(launch.heartbeat_fd, engine.ops.progress),
            recording(launch.journal, engine.config) as record,
            publishing(launch.kv_events, launch.rank) as publisher,
        ):
            executor = maybe_poisoned(engine.worker.executor)
            shell = build_engine(engine.config, executor, end, clock, record, engine.first_events(), flight)
            tell(shell.core, publisher)
            publish_tiers(shell.core, publisher, relay)
            await end.send(replace(ready, facts=(*ready.facts, *published_facts(publisher))))
            beside = [
                asyncio.create_task(warm_up(engine, shell.core), name="engine-warming"),
                asyncio.create_task(send_heartbeats(shell, end, engine.ops.progress), name="engine-beats"),
                asyncio.create_task(reclaim_idle_memory(shell, pressure.is_short), name="engine-memory"),
                asyncio.create_task(
                    send_expert_load(shell.core, end, engine.worker.expert_load), name="engine-experts"
                ),
            ]
            try:
                async with joining_later(engine, ready, relay.before(shell.hear)):
                    await shell.run()
            finally:
                for task in beside:
                    task.cancel()
        if engine.worker.saved is not None:
            print(f"tokenmill: {engine.worker.saved.summary()}", file=sys.stderr, flush=True)
    except EOFError:
        pass  # The front end has gone, and with it every request.
    finally:
        link.close()
        engine.close()


async def warm_up(engine: Engine, core: EngineCore) -> None:
    """Load, while nobody is served, what requests of some kinds would wait for."""
    await until_quiet(lambda: core.has_work, lambda: core.state.counters.num_steps)
    await engine.worker.executor.warm_up_grammars()


def load(launch: Launch) -> tuple[Engine, Ready]:
    """The engine, and what a front end is told of it. Raises ConfigError and BadCheckpoint."""
    from ..formats.checkpoint import open_checkpoint
    from ..node.heap import private_bytes
    from ..node.load import load_engine
    from ..node.machine import read_machine
    from .models import progress_bar

    machine = launch.machine or read_machine()
    checkpoint = open_checkpoint(launch.path)
    base_bytes = private_bytes()
    with progress_bar(f"loading {launch.model}") as progress:
        engine = load_engine(checkpoint, launch.options, machine, Path(launch.cache_dir), launch.queue_bytes, progress)
    checkpoint.close()
    return engine, ready_of(engine, launch, base_bytes)


def ready_of(engine: Engine, launch: Launch, base_bytes: int) -> Ready:
    """What a front end is told of an engine that was just made, which workers of this machine may reach from
    now on. base_bytes: what its process takes besides."""
    from .kv_peers import LOOPBACK, open_to_peers

    gc.freeze()  # what is loaded stays: the collector need not walk it again and again
    ready = engine.ready(launch.model)
    facts = worker_facts(launch.worker, launch.pool)
    if launch.kv_transfer:
        facts = open_to_peers(engine, facts, LOOPBACK, launch.kv_transfer)
    return replace(ready, memory=(*ready.memory, ("engine", base_bytes)), worker=facts)


def worker_facts(name: str, pool: str) -> WorkerFacts:
    """Of this process, whose life they name. name: "": it has no other name."""
    from ..net.system import new_id
    from ..node.machine import host_id

    incarnation = new_id("engine")
    return WorkerFacts(name or incarnation, incarnation, os.getpid(), pool, host_id())


@contextmanager
def flight_recorder(path: str, model: str) -> Iterator[FlightRecorder | None]:
    """What records an engine's last steps in the file at `path`; "": nothing does."""
    from ..engine.recorders import FlightRecorder
    from ..net.mapped_files import flight_file

    if not path:
        yield None
        return
    with flight_file(path, model) as file:
        yield None if file is None else FlightRecorder(file.writer, file.keep_failed)


def recording(path: str, config: EngineConfig) -> AbstractContextManager[Recorder | None]:
    """What takes an engine's story down in the file at `path`; "": nothing does."""
    from ..engine.journal import entry_line, header_line
    from ..net.journal import journal_file

    return journal_file(path, header_line(config), entry_line) if path else nullcontext()


if __name__ == "__main__":
    sys.exit(main())
