"""`serve`: the front end in this process, the engine in another, one link between them.

The engine process is started first and loads its weights while this one imports the server and builds the tokenizer.
When the server has stopped (see server.run for signals and draining) the engine process goes with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from .. import __version__
from ..core.errors import ConfigError, TokenmillError
from ..core.events import Ready
from ..core.masking import Mask
from ..core.policy import Order
from ..core.units import format_parts
from ..formats.hub import ResolvedModel, default_cache_dir
from ..node.machine import MachineFacts
from ..node.notes import NOTE
from ..node.options import SCHEDULING_POLICIES, TextOptions
from ..node.resolve import asked_answering
from ..sched.policies import order_named
from ..server.audit.options import AuditOptions
from ..server.config import ServerConfig
from ..server.observe.traces import Tracing, open_tracing
from .engines import Engines, until_first_ends
from .expert_load import LoadWriter
from .foreign_words import environment_notes
from .hosting import Hosting, shared
from .kv.documents import Document, read_pins
from .kv_events_options import KVEventsOptions
from .kv_tiers import KVTiers, kv_tiers
from .launch import Launch
from .launchers.ray_options import RayOptions, near
from .logs import set_up_logging
from .models import resolve_model
from .options import flags_of, given_options
from .plan import print_facts
from .quiet import until_quiet
from .serve_options import HttpOptions, ServeOptions, read_api_keys, server_config, set_access_log
from .state import open_access, open_books, open_kept_stores, open_resume_store, require_keys
from .upstream_options import UpstreamOptions
from .worker_options import LinkOptions, ListenOptions

if TYPE_CHECKING:
    import ssl

    from ..net.tcp import Credentials
    from ..node.sampling import SamplingChoice
    from ..server.tenants.access import Access
    from .engines import Launcher
    from .workers import Workers

QUEUED_TOKEN_BYTES = 80
"""A waiting prompt's token as an integer in a tuple, once in each process."""


@dataclass(frozen=True, slots=True)
class _Given:
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


def serve(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    options, http = given_options(ServeOptions, args), given_options(HttpOptions, args)
    api_keys = read_api_keys(http)
    set_up_logging(options.log_level, options.log_format, Mask(api_keys))
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    # Until the server listens for it, a SIGTERM ends this process as Ctrl-C would: with its contexts left in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks for a copy of the flight recorder, once there is one
    for note in environment_notes(os.environ, sys.argv):
        print(f"tokenmill: {note}", file=sys.stderr)
    set_access_log(http)
    with kv_tiers(args, options.log_level, options.log_format) as tiers:
        return _serve_with(args, options, http, api_keys, tiers, started_s)


def _serve_with(
    args: argparse.Namespace,
    options: ServeOptions,
    http: HttpOptions,
    api_keys: tuple[str, ...],
    tiers: KVTiers,
    started_s: float,
) -> int:
    tls = http.tls()
    model = resolve_model(args.model)
    config = server_config(args, options, http, model.served_name, api_keys)
    engine = tiers.engine
    if options.kv_pin and tiers.desk is None:
        raise ConfigError("--kv-pin needs KV tiers: --kv-host, --kv-disk, --kv-remote or --kv-store.", param="kv_pin")
    order = order_named(SCHEDULING_POLICIES.get(engine.scheduling_policy, engine.scheduling_policy))
    saves_kv = engine.kv_save is not None or tiers.desk is not None
    access = open_access(config.tenants, config.api_keys)
    # Their own machine, a socket of this user's, or a certificate that every client must have.
    require_keys(http.host, access, is_guarded=bool(http.uds or http.insecure or http.ssl_cert_reqs == 2))
    audit = given_options(AuditOptions, args)
    tracing = open_tracing(options.otlp_traces_endpoint, __version__, config.mask)
    given = _Given(
        options, http, given_options(TextOptions, args), config, tls, order, saves_kv, access, audit, tracing,
        given_options(UpstreamOptions, args), tiers, read_pins(options.kv_pin),
    )  # fmt: skip
    queue_bytes = config.max_buffered_bytes + config.max_open_tokens * QUEUED_TOKEN_BYTES
    listen, link = given_options(ListenOptions, args), given_options(LinkOptions, args)
    has_peers = listen.listen_workers is not None or len(listen.pools) > 1
    launch = Launch(
        str(model.path), config.model_names[0], str(default_cache_dir()), engine, queue_bytes,
        log_level=options.log_level, log_format=options.log_format,
        kv_transfer=link.kv_transfer if has_peers else "", kv_events=given_options(KVEventsOptions, args).config,
        journal=os.path.abspath(options.journal) if options.journal else "",
        step_log=os.path.abspath(options.step_log) if options.step_log else "", machine=tiers.machine_if_shared,
    )  # fmt: skip
    launch = shared(launch, tiers.machine, len(given.upstreams.add_model))
    if listen.launcher == "ray":
        listen = near(given_options(RayOptions, args), listen, os.environ)
    elif given_options(RayOptions, args) != RayOptions():
        raise ConfigError("Flags --ray-... need --launcher ray.", param="launcher")
    credentials = workers = None
    if listen.listen_workers is not None:
        credentials = link.credentials(listen.listen_workers[0], is_front_end=True)
        workers = _workers(listen.listen_workers, credentials, launch, config)
    engines = Engines(_launcher(args, listen, credentials, launch), workers)
    about_engines = {
        "--kv-save": engine.kv_save is not None,
        "KV tiers (--kv-host and others)": tiers.desk is not None,
        "--journal": bool(options.journal),
        "--step-log": bool(options.step_log),
        "--kv-events-config": launch.kv_events is not None,
    }
    for flag, is_given in about_engines.items():
        if is_given and not engines.are_here:
            raise ConfigError(f"{flag} is about an engine, and there is none here: give it to workers.")
    with contextlib.closing(access), engines:
        from ..net.loop import run_event_loop

        run_event_loop(_serve(given, model, engines, launch, tiers.machine, started_s))
    return 0


def _launcher(
    args: argparse.Namespace, listen: ListenOptions, credentials: Credentials | None, launch: Launch
) -> Launcher | None:
    from .local import LocalEngines

    if not listen.engine:
        return None
    options = given_options(ServeOptions, args)
    if listen.launcher == "ray" and credentials is not None:
        from .launchers.ray_workers import RayWorkers, worker_command

        engine = replace(launch.options, threads=launch.options.threads or 1)
        flags = [*flags_of(engine), *flags_of(replace(given_options(LinkOptions, args), worker_secret_file=None))]
        command = worker_command(args.model, [*flags, f"--engine-timeout-s={options.engine_timeout_s}"], credentials)
        return RayWorkers(given_options(RayOptions, args), command, listen.pools, engine.threads or 1)
    return LocalEngines(launch, listen.pools, options.engine_timeout_s, options.flight_dir, listen.pools_are_asked)


def _workers(address: tuple[str, int], credentials: Credentials, launch: Launch, config: ServerConfig) -> Workers:
    from .workers import TOKEN_BYTES, Workers

    max_message_bytes = config.max_body_bytes + config.max_open_tokens * TOKEN_BYTES
    asked = asked_answering(launch.options)
    return Workers(address, credentials, launch.path, launch.cache_dir, max_message_bytes, asked)


async def _serve(
    given: _Given,
    model: ResolvedModel,
    engines: Engines,
    launch: Launch,
    machine: MachineFacts,
    started_s: float,
) -> None:
    from ..formats.checkpoint import open_text
    from ..helper.parent import HelperProcess, helper_bytes, materials
    from ..net.clock import MonotonicClock
    from ..net.entropy import new_id, new_seed, seeds_from
    from ..node.heap import map_large_blocks, private_bytes, trim_heap
    from ..node.text import load_text_model
    from ..server.adapters import ServedAdapter
    from ..server.app import build_app
    from ..server.audit.log import STOPPED, started
    from ..server.budget import front_end_bytes
    from ..server.client import EngineClient
    from ..server.run import serve as serve_http
    from ..server.signing import load_signer
    from .idle_job import IdleCommand

    map_large_blocks()
    options, http, config = given.options, given.http, given.config
    checkpoint = open_text(model.path)
    text, sampling = load_text_model(checkpoint, given.text)
    checkpoint.close()
    prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note_prepared(error: TokenmillError | None) -> None:
        if prepared.done():
            return
        if error is None:
            prepared.set_result(None)
        else:
            prepared.set_exception(error)

    wanted = [ServedAdapter(name, os.path.abspath(path)) for name, path in options.lora_modules]
    why_down = "Loading model" if engines.are_here else "No worker has joined yet"
    client = EngineClient(wanted, note_prepared, given.order.patience, why_down, options.liveness_s)
    client.gateway.router.choose_by(options.routing_policy)
    client.gateway.start_limit.limit_s = options.start_limit_s
    client.move_by(options.disaggregation, options.migration, options.replication)
    seeds = new_seed if options.seed is None else seeds_from(options.seed)
    allowed = {"trust_templates": config.allow_chat_template, "allow_special": given.text.allow_special_in_content}
    helper = HelperProcess(str(model.path), materials(text, **allowed))
    taken = (*config.model_names, *(name for name, _ in options.lora_modules))
    upstreams = given.upstreams.upstreams(taken, MonotonicClock())
    store, answers = open_kept_stores(config.responses_store, config.idempotency_store)
    books = open_books(config.usage_dir, config.usage_kept_days)
    resume = open_resume_store(config)
    signer = load_signer(config.sign_responses, "--sign-responses") if config.sign_responses else None
    audit = given.audit.open(config.mask)
    if audit is not None:
        audit.note(started(__version__, models=list(config.model_names), keys=len(config.api_keys)))
        if (watch := given.audit.watch(audit, client, text, config.model_names[0])) is not None:
            client.hearers.watchers.append(watch)
    idle_job = IdleCommand(options.idle_command) if options.idle_command else None
    build = partial(
        build_app,
        clock=MonotonicClock(),
        new_seed=seeds,
        new_id=new_id,
        store=store,
        access=given.access,
        books=books,
    )
    app = build(
        config,
        text,
        client,
        helper,
        answers=answers,
        audit=audit,
        signer=signer,
        tracing=given.tracing,
        idle_job=idle_job,
        upstreams=upstreams,
        upstream_prefixes=given.upstreams.prefixes(),
        max_upstream_calls=given.upstreams.upstream_max_open,
        resume=resume,
        ask_kv=None if given.tiers.desk is None else given.tiers.desk.ask,
    )

    expert_load = LoadWriter(options.expert_load, config.model_names[0], client)
    first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def new_client(on_prepared: Callable[[TokenmillError | None], None], why_down: str) -> EngineClient:
        beside = EngineClient((), on_prepared, given.order.patience, why_down, options.liveness_s)
        beside.gateway.start_limit.limit_s = options.start_limit_s
        return beside

    hosting = Hosting(
        launch,
        given.text,
        config,
        machine=machine,
        new_client=new_client,
        engine_timeout_s=options.engine_timeout_s,
        build=partial(build, beside=True),
        own=first_ready if engines.are_here else None,
        book=app.state.models,
    )
    app.state.models.expect(hosting, given.upstreams.beside)
    gc.collect()
    gc.freeze()  # what is loaded stays: to walk it again holds all streams up for milliseconds
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stops_at_s = 0.0

    def complete(ready: Ready) -> Ready:
        if not first_ready.done():
            first_ready.set_result(ready)
        return replace(ready, eos_token_ids=text.eos_token_ids, model=config.model_names[0])

    def note_listening(host: str, port: int) -> None:
        listening.set_result(http.shown_address(host, port, config.root_path))

    def note_draining(num_open: int) -> None:
        nonlocal stops_at_s
        stops_at_s = time.monotonic() + options.drain_s
        if not num_open:
            return
        requests = f"{num_open} request{'' if num_open == 1 else 's'}"
        print(f"tokenmill: draining {requests} for at most {options.drain_s:g} s; again to stop at once", flush=True)

    async def serve_and_save() -> None:
        if app.state.resume is not None:
            await app.state.resume.restart(app)
        await serve_http(
            app,
            http.host,
            http.port,
            drain_s=options.drain_s,
            on_started=note_listening,
            on_draining=note_draining,
            on_shrunk=trim_heap,
            uds=http.uds or "",
            tls=given.tls,
        )
        await expert_load.finish()
        if given.saves_kv:
            await engines.drain(max(0.0, stops_at_s - time.monotonic()))

    async def announce() -> None:
        base_bytes = private_bytes()
        beside = (
            ("front end", front_end_bytes(config, base_bytes, tls=given.tls is not None)),
            ("helper", helper_bytes(base_bytes, text.tokenizer.vocab_size)),
            *given.tiers.memory,
        )
        ready = await first_ready
        expert_load.check(ready)
        if not engines.are_here:  # its memory is another machine's
            ready = replace(ready, memory=())
        _print_plan(ready, model, sampling, beside, engines.summary)
        await prepared
        for pin in given.pins:
            await app.state.pin_kv(pin.body)
        await hosting.load_all(given.upstreams.add_model)
        given.upstreams.put_canaries(app.state.canaries)
        url = await listening
        if app.state.idle_time is not None:
            app.state.idle_time.open()
        console = f", console at {url}/console" if url.startswith("http") else ""
        print(f"tokenmill: ready at {url} after {time.monotonic() - started_s:.2f} s{console}", flush=True)
        helper.warm_up()
        if ready.pooling is None:
            await until_quiet(lambda: client.num_open > 0, lambda: client.stats.num_steps)
            helper.warm_up_grammars()
        await asyncio.get_running_loop().create_future()  # Never: the others decide when to end.

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, engines.keep_flight)
    try:
        running = [serve_and_save(), engines.run(client, complete, prepared), announce(), expert_load.run()]
        await until_first_ends(*running, *given.tiers.works())
    finally:
        if idle_job is not None:
            app.state.idle_time.close()
            await idle_job.close()
        if app.state.resume is not None and resume is not None:
            await app.state.resume.close()
            resume.close()
        await helper.close()
        if given.tracing is not None:
            await asyncio.to_thread(given.tracing.close)
        if store is not None:
            store.close()
        if answers is not None:
            answers.close()
        if books is not None:
            books.close()
        if audit is not None:
            audit.note(STOPPED)
            audit.close()


def _print_plan(
    ready: Ready, model: ResolvedModel, sampling: SamplingChoice, beside: tuple[tuple[str, int], ...], workers: str
) -> None:
    """`beside`: memory of processes that the engine does not know; `workers`: how many there are; "": one."""
    memory = ("memory", f"at most {format_parts((*ready.memory, *beside))}")
    facts = [("workers", workers)] if workers else []
    facts += [memory if name == "memory" else (name, value) for name, value in ready.facts]
    if ready.pooling is None:
        facts += [("sampling", sampling.describe()), *((NOTE, note) for note in sampling.notes)]
    print_facts(f"tokenmill {__version__} serves {ready.model} from {model.path}", facts)
