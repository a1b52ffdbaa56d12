"""The front end of `serve`, from the loading of its text to the end of its last call, in front of engines that are
started beside it.

Heavy modules are imported inside functions: the engine's process loads weights meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from .. import __version__
from ..control.audit.options import AuditOptions
from ..control.observe.traces import Tracing
from ..core.errors import TokenmillError
from ..core.events import Ready
from ..core.policy import Order
from ..core.units import format_names, format_parts
from ..formats.hub import ResolvedModel
from ..node.machine import MachineFacts
from ..node.options import TextOptions
from ..server.config import ServerConfig
from ..server.systemd import notify
from .engine_process import Launch, until_idle
from .engines import Engines, until_first_ends
from .expert_load import LoadWriter
from .hosting import Hosting
from .kv.documents import Document
from .kv_tiers import KVTiers
from .logs import print_facts
from .serve_options import HttpOptions, ServeOptions
from .servers import Registration, wait_idle
from .state import file_records, open_accounting, open_kept_stores, open_resume_store
from .upstream_options import UpstreamOptions

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from starlette.applications import Starlette

    from ..cluster.on_demand import Rules
    from ..control.audit.log import AuditLog
    from ..control.observe.plugin_observers import Feed
    from ..control.tenants.access import Access
    from ..node.sampling import SamplingChoice
    from ..sandbox.parent import SandboxProcess
    from ..server.app import Resources
    from ..server.client import EngineClient
    from ..state.file import StateFile
    from ..text.text_model import TextModel
    from .model_folder import ModelFolder


_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says of the front end."""

    options: ServeOptions
    http: HttpOptions
    text: TextOptions
    config: ServerConfig
    tls: ssl.SSLContext | None
    order: Order
    saves_kv: bool
    access: Access
    audit: AuditOptions
    tracing: Tracing | None
    upstreams: UpstreamOptions
    tiers: KVTiers
    pins: list[Document]
    model: ResolvedModel
    started_s: float
    folder: ModelFolder | None


class Progress:
    """What the start waits for. prepared: what adapters there are is loaded; first_ready: an engine serves;
    listening: the address that is listened on. Make it inside the loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.prepared: asyncio.Future[None] = loop.create_future()
        self.first_ready: asyncio.Future[Ready] = loop.create_future()
        self.listening: asyncio.Future[str] = loop.create_future()

    def note_prepared(self, error: TokenmillError | None) -> None:
        if self.prepared.done():
            return
        if error is None:
            self.prepared.set_result(None)
        else:
            self.prepared.set_exception(error)


async def run_front_end(given: Given, engines: Engines, launch: Launch, machine: MachineFacts) -> None:
    """machine: as it was before anything was loaded. Ends with an error, or when the server has stopped."""
    from ..node.memory import map_large_blocks

    map_large_blocks()
    text, sampling = _load_text(given)
    progress = Progress()
    client = _new_client(given, engines, progress)
    sandbox = _new_sandbox(given, text)
    async with contextlib.AsyncExitStack() as held:
        resources = _open_resources(given, client, text, sandbox, held)
        app = _build(given, text, client, sandbox, resources, held)
        registration = held.enter_context(Registration())
        expert_load = LoadWriter(given.options.expert_load, given.config.model_names[0], client)
        hosting = _hosting(given, launch, machine, app, resources, progress.first_ready if engines.are_here else None)
        if given.folder is not None:
            hosting.own_front = (app, text)
            home = given.config.model_names[0] if engines.are_none else ""
            _load_on_demand(given.folder, given.upstreams.on_demand, hosting, app, home)
        gc.collect()
        gc.freeze()  # what is loaded stays: to walk it again holds all streams up for milliseconds
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, engines.keep_flight)
        front_end = FrontEnd(
            given, engines, text, sampling, client, sandbox, app, hosting, expert_load, progress, registration
        )
        await until_first_ends(
            front_end.serve(),
            engines.run(client, front_end.complete, progress.prepared),
            front_end.announce(),
            expert_load.run(),
            *given.tiers.works(),
        )


def _load_text(given: Given) -> tuple[TextModel, SamplingChoice]:
    from ..formats.checkpoint import open_text
    from ..node.text import load_text_model

    checkpoint = open_text(given.model.path)
    try:
        return load_text_model(checkpoint, given.text)
    finally:
        checkpoint.close()


def _new_client(given: Given, engines: Engines, progress: Progress) -> EngineClient:
    from ..server.adapters import ServedAdapter
    from ..server.client import EngineClient

    options = given.options
    wanted = [ServedAdapter(name, os.path.abspath(path)) for name, path in options.lora_modules]
    why_down = "Loading model" if engines.are_here else "No worker has joined yet"
    client = EngineClient(wanted, progress.note_prepared, given.order.patience, why_down, options.liveness_s)
    client.gateway.router.choose_by(options.routing_policy)
    client.gateway.start_limit.limit_s = options.start_limit_s
    client.move_by(options.disaggregation, options.migration, options.replication)
    return client


def _new_sandbox(given: Given, text: TextModel) -> SandboxProcess:
    from ..sandbox.parent import SandboxProcess, materials

    trusts, allows = given.config.allow_chat_template, given.text.allow_special_in_content
    return SandboxProcess(str(given.model.path), materials(text, trust_templates=trusts, allow_special=allows))


def _open_resources(
    given: Given, client: EngineClient, text: TextModel, sandbox: SandboxProcess, held: contextlib.AsyncExitStack
) -> Resources:
    """What the application uses but the idle job. `held` closes it, what was opened last first, but the audit log after
    all else: it is opened when nothing else can keep the server from its start, and hears of the end."""
    from ..control.signing import load_signer
    from ..net.system import MonotonicClock, new_id, new_seed, seeds_from
    from ..server.app import Resources

    options, config, tracing = given.options, given.config, given.tracing
    clock = MonotonicClock()
    taken = (*config.model_names, *(name for name, _ in options.lora_modules))
    upstreams = given.upstreams.upstreams(taken, clock)
    log_held = held.enter_context(contextlib.ExitStack())
    if (accounting := open_accounting(config.usage_dir, config.usage_kept_days)) is not None:
        held.callback(accounting.close)
    files: dict[Path, StateFile] = {}
    store, answers = open_kept_stores(config.responses_store, config.idempotency_store, files)
    for each in (answers, store):
        if each is not None:
            held.callback(each.close)
    if tracing is not None:
        held.push_async_callback(asyncio.to_thread, tracing.close)
    held.push_async_callback(sandbox.close)
    if (resume := open_resume_store(config)) is not None:
        held.callback(resume.close)
    signer = load_signer(config.sign_responses, "--sign-responses") if config.sign_responses else None
    audit = _open_audit(given, client, text, log_held)
    return Resources(
        clock=clock,
        new_seed=new_seed if options.seed is None else seeds_from(options.seed),
        new_id=new_id,
        store=store,
        access=given.access,
        accounting=accounting,
        audit=audit,
        signer=signer,
        answers=answers,
        kept=file_records(config.files_dir, files),
        tracing=tracing,
        upstreams=upstreams,
        max_upstream_calls=given.upstreams.upstream_max_open,
        upstream_prefixes=given.upstreams.prefixes(),
        resume=resume,
        ask_kv=None if given.tiers.admin is None else given.tiers.admin.ask,
        feeds=_start_observers(options.observers, held),
    )


def _start_observers(names: Sequence[str], held: contextlib.AsyncExitStack) -> Sequence[Feed]:
    """Those of plug-ins, told until `held` ends."""
    if not names:
        return ()
    from ..control.observe.plugin_observers import make_feed

    feeds = [make_feed(name) for name in dict.fromkeys(names)]
    for feed in feeds:
        feed.start()
        held.push_async_callback(asyncio.to_thread, feed.close)
    return feeds


def _open_audit(given: Given, client: EngineClient, text: TextModel, held: contextlib.ExitStack) -> AuditLog | None:
    """The audit log, which hears of the start, of the end, and of what the client does."""
    from ..control.audit.log import STOPPED, started

    config = given.config
    audit = given.audit.open(config.mask)
    if audit is None:
        return None
    held.callback(audit.close)
    audit.note(started(__version__, models=list(config.model_names), keys=len(config.api_keys)))
    held.callback(audit.note, STOPPED)
    if (watch := given.audit.watch(audit, client.adapters.name_of, text, config.model_names[0])) is not None:
        client.observers.added.append(watch)
    return audit


def _build(
    given: Given,
    text: TextModel,
    client: EngineClient,
    sandbox: SandboxProcess,
    resources: Resources,
    held: contextlib.AsyncExitStack,
) -> Starlette:
    """The application; `held` ends what it does by itself: first what it does while nobody calls."""
    from ..server.app import build_app
    from .idle_job import IdleCommand

    streams_held = contextlib.AsyncExitStack()
    held.push_async_exit(streams_held)
    if given.options.idle_command:
        idle_job = IdleCommand(given.options.idle_command)
        held.push_async_callback(idle_job.close)
        resources = replace(resources, idle_job=idle_job)
    app = build_app(given.config, text, client, sandbox, resources)
    if app.state.resume is not None:
        streams_held.push_async_callback(app.state.resume.close)
    if app.state.idle_time is not None:
        held.callback(app.state.idle_time.close)
    return app


def _hosting(
    given: Given,
    launch: Launch,
    machine: MachineFacts,
    app: Starlette,
    resources: Resources,
    own: asyncio.Future[Ready] | None,
) -> Hosting:
    """What loads further models, whose applications share keys and accounts with `app`."""
    from ..server.app import Resources, build_app
    from ..server.client import EngineClient

    options = given.options

    def new_client(on_prepared: Callable[[TokenmillError | None], None], why_down: str) -> EngineClient:
        client = EngineClient((), on_prepared, given.order.patience, why_down, options.liveness_s)
        client.gateway.start_limit.limit_s = options.start_limit_s
        return client

    shared = Resources(
        clock=resources.clock,
        new_seed=resources.new_seed,
        new_id=resources.new_id,
        store=resources.store,
        access=resources.access,
        accounting=resources.accounting,
        feeds=resources.feeds,
        background=resources.background,
        beside=True,
    )
    hosting = Hosting(
        launch,
        given.text,
        given.config,
        machine=machine,
        new_client=new_client,
        engine_timeout_s=options.engine_timeout_s,
        build=partial(build_app, resources=shared),
        own=own,
        models=app.state.models,
    )
    app.state.models.expect(hosting, given.upstreams.beside)
    return hosting


def _load_on_demand(folder: ModelFolder, rules: Rules, hosting: Hosting, app: Starlette, home: str) -> None:
    """Have calls load the models of a folder. home: the server's own, where it is one of them; else ""."""
    from ..control.models.on_demand import OnDemand
    from ..net.system import MonotonicClock

    models = app.state.models
    on_demand = OnDemand(rules, models, folder.list_models, hosting.load_listed, hosting.read, MonotonicClock(), home)
    on_demand.take(folder.list_models())
    models.on_demand = on_demand
    app.state.client.observers.metrics.registry.register(on_demand.metrics)


@dataclass(slots=True)
class FrontEnd:
    """The parts of a front end that is about to serve, and what is done with them until it stops."""

    given: Given
    engines: Engines
    text: TextModel
    sampling: SamplingChoice
    client: EngineClient
    sandbox: SandboxProcess
    app: Starlette
    hosting: Hosting
    expert_load: LoadWriter
    progress: Progress
    registration: Registration
    stops_at_s: float = 0.0

    def complete(self, ready: Ready) -> Ready:
        """An engine's facts, with what only the text knows."""
        if not self.progress.first_ready.done():
            self.progress.first_ready.set_result(ready)
        return replace(ready, eos_token_ids=self.text.eos_token_ids, model=self.given.config.model_names[0])

    async def serve(self) -> None:
        """Until the server has stopped, and what engines save is saved."""
        from ..node.memory import trim_heap
        from ..server.run import serve

        options, http = self.given.options, self.given.http
        if self.app.state.resume is not None:
            await self.app.state.resume.restart(self.app)
        await serve(
            self.app,
            http.host,
            http.port,
            drain_s=options.drain_s,
            on_started=self._note_listening,
            on_draining=self._note_draining,
            on_shrunk=trim_heap,
            uds=http.uds or "",
            tls=self.given.tls,
        )
        await self.expert_load.finish()
        if self.given.saves_kv:
            await self.engines.drain(max(0.0, self.stops_at_s - time.monotonic()))

    async def announce(self) -> None:
        """Print the plan and the address once they are known, and do what nobody waits for after that."""
        from ..node.memory import private_bytes

        given, app, progress = self.given, self.app, self.progress
        vocab_size, has_tls = self.text.tokenizer.vocab_size, given.tls is not None
        beside = (*memory_beside(given.config, private_bytes(), vocab_size, tls=has_tls), *given.tiers.memory)
        ready = None
        if not self.engines.are_none:
            ready = await progress.first_ready
            self.expert_load.check(ready)
            if not self.engines.are_here:  # its memory is another machine's
                ready = replace(ready, memory=())
            _print_plan(ready, given.model, self.sampling, beside, self.engines.summary)
            await progress.prepared
        if app.state.models.on_demand is not None:
            _print_listed(given.upstreams, list(app.state.models.on_demand.schedule.models))
        for pin in given.pins:
            await app.state.pin_kv(pin.body)
        await self.hosting.load_all(given.upstreams.add_model)
        given.upstreams.put_canaries(app.state.canaries)
        url = await progress.listening
        if app.state.idle_time is not None:
            app.state.idle_time.open()
        console = f", console at {url}/console" if url.startswith("http") else ""
        _tell(f"ready at {url} after {time.monotonic() - given.started_s:.2f} s{console}")
        notify("READY=1")
        await self._warm_up(ready)
        if given.options.exit_idle_s:
            await self._exit_when_idle(given.options.exit_idle_s)
        await asyncio.get_running_loop().create_future()  # Never: the others decide when to end.

    async def _exit_when_idle(self, idle_s: float) -> None:
        def use() -> tuple[int, int]:
            num_between = len(self.app.state.background.between(self.client))
            num_open = self.client.num_open + num_between + self.app.state.models.num_open
            return num_open, self.client.stats.num_steps

        await wait_idle(idle_s, use, self.registration.note_use)
        _tell(f"no call for {idle_s:g} s")
        os.kill(os.getpid(), signal.SIGTERM)

    async def _warm_up(self, ready: Ready | None) -> None:
        self.sandbox.warm_up()
        if ready is not None and ready.pooling is None:
            await until_idle(lambda: self.client.num_open > 0, lambda: self.client.stats.num_steps)
            self.sandbox.warm_up_grammars()

    def _note_listening(self, host: str, port: int) -> None:
        given = self.given
        address = given.http.shown_address(host, port, given.config.root_path)
        self.progress.listening.set_result(address)
        self.registration.write(
            os.path.abspath(host) if given.http.uds else address,
            given.config.model_names if given.folder is None else (),
            os.path.abspath(given.model.path) if given.folder is None else "",
            given.options.exit_idle_s,
        )

    def _note_draining(self, num_open: int) -> None:
        notify("STOPPING=1")
        drain_s = self.given.options.drain_s
        self.stops_at_s = time.monotonic() + drain_s
        waits = ""
        if num_open:
            requests = f"{num_open} open request{' has' if num_open == 1 else 's have'}"
            waits = f": {requests} {drain_s:g} s to finish; again to stop at once"
        _tell(f"stopping{waits}")


def _tell(line: str) -> None:
    """A server goes on, and stops when it is told to, where nobody reads its output any more."""
    with contextlib.suppress(BrokenPipeError):
        print(f"tokenmill: {line}", flush=True)


def memory_beside(
    config: ServerConfig, base_bytes: int, vocab_size: int, *, tls: bool = False
) -> tuple[tuple[str, int], ...]:
    """At most, of processes that the engine does not know. base_bytes: what such a process holds that does nothing."""
    from ..sandbox.parent import sandbox_bytes
    from ..server.limits import front_end_bytes

    return (
        ("front end", front_end_bytes(config, base_bytes, tls=tls)),
        ("sandbox", sandbox_bytes(base_bytes, vocab_size)),
    )


def _print_listed(given: UpstreamOptions, names: list[str]) -> None:
    rules = given.on_demand
    kept = "until their memory is needed" if rules.idle_s == math.inf else f"{rules.idle_s:g} s after their last call"
    facts = [
        ("models", f"{len(names)}: {format_names(names, _MAX_SHOWN)}"),
        ("loaded", f"at most {rules.max_loaded or 'what memory holds'}, when a call names them, {kept}"),
    ]
    print_facts(f"tokenmill {__version__} loads models of {given.models_dir} on demand", facts)


def _print_plan(
    ready: Ready, model: ResolvedModel, sampling: SamplingChoice, beside: tuple[tuple[str, int], ...], workers: str
) -> None:
    """`beside`: memory of processes that the engine does not know; `workers`: how many there are; "": one."""
    from ..node.model_warnings import NOTE

    memory = ("memory", f"at most {format_parts((*ready.memory, *beside))}")
    facts = [("workers", workers)] if workers else []
    facts += [memory if name == "memory" else (name, value) for name, value in ready.facts]
    if ready.pooling is None:
        facts += [
            ("sampling", sampling.describe()),
            ("answers", sampling.describe_bound()),
            *((NOTE, note) for note in sampling.notes),
        ]
    print_facts(f"tokenmill {__version__} serves {ready.model} from {model.path}", facts)
