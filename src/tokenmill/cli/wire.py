"""`serve`: the front end in this process, the engine in another, one link between them.

The engine process is started first and loads its weights while this one imports the server and builds the tokenizer.
When the server has stopped (see server.run for signals and draining) the engine process goes with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import __version__
from ..control.audit.options import AuditOptions
from ..control.observe.traces import open_tracing
from ..core.errors import ConfigError
from ..core.masking import Mask
from ..formats.hub import default_cache_dir
from ..node.options import SCHEDULING_POLICIES, TextOptions
from ..node.resolve import asked_answering
from ..sched.policies import order_named
from ..server.config import ServerConfig
from .engines import Engines
from .foreign_words import environment_notes
from .front_end import Given, run_front_end
from .hosting import shared
from .kv.documents import read_pins
from .kv_events_options import KVEventsOptions
from .kv_tiers import KVTiers, kv_tiers
from .launch import Launch
from .launchers.ray_options import RayOptions, near
from .logs import set_up_logging
from .models import resolve_model
from .options import flags_of, given_options
from .serve_options import HttpOptions, ServeOptions, read_api_keys, server_config, set_access_log
from .state import open_access, require_keys
from .upstream_options import UpstreamOptions
from .worker_options import LinkOptions, ListenOptions

if TYPE_CHECKING:
    from ..net.tcp import Credentials
    from .engines import Launcher
    from .workers import Workers

QUEUED_TOKEN_BYTES = 80
"""A waiting prompt's token as an integer in a tuple, once in each process."""


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
    if options.kv_pin and tiers.admin is None:
        raise ConfigError("--kv-pin needs KV tiers: --kv-host, --kv-disk, --kv-remote or --kv-store.", param="kv_pin")
    order = order_named(SCHEDULING_POLICIES.get(engine.scheduling_policy, engine.scheduling_policy))
    saves_kv = engine.kv_save is not None or tiers.admin is not None
    access = open_access(config.tenants, config.api_keys)
    # Their own machine, a socket of this user's, or a certificate that every client must have.
    require_keys(http.host, access, is_guarded=bool(http.uds or http.insecure or http.ssl_cert_reqs == 2))
    audit = given_options(AuditOptions, args)
    tracing = open_tracing(options.otlp_traces_endpoint, __version__, config.mask)
    given = Given(
        options, http, given_options(TextOptions, args), config, tls, order, saves_kv, access, audit, tracing,
        given_options(UpstreamOptions, args), tiers, read_pins(options.kv_pin), model, started_s,
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
        "KV tiers (--kv-host and others)": tiers.admin is not None,
        "--journal": bool(options.journal),
        "--step-log": bool(options.step_log),
        "--kv-events-config": launch.kv_events is not None,
    }
    for flag, is_given in about_engines.items():
        if is_given and not engines.are_here:
            raise ConfigError(f"{flag} is about an engine, and there is none here: give it to workers.")
    with contextlib.closing(access), engines:
        from ..net.system import run_event_loop

        run_event_loop(run_front_end(given, engines, launch, tiers.machine))
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
