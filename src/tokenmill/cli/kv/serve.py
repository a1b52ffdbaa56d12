"""`tokenmill kv serve`: a KV store that servers of this machine share, and that outlives them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path

from ... import __version__
from ...core.config import BLOCK_SIZE
from ...core.errors import ConfigError
from ...kv.store.child import KVStoreProcess
from ...kv.store.options import TierOptions
from ...kv.store.process import check_store
from ...net.system import run_event_loop
from ..logs import FORMATS, print_facts, set_up_logging
from ..options import add_options, given_options
from ..parser import add_plugins
from ..state import default_state_dir

SOCKET = "kv-store"
LEVELS = ("debug", "info", "warning", "error")
_MOST_PATH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="where servers of this user join it, as --kv-store PATH (default: kv-store in the user's state folder)",
    )
    parser.add_argument(
        "--block-size", type=int, default=BLOCK_SIZE, metavar="N",
        help=f"tokens of a block, as the servers have it (default: {BLOCK_SIZE})",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="what is told (default: info)")
    parser.add_argument("--log-format", choices=FORMATS, default="text", help="how (default: text)")
    add_plugins(parser)
    add_options(parser.add_argument_group("tiers"), TierOptions)


def serve(args: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C. Raises ConfigError."""
    options = given_options(TierOptions, args)
    if not options.tiers:
        raise ConfigError("A KV store needs a tier: --kv-host, --kv-disk, --kv-remote or --kv-peers.", param="kv_host")
    check_store(options)
    set_up_logging(args.log_level, args.log_format)
    path = os.path.abspath(args.socket) if args.socket else str(_default_socket())
    if len(os.fsencode(path)) > _MOST_PATH:
        raise ConfigError(
            f"The path of a socket may have {_MOST_PATH} bytes, --socket {path} has more.", param="socket"
        )
    store = KVStoreProcess(options, args.log_level, args.log_format, args.block_size, path)
    try:
        with store:
            print_facts(
                f"tokenmill {__version__} keeps KV for the servers of this machine",
                (("tiers", options.describe()), ("join", f"tokenmill serve MODEL --kv-store {path}")),
            )
            run_event_loop(_run(store))
    except OSError as error:
        raise ConfigError(f"--socket {path} cannot be used: {error.strerror or error}.", param="socket") from error
    return 0


def _default_socket() -> Path:
    folder = default_state_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / SOCKET


async def _run(store: KVStoreProcess) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.create_task(store.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
