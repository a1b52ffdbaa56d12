"""`serve`: the front end in this process, the engine in another, one link between them.

The engine process is started first and loads its weights while this one imports the server and builds the tokenizer.
When the server has stopped (see server.run for signals and draining) the engine process goes with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..core.errors import ConfigError, TokenmillError
from ..core.events import Ready
from ..core.units import format_parts
from ..formats.hub import ResolvedModel, default_cache_dir
from ..node.foreign import environment_notes
from ..server.config import ServerConfig
from .http_options import allowed_hosts, api_keys, model_names, set_access_log, shown_address, tls
from .launch import Launch
from .models import resolve_model
from .options import engine_options
from .supervisor import Supervisor

if TYPE_CHECKING:
    from ..node.sampling import SamplingChoice

QUEUED_TOKEN_BYTES = 80
"""A waiting prompt's token as an integer in a tuple, once in each process."""


def serve(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    # Until the server listens for it, a SIGTERM ends this process as Ctrl-C would: with its contexts left in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for note in environment_notes(os.environ, sys.argv):
        print(f"tokenmill: {note}", file=sys.stderr)
    set_access_log(args)
    args.tls = tls(args)
    model = resolve_model(args.model)
    config = _server_config(args, model)
    queue_bytes = config.max_buffered_bytes + config.max_open_tokens * QUEUED_TOKEN_BYTES
    launch = Launch(
        str(model.path), config.model_names[0], str(default_cache_dir()), engine_options(args), queue_bytes,
        log_level=args.log_level,
    )  # fmt: skip
    with Supervisor(launch, args.engine_timeout_s) as supervisor:
        from ..net.loop import run_event_loop

        run_event_loop(_serve(args, model, config, supervisor, started_s))
    return 0


def _server_config(args: argparse.Namespace, model: ResolvedModel) -> ServerConfig:
    own_names = model_names(args, model.served_name)
    names = [*own_names, *(adapter for adapter, _ in args.lora_modules)]
    if len(set(names)) != len(names):
        raise ConfigError("--lora-modules needs names of their own, each different.", param="lora_modules")
    if args.lora_dir is not None and not os.path.isdir(args.lora_dir):
        raise ConfigError(f"--lora-dir {args.lora_dir} is not a folder.", param="lora_dir")
    config = ServerConfig(
        model_names=own_names,
        api_keys=api_keys(args),
        cors_origins=tuple(args.cors_origins),
        allowed_hosts=allowed_hosts(args),
        root_path=args.root_path,
        log_requests=args.enable_log_requests,
        max_log_len=args.max_log_len,
        max_queue_s=args.max_queue_s,
        max_priority=args.max_priority,
        trusted_proxies=tuple(args.trusted_proxies),
        lora_dir="" if args.lora_dir is None else os.path.abspath(args.lora_dir),
        allow_chat_template=args.trust_request_chat_template,
    )
    return config if args.max_body_bytes is None else replace(config, max_body_bytes=args.max_body_bytes)


async def _serve(
    args: argparse.Namespace, model: ResolvedModel, config: ServerConfig, supervisor: Supervisor, started_s: float
) -> None:
    from ..formats.checkpoint import open_checkpoint
    from ..helper.parent import HelperProcess, helper_bytes, materials, read_template
    from ..net.clock import MonotonicClock
    from ..net.entropy import new_id, new_seed, seeds_from
    from ..node.heap import map_large_blocks, private_bytes, trim_heap
    from ..node.sampling import choose_sampling
    from ..server.adapters import ServedAdapter
    from ..server.app import build_app
    from ..server.budget import front_end_bytes
    from ..server.client import EngineClient
    from ..server.run import serve as serve_http
    from ..text.load import load_text

    map_large_blocks()
    checkpoint = open_checkpoint(model.path)
    sampling = choose_sampling(
        checkpoint, generation_config=args.generation_config, override=args.override_generation_config
    )
    text = replace(load_text(checkpoint, read_template(args.chat_template)), sampling_defaults=sampling.defaults)
    checkpoint.close()
    prepared: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note_prepared(error: TokenmillError | None) -> None:
        if prepared.done():
            return
        if error is None:
            prepared.set_result(None)
        else:
            prepared.set_exception(error)

    wanted = [ServedAdapter(name, os.path.abspath(path)) for name, path in args.lora_modules]
    client = EngineClient(wanted, note_prepared)
    seeds = new_seed if args.seed is None else seeds_from(args.seed)
    allowed = {"trust_templates": config.allow_chat_template, "allow_special": args.allow_special_in_content}
    helper = HelperProcess(str(model.path), materials(text, **allowed))
    app = build_app(config, text, client, helper, clock=MonotonicClock(), new_seed=seeds, new_id=new_id)
    gc.collect()
    gc.freeze()  # what is loaded stays: to walk it again holds all streams up for milliseconds
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def complete(ready: Ready) -> Ready:
        if not first_ready.done():
            first_ready.set_result(ready)
        return replace(ready, eos_token_ids=text.eos_token_ids)

    def note_listening(host: str, port: int) -> None:
        listening.set_result(shown_address(args, host, port))

    def note_draining(num_open: int) -> None:
        if not num_open:
            return
        requests = f"{num_open} request{'' if num_open == 1 else 's'}"
        print(f"tokenmill: draining {requests} for at most {args.drain_s:g} s; again to stop at once", flush=True)

    async def announce() -> None:
        base_bytes = private_bytes()
        beside = (
            ("front end", front_end_bytes(config, base_bytes, tls=args.tls is not None)),
            ("helper", helper_bytes(base_bytes)),
        )
        _print_plan(await first_ready, model, sampling, beside)
        await prepared
        url = await listening
        print(f"tokenmill: ready at {url} after {time.monotonic() - started_s:.2f} s", flush=True)
        helper.warm_up()
        await asyncio.get_running_loop().create_future()  # Never: the others decide when to end.

    try:
        await _until_first_ends(
            serve_http(
                app,
                args.host,
                args.port,
                drain_s=args.drain_s,
                on_started=note_listening,
                on_draining=note_draining,
                on_shrunk=trim_heap,
                uds=args.uds or "",
                tls=args.tls,
            ),
            supervisor.run(client, complete),
            announce(),
        )
    finally:
        await helper.close()


async def _until_first_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Runs all until the first ends, cancels the rest, and raises what the first raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _print_plan(
    ready: Ready, model: ResolvedModel, sampling: SamplingChoice, beside: tuple[tuple[str, int], ...]
) -> None:
    """`beside`: memory of processes that the engine does not know."""
    print(f"tokenmill {__version__} serves {ready.model} from {model.path}")
    memory = ("memory", f"at most {format_parts((*ready.memory, *beside))}")
    facts = [memory if name == "memory" else (name, value) for name, value in ready.facts]
    if ready.pooling is None:
        facts += [("sampling", sampling.describe()), *(("note", note) for note in sampling.notes)]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"  {name:<{width}}  {value}")
    sys.stdout.flush()
