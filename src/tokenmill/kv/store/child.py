"""A KV store as a child of the server, worker or `LLM` whose options ask for tiers: started, and started again when its
process has ended.

The parent listens: the socket's path stays the same, and who joins while there is no process waits until there is.
What host memory held is lost with a process; the disk's is there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from ...core.config import BLOCK_SIZE
from ...core.errors import ConfigError, TokenmillError
from ...core.units import format_bytes
from ...net.child_process import open_lifeline, read_to_end
from ...net.unix import private_address
from ...node.machine import MachineFacts, left_of
from ...node.options import EngineOptions
from .options import TierOptions
from .process import FLUSH_S, StoreLaunch
from .server import listen

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 30.0
SETTLED_S = 60.0
_END_S = FLUSH_S + 2


@contextmanager
def own_store(
    tiers: TierOptions, engine: EngineOptions, log_level: str = "warning", log_format: str = "text"
) -> Iterator[tuple[EngineOptions, KVStoreProcess | None]]:
    """The options of engines that use it, and the store itself, which runs until this ends; None: there is none of its
    own. Raises ConfigError."""
    if not tiers.tiers:
        if tiers != TierOptions():
            raise ConfigError(
                "Flags of KV tiers need a tier: --kv-host, --kv-disk, --kv-remote or --kv-peers.", param="kv_host"
            )
        if engine.kv_write is not None and engine.kv_store is None:
            message = "--kv-write needs KV tiers: --kv-host, --kv-disk, --kv-remote, --kv-peers or --kv-store."
            raise ConfigError(message, param="kv_write")
        yield engine, None
        return
    if engine.kv_store is not None:
        raise ConfigError(
            "--kv-store uses a KV store that runs, whose tiers are its own: give them to tokenmill kv serve.",
            param="kv_store",
        )
    if engine.kv_save is not None:
        tiers, engine = tiers.with_folder(engine.kv_save), replace(engine, kv_save=None)
    if not engine.enable_prefix_caching:
        raise ConfigError("KV tiers have nothing to keep: prefix caching is off.", param="enable_prefix_caching")

    with KVStoreProcess(tiers, log_level, log_format, engine.block_size or BLOCK_SIZE) as store:
        yield replace(engine, kv_store=store.path), store


def machine_beside(machine: MachineFacts, tiers: TierOptions) -> MachineFacts:
    """What is left for engines. Raises ConfigError where the store would take all."""
    if not tiers.tiers:
        return machine
    left = left_of(machine, tiers.host_bytes)
    if not left.usable_memory:
        raise ConfigError(
            f"--kv-host {format_bytes(tiers.host_bytes)} is more than the"
            f" {format_bytes(machine.usable_memory * machine.num_sharing)} that are free.",
            param="kv_host",
        )
    return left


class KVStoreProcess:
    """A context manager: entering starts the process, which raises OSError where nobody can listen at `path`. path: of
    the socket on which workers join it; "": in a new folder"""

    def __init__(
        self,
        options: TierOptions,
        log_level: str = "warning",
        log_format: str = "text",
        block_size: int = BLOCK_SIZE,
        path: str = "",
    ) -> None:
        self.path = path
        self._launch = StoreLaunch(options, block_size, log_level=log_level, log_format=log_format)
        self._held = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._report_fd = -1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held:
            self.path = self.path or held.enter_context(private_address())
            self._listener = held.enter_context(listen(self.path))
            held.callback(_remove, self.path)
            read_fd, write_fd = open_lifeline()
            held.callback(os.close, read_fd)
            held.callback(os.close, write_fd)
            self._launch = replace(self._launch, listener_fd=self._listener.fileno(), lifeline_fd=read_fd)
            self._start()
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """0: there is no process now."""
        return 0 if self._process is None else self._process.pid

    def close(self) -> None:
        """Has the store write what is to stay, and end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._reap()
        self._held.close()

    async def run(self) -> None:
        """Never returns, ends when cancelled. Raises ConfigError where the first process cannot be as it was asked."""
        delay_s, was_well = FIRST_DELAY_S, False
        while True:
            if self._process is None:
                self._start()
            began_s = time.monotonic()
            report = await self._read_report()
            status = self._reap()
            error = json.loads(report)["error"] if report else f"It ended with status {status}."
            if report and not was_well:
                raise ConfigError(error)
            was_well = was_well or not report
            if time.monotonic() - began_s > SETTLED_S:
                delay_s = FIRST_DELAY_S
            log.error("The KV store has ended, and is started again in %g s: %s", delay_s, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _start(self) -> None:
        self._report_fd, report_fd = os.pipe()
        launch = replace(self._launch, report_fd=report_fd)
        try:
            # -P: a folder called tokenmill in the working directory is not the package. A session of its own keeps
            # the terminal's Ctrl-C away: engines still write to the store when they end.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.cli.kv_store"],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=(launch.listener_fd, launch.lifeline_fd, report_fd),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._report_fd)
            raise
        finally:
            os.close(report_fd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(launch.to_json())

    async def _read_report(self) -> bytes:
        """All of it: it ends with the process."""
        return await read_to_end(self._report_fd)

    def _reap(self) -> int:
        assert self._process is not None
        status = self._process.wait()
        os.close(self._report_fd)
        self._process = None
        return status


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def report(fd: int, error: TokenmillError) -> None:
    """In the child: why the store cannot be as it was asked."""
    if fd >= 0:
        os.write(fd, json.dumps({"error": error.message}).encode() + b"\n")
