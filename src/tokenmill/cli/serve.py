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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..control.audit.options import AuditOptions
from ..control.observe.traces import open_tracing
from ..core.errors import ConfigError
from ..formats.hub import ResolvedModel, default_cache_dir
from ..kv.store.options import TierOptions
from ..node.foreign import environment_notes
from ..node.options import SCHEDULING_POLICIES, EngineOptions, TextOptions
from ..node.resolve import asked_answering
from ..sched.policies import order_named
from ..server.config import ServerConfig
from .engine_process import Launch
from .engines import Engines
from .front_end import Given, run_front_end
from .kv.documents import read_pins
from .kv_events_options import KVEventsOptions
from .kv_tiers import KVTiers, kv_tiers
from .launchers.ray_options import RayOptions, near
from .logs import set_up_logging
from .models import resolve_model
from .options import engine_options, flags_of, given_options
from .serve_options import HttpOptions, ServeOptions, server_config, set_access_log
from .state import open_access, require_keys
from .upstream_options import UpstreamOptions
from .worker_options import LinkOptions, ListenOptions

if TYPE_CHECKING:
    from ..core.policy import Order
    from ..net.kv_endpoints import KVEventsConfig
    from ..net.tcp import Credentials
    from .engines import Launcher
    from .model_folder import ModelFolder
    from .workers import Workers

QUEUED_TOKEN_BYTES = 80
"""A waiting prompt's token as an integer in a tuple, once in each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """All that the command line of `serve` says, read once: what each room is told, and nothing of it twice.

    model   as it was named; its own name is in `server` where flags give none (see `named`)
    engine  of each engine of this front end, and of none where the flags want none here
    folder  whose models calls load; None: there is none
    is_alone  no model was named: the first of the folder is the server's own, loaded as the others are
    """

    model: str
    serve: ServeOptions
    http: HttpOptions
    server: ServerConfig
    text: TextOptions
    audit: AuditOptions
    upstreams: UpstreamOptions
    listen: ListenOptions
    link: LinkOptions
    ray: RayOptions
    tiers: TierOptions
    kv_events: KVEventsConfig | None
    engine: EngineOptions
    folder: ModelFolder | None
    is_alone: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> ServeConfig:
        """Raises ConfigError. Takes API keys out of the environment."""
        http = given_options(HttpOptions, args).at_inherited_socket()
        upstreams = given_options(UpstreamOptions, args)
        return cls(
            model=args.model,
            folder=upstreams.folder(),
            is_alone=upstreams.models_dir is not None and not hasattr(args, "model_given"),
            serve=given_options(ServeOptions, args),
            http=http,
            server=server_config(args, http),
            text=given_options(TextOptions, args),
            audit=given_options(AuditOptions, args),
            upstreams=upstreams,
            listen=given_options(ListenOptions, args),
            link=given_options(LinkOptions, args),
            ray=given_options(RayOptions, args),
            tiers=given_options(TierOptions, args),
            kv_events=given_options(KVEventsOptions, args).config,
            engine=engine_options(args),
        )

    def named(self, own_name: str) -> ServerConfig:
        """What the server is told, once the model's own name is known. Raises ConfigError."""
        server = self.server if self.http.served_model_name else replace(self.server, model_names=(own_name,))
        names = [*server.model_names, *(adapter for adapter, _ in self.serve.lora_modules)]
        if len(set(names)) != len(names):
            raise ConfigError("--lora-modules needs names of their own, each different.", param="lora_modules")
        return server


def serve(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    given = ServeConfig.of(args)
    options = given.serve
    set_up_logging(options.log_level, options.log_format, given.server.mask)
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    # Until the server listens for it, a SIGTERM ends this process as Ctrl-C would: with its contexts left in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks for a copy of the flight recorder, once there is one
    for note in environment_notes(os.environ, sys.argv):
        print(f"tokenmill: {note}", file=sys.stderr)
    set_access_log(given.http)
    with kv_tiers(given.tiers, given.engine, options.log_level, options.log_format) as (engine, tiers):
        _serve_with(replace(given, engine=engine), tiers, started_s)
    print("tokenmill: stopped", flush=True)
    return 0


def _serve_with(given: ServeConfig, tiers: KVTiers, started_s: float) -> None:
    """given.engine: with the KV store that engines join."""
    http, options, listen = given.http, given.serve, given.listen
    tls = http.tls()
    model = resolve_model(given.model) if not given.is_alone else _first_of(given)
    config = given.named(model.served_name)
    if options.kv_pin and tiers.admin is None:
        raise ConfigError("--kv-pin needs KV tiers: --kv-host, --kv-disk, --kv-remote or --kv-store.", param="kv_pin")
    access = open_access(config.tenants, config.api_keys)
    # Their own machine, a socket of this user's, or a certificate that every client must have.
    require_keys(http.host, access, is_guarded=bool(http.uds or http.insecure or http.ssl_cert_reqs == 2))
    front_end = Given(
        options, http, given.text, config, tls, _order(given.engine), _saves_kv(given.engine, tiers), access,
        given.audit, open_tracing(options.otlp_traces_endpoint, __version__, config.mask), given.upstreams, tiers,
        read_pins(options.kv_pin), model, started_s, given.folder,
    )  # fmt: skip
    launch = _launch(given, config, tiers, str(model.path))
    if listen.launcher == "ray":
        listen = near(given.ray, listen, os.environ)
    elif given.ray != RayOptions():
        raise ConfigError("Flags --ray-... need --launcher ray.", param="launcher")
    credentials = workers = None
    if listen.listen_workers is not None:
        credentials = given.link.credentials(listen.listen_workers[0], is_front_end=True)
        workers = _workers(listen.listen_workers, credentials, launch, config)
    engines = Engines(None if given.is_alone else _launcher(given, listen, credentials, launch), workers)
    about_engines = {
        "--kv-save": given.engine.kv_save is not None,
        "KV tiers (--kv-host and others)": tiers.admin is not None,
        "--journal": bool(options.journal),
        "--step-log": bool(options.step_log),
        "--kv-events-config": given.kv_events is not None,
    }
    for flag, is_given in about_engines.items():
        if is_given and given.is_alone:
            raise ConfigError(
                f"{flag} is about the engine of a model that is always loaded: name it before --models-dir."
            )
        if is_given and not engines.are_here:
            raise ConfigError(f"{flag} is about an engine, and there is none here: give it to workers.")
    with contextlib.closing(access), engines:
        from ..net.system import run_event_loop

        run_event_loop(run_front_end(front_end, engines, launch, tiers.machine))


def _first_of(given: ServeConfig) -> ResolvedModel:
    """The first of a folder that can be read, which answers calls that name none. Raises ConfigError."""
    listen, options, folder = given.listen, given.serve, given.folder
    assert folder is not None
    alone = {
        "--served-model-name": bool(given.http.served_model_name),
        "--lora-modules": bool(options.lora_modules) or bool(given.server.lora_dir),
        "--listen-workers": listen.listen_workers is not None,
        "--workers": listen.pools_are_asked or listen.launcher != "local",
        "--expert-load": bool(options.expert_load),
    }
    for flag, is_given in alone.items():
        if is_given:
            raise ConfigError(f"{flag} is about one model, and none is named: name it before --models-dir.")
    for name, listed in folder.list_models().items():
        if listed.info is not None:
            return ResolvedModel(Path(listed.path), name, "path")
    raise ConfigError(
        f"--models-dir {folder.folder} has no model: put .gguf files there, or folders in Hugging Face format.",
        param="models_dir",
    )


def _order(engine: EngineOptions) -> Order:
    """In which the front end gives requests to engines: as these serve them."""
    return order_named(SCHEDULING_POLICIES.get(engine.scheduling_policy, engine.scheduling_policy))


def _saves_kv(engine: EngineOptions, tiers: KVTiers) -> bool:
    return engine.kv_save is not None or tiers.admin is not None


def _launch(given: ServeConfig, config: ServerConfig, tiers: KVTiers, path: str) -> Launch:
    """Of each engine that is started here. They may share the machine with models to be loaded beside theirs."""
    options, num_others = given.serve, len(given.upstreams.add_model)
    has_peers = given.listen.listen_workers is not None or len(given.listen.pools) > 1
    machine = replace(tiers.machine, num_sharing=1 + num_others) if num_others else tiers.machine_if_shared
    return Launch(
        path, config.model_names[0], str(default_cache_dir()), given.engine,
        queued_bytes(config),
        log_level=options.log_level, log_format=options.log_format,
        kv_transfer=given.link.kv_transfer if has_peers else "", kv_events=given.kv_events,
        journal=os.path.abspath(options.journal) if options.journal else "",
        step_log=os.path.abspath(options.step_log) if options.step_log else "", machine=machine,
    )  # fmt: skip


def queued_bytes(config: ServerConfig) -> int:
    """What requests that wait may hold."""
    return config.max_buffered_bytes + config.max_open_tokens * QUEUED_TOKEN_BYTES


def _launcher(
    given: ServeConfig, listen: ListenOptions, credentials: Credentials | None, launch: Launch
) -> Launcher | None:
    from .local import LocalEngines

    timeout_s = given.serve.engine_timeout_s
    if not listen.engine:
        return None
    if listen.launcher == "ray" and credentials is not None:
        from .launchers.ray_workers import RayWorkers, worker_command

        engine = replace(given.engine, threads=given.engine.threads or 1)
        flags = [*flags_of(engine), *flags_of(replace(given.link, worker_secret_file=None))]
        command = worker_command(given.model, [*flags, f"--engine-timeout-s={timeout_s}"], credentials)
        return RayWorkers(given.ray, command, listen.pools, engine.threads or 1)
    return LocalEngines(launch, listen.pools, timeout_s, given.serve.flight_dir, listen.pools_are_asked)


def _workers(address: tuple[str, int], credentials: Credentials, launch: Launch, config: ServerConfig) -> Workers:
    from .workers import TOKEN_BYTES, Workers

    max_message_bytes = config.max_body_bytes + config.max_open_tokens * TOKEN_BYTES
    asked = asked_answering(launch.options)
    return Workers(address, credentials, launch.path, launch.cache_dir, max_message_bytes, asked)
