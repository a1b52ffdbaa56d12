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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.block import KVGroupSpec
from ..core.effects import Job
from ..core.errors import TokenmillError
from ..core.events import WorkerFacts
from ..core.ports import Executor
from ..core.step import StepPlan, StepResult
from ..core.step_records import LogFacts
from ..net.child_process import exit_when_parent_ends
from ..net.kv_endpoints import KVEventsConfig
from ..net.system import new_id, run_event_loop
from ..node.machine import MachineFacts, read_machine
from ..node.options import EngineOptions
from ..node.process import host_id
from ..node.resolve import longest
from .logs import set_up_logging

if TYPE_CHECKING:
    from ..core.config import EngineConfig
    from ..core.events import Ready
    from ..engine.core import EngineCore
    from ..engine.journal import Recorder
    from ..engine.recorders import FlightRecorder, Watcher
    from ..node.load import Engine


@dataclass(frozen=True, slots=True)
class Launch:
    """All that an engine process is told, as JSON on its standard input.

    path, model    the checkpoint, and the name it is served under
    cache_dir      where digests are remembered
    queue_bytes    what the front end may hold for waiting requests, for the printed plan
    address        of the link
    lifeline_fd    inherited read end of a pipe that closes when the front end ends
    heartbeat_fd   inherited write end of a pipe that takes signs of progress
    log_level      of the engine process's own messages
    log_format     of them (cli.logs)
    journal        file that takes the engine's story; "": none does
    flight         file of its flight recorder; "": there is none
    step_log       file of its step log; "": there is none
    worker, pool   what WorkerFacts calls id and pool
    kv_transfer    how it takes KV from workers of this machine, and gives it to them (cli.kv_peers); "": not at all
    kv_events      how it publishes what it caches; None: not at all
    rank           its number among the engines of its front end
    machine        what there is for it; None: it looks for itself
    """

    path: str
    model: str
    cache_dir: str
    options: EngineOptions
    queue_bytes: int = 0
    address: str = ""
    lifeline_fd: int = -1
    heartbeat_fd: int = -1
    log_level: str = "warning"
    log_format: str = "text"
    journal: str = ""
    flight: str = ""
    step_log: str = ""
    worker: str = ""
    pool: str = "mixed"
    kv_transfer: str = ""
    kv_events: KVEventsConfig | None = None
    rank: int = 0
    machine: MachineFacts | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Launch:
        fields: dict[str, Any] = json.loads(data)
        machine = fields["machine"]
        if machine is not None:
            machine = MachineFacts(**{**machine, "cpu_features": tuple(machine["cpu_features"])})
        kv_events = KVEventsConfig(**fields["kv_events"]) if fields["kv_events"] is not None else None
        options = EngineOptions(**fields["options"])
        return cls(**{**fields, "options": options, "kv_events": kv_events, "machine": machine})


SWITCH_S = 0.0002
"""How long the event loop may keep the interpreter once the step thread wants it: then no call can start."""


def main() -> int:
    gc.disable()  # until all is loaded: nothing of it is garbage
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
    from ..node.joining import join_store, joining_later
    from ..node.memory import Pressure, forget_peak
    from .kv_events_options import publish_tiers, published_facts, publishing, tell

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
            executor = with_faults(engine.worker.executor)
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


def load(launch: Launch) -> tuple[Engine, Ready]:
    """The engine, and what a front end is told of it. Raises ConfigError and BadCheckpoint."""
    from ..formats.checkpoint import open_checkpoint
    from ..node.load import load_engine
    from ..node.memory import private_bytes
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
    gc.enable()
    ready = engine.ready(launch.model)
    facts = worker_facts(launch.worker, launch.pool)
    if launch.kv_transfer:
        facts = open_to_peers(engine, facts, LOOPBACK, launch.kv_transfer)
    return replace(ready, memory=(*ready.memory, ("engine", base_bytes)), worker=facts)


def worker_facts(name: str, pool: str) -> WorkerFacts:
    """Of this process, whose life they name. name: "": it has no other name."""
    incarnation = new_id("engine")
    return WorkerFacts(name or incarnation, incarnation, os.getpid(), pool, host_id())


IDLE_CHECK_S = 0.1
NUM_IDLE_CHECKS = 10


async def until_idle(is_busy: Callable[[], bool], num_done: Callable[[], int]) -> None:
    """Return after NUM_IDLE_CHECKS checks in a row, IDLE_CHECK_S apart, that found nothing to do and nothing done since
    the one before. What runs after that, such as loading what a later request will need, delays nobody. `num_done`:
    grows with what is done."""
    num_idle, before = 0, num_done()
    while num_idle < NUM_IDLE_CHECKS:
        await asyncio.sleep(IDLE_CHECK_S)
        now = num_done()
        num_idle = 0 if is_busy() or now != before else num_idle + 1
        before = now


async def warm_up(engine: Engine, core: EngineCore) -> None:
    """Load, while nobody is served, what requests of some kinds would wait for."""
    await until_idle(lambda: core.has_work, lambda: core.state.counters.num_steps)
    await engine.worker.executor.warm_up_grammars()


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


@contextmanager
def step_logging(path: str, engine: Engine, model: str, beside: Watcher | None) -> Iterator[Watcher | None]:
    """What hears of an engine's steps: its step log in the file at `path`, and `beside`; "": `beside` alone."""
    from ..engine.recorders import StepLog
    from ..net.mapped_files import step_file

    if not path:
        yield beside
        return
    with step_file(path, _facts(engine, model)) as writer:
        yield beside if writer is None else StepLog(writer, beside)


def num_blocks_of(groups: Sequence[KVGroupSpec]) -> int:
    """Of the pool that says how many tokens there is KV for: those of windows hold the last tokens alone."""
    most = max(group.num_blocks for group in groups)
    return longest(groups, block_size=1, max_context=most)  # in blocks, not tokens


def _facts(engine: Engine, model: str) -> LogFacts:
    config = engine.config
    return LogFacts(
        model=model,
        numerics_id=config.numerics_id,
        processor=read_machine().cpu_model,
        isa=engine.kernels.partition(", threads")[0],
        threads=engine.settings.threads,
        block_size=config.block_size,
        num_blocks=num_blocks_of(config.groups),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        chosen_experts=config.chosen_experts,
        cores=read_machine().num_cpus,
    )


CRASH, OUT_OF_MEMORY = "TOKENMILL_TEST_POISON_SEED", "TOKENMILL_TEST_HUNGRY_SEED"
TAKEN_BYTES = 1 << 29


class FaultInjector:
    """For tests: an executor that does what `executor` does, until it is given a row of a request with one of two
    seeds.

    `TOKENMILL_TEST_POISON_SEED=N tokenmill serve ...` has requests with the seed N crash the engine process;
    `TOKENMILL_TEST_HUNGRY_SEED=N` has them take TAKEN_BYTES and end it as the system does when memory runs out. So
    tests see what becomes of a request that ends engines, and of those beside it (cluster/failures.py)."""

    def __init__(self, executor: Executor, crash: int | None, out_of_memory: int | None) -> None:
        self._executor = executor
        self._crash = crash
        self._out_of_memory = out_of_memory

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        seeds = {row.intro.seed for row in plan.rows if row.intro is not None}
        if self._crash in seeds:
            os.kill(os.getpid(), signal.SIGABRT)
        if self._out_of_memory in seeds:
            taken = b"x" * TAKEN_BYTES
            os.kill(os.getpid(), signal.SIGKILL)
            assert taken
        return self._executor.execute(plan)

    async def run(self, job: Job) -> str:
        return await self._executor.run(job)


def with_faults(executor: Executor) -> Executor:
    seeds = [None if (seed := os.environ.get(name)) is None else int(seed) for name in (CRASH, OUT_OF_MEMORY)]
    return executor if seeds == [None, None] else FaultInjector(executor, *seeds)


if __name__ == "__main__":
    sys.exit(main())
