"""The servers of this user on this machine: a small file for each, which it writes while it listens; `ps` and `stop`.

Files lie in `servers` of the state folder, so that servers that share keys and accounts know of each other. A file
counts while the process that wrote it lives. The time of a file's last change is that of the server's last use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import logging
import os
import platform
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..core.errors import ConfigError, Unavailable
from ..core.units import KiB, format_bytes, format_names
from ..node.process import process_start
from .partners import KEYS, is_among
from .server_url import ServerURL, read_url
from .state import default_state_dir

READY, STARTING, SILENT = "ready", "starting", "no answer"
_SHOWN = 4
_LOOK_S = 1.0
_PROBE_S = 2.0
_STOP_S = 60.0
_TELL_S = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """What a server tells of itself.

    started      when the process did, as the system tells it
    address      of HTTP, or the path of a Unix socket
    models       names that it answers to, its own first; none where it loads models of a folder on demand
    path         of the model's file or folder, absolute; "" without a model of its own
    exit_idle_s  it ends by itself when it has not been used so long; 0: never
    used_s       when it was last used, as time.time() tells it
    """

    pid: int
    started: str
    address: str
    models: tuple[str, ...]
    path: str
    exit_idle_s: float = 0.0
    used_s: float = field(default=0.0, compare=False)

    def lives(self) -> bool:
        """Whether its process does, and not another that has its id by now."""
        return process_start(self.pid) == self.started

    def has(self, model: str) -> bool:
        """Whether it answers to that name."""
        return is_among(model, self.models)

    @property
    def title(self) -> str:
        return self.models[0] if self.models else "models of a folder"

    def asked(self, api_key: str | None) -> Served:
        """With all models that it lists now, where it tells them."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key and not self.address.startswith("https") else {}
        try:
            with contextlib.closing(self._connect()) as connection:
                connection.request("GET", f"{self._base}/v1/models", headers=headers)
                names = [str(card["id"]) for card in json.load(connection.getresponse())["data"]]
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return self
        return replace(self, models=tuple(dict.fromkeys((*self.models, *names))))

    @property
    def _base(self) -> str:
        url = self.url()
        return "" if url is None else url.base

    def url(self) -> ServerURL | None:
        """None: it listens on a Unix socket."""
        return None if self.address.startswith("/") else read_url(self.address, "URL", "http://127.0.0.1:8000")

    def state(self) -> str:
        """What its /health says now."""
        try:
            with contextlib.closing(self._connect()) as connection:
                connection.request("GET", f"{self._base}/health")
                return READY if connection.getresponse().status == 200 else STARTING
        except (OSError, http.client.HTTPException):
            return SILENT

    def _connect(self) -> http.client.HTTPConnection:
        url = self.url()
        if url is None:
            connection = http.client.HTTPConnection("localhost", timeout=_PROBE_S)
            with contextlib.ExitStack() as held:
                sock = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.settimeout(_PROBE_S)
                sock.connect(self.address)
                held.pop_all()
            connection.sock = sock
            return connection
        if not url.is_secure:
            return url.connect(_PROBE_S)
        # Nothing is told to it, and its certificate may be for another name than this machine's own.
        return http.client.HTTPSConnection(
            url.host, url.port, timeout=_PROBE_S, context=ssl._create_unverified_context()
        )

    def ends_in(self, now_s: float) -> str:
        """When it ends by itself."""
        if not self.exit_idle_s:
            return "stopped"
        return f"in {told_time(max(0.0, self.used_s + self.exit_idle_s - now_s))}"


def told_time(seconds: float) -> str:
    """'45 s', '5 min', '2 h'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def servers_dir() -> Path:
    return default_state_dir() / "servers"


def file_of(pid: int) -> Path:
    """Of this machine: the state folder may be shared with others."""
    return servers_dir() / f"{platform.node() or 'here'}.{pid}.json"


def running() -> list[Served]:
    """Those that live, longest used first. Files of those that do not are removed, and no other machine's: its name may
    begin with this one's."""
    found = []
    for file in sorted(servers_dir().glob("*.json")):
        pid = file.name.removesuffix(".json").rpartition(".")[2]
        if not (pid.isascii() and pid.isdecimal()) or file != file_of(int(pid)):
            continue
        served = _read(file)
        if served is not None and served.pid == int(pid) and served.lives():
            found.append(served)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return sorted(found, key=lambda each: (each.used_s, each.pid))


def _read(file: Path) -> Served | None:
    """None: it is gone, or not what this version writes."""
    try:
        said = json.loads(file.read_text(encoding="utf8"))
        used_s = file.stat().st_mtime
        served = replace(Served(**said), models=tuple(said["models"]), used_s=used_s)
        return served if isinstance(served.started, str) else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def memory_bytes(pid: int) -> int | None:
    """Of the process and all that it started; pages that several have count once. None: the system does not tell."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text(encoding="utf8", errors="replace").rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(folder.name))
    total, pids = 0, [pid]
    for each in pids:
        pids += parents.get(each, ())
        with contextlib.suppress(OSError, StopIteration):
            text = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii")
            total += KiB * int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    return total or None


# ---- the server's side ----


class Registration:
    """The file of this process, from `write` to the end of the context. A folder that cannot be written is told to the
    log, and keeps no server from serving."""

    def __init__(self) -> None:
        self._file = file_of(os.getpid())

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink()

    def write(self, address: str, models: Sequence[str], path: str, exit_idle_s: float) -> None:
        pid = os.getpid()
        said = asdict(Served(pid, process_start(pid) or "", address, tuple(models), path, exit_idle_s))
        del said["used_s"]
        part = self._file.with_suffix(".part")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_text(json.dumps(said), encoding="utf8")
            part.chmod(0o600)
            part.rename(self._file)
        except OSError as error:
            _log.warning("tokenmill ps will not list this server: %s", error)

    def note_use(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._file)


async def wait_idle(
    idle_s: float,
    use: Callable[[], tuple[int, int]],
    note_use: Callable[[], None],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Until the server has not been used for `idle_s`. use: what is open, and a number that changes with each use."""
    last_s, before = now(), use()
    while (left_s := last_s + idle_s - now()) > 0:
        await sleep(min(left_s, _LOOK_S))
        seen = use()
        if seen[0] or seen != before:
            last_s, before = now(), seen
            note_use()


# ---- commands ----


def ps(args: argparse.Namespace) -> int:
    key = os.environ.get(KEYS[0])
    found = [(each.asked(key), each.state(), memory_bytes(each.pid)) for each in running()]
    if args.json:
        shown = [asdict(each) | {"state": state, "memory_bytes": memory} for each, state, memory in found]
        print(json.dumps(shown, indent=1))
        return 0
    rows = [("MODEL", "ADDRESS", "PID", "MEMORY", "STATE", "UNTIL")]
    rows += [
        (
            format_names(each.models, _SHOWN),
            each.address,
            str(each.pid),
            "-" if memory is None else format_bytes(memory),
            state,
            each.ends_in(time.time()),
        )
        for each, state, memory in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def stop(args: argparse.Namespace) -> int:
    """Each has the time to finish its calls that its --drain-s gives."""
    for served in running() if args.all else [named(args.server)]:
        with contextlib.suppress(ProcessLookupError):
            if served.lives():  # it may have ended while another was waited for
                os.kill(served.pid, signal.SIGTERM)
        began_s, has_told = time.monotonic(), False
        while served.lives():
            waited_s = time.monotonic() - began_s
            if waited_s > _STOP_S:
                raise Unavailable(f"Process {served.pid} still finishes its calls; to end it now: kill {served.pid}")
            if waited_s > _TELL_S and not has_told:
                has_told = True
                told = f"{served.title} at {served.address} finishes its calls; to end it now: kill {served.pid}"
                print(told, file=sys.stderr, flush=True)
            time.sleep(0.05)
        print(f"stopped {served.title} at {served.address}")
    return 0


def named(name: str) -> Served:
    """The one running server that has that model, address, port or process id; "": the only one. Raises ConfigError."""
    there = running()
    found = [each for each in there if not name or each.has(name) or name == str(each.pid) or _is_at(each, name)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{each.title} at {each.address}" for each in there)
    if not there:
        raise ConfigError("No server of yours runs here (those of other state folders are not listed).", param="server")
    if holder := next((each for each in there if not found and each.asked(os.environ.get(KEYS[0])).has(name)), None):
        raise ConfigError(
            f"{name} is one of several models at {holder.address}: `tokenmill stop {holder.address}` ends the server, "
            f"POST {holder.address}/models/unload unloads the model.",
            param="server",
        )
    if not found:
        raise ConfigError(f"No server of yours is or has {name!r}. There are: {known}.", param="server")
    raise ConfigError(f"Which one? Name its address, or say --all: {known}.", param="server")


def _is_at(served: Served, name: str) -> bool:
    url = served.url()
    if url is None or name.startswith("/"):
        return name == served.address
    if name.isdecimal():
        return int(name) == url.port
    with contextlib.suppress(ConfigError):
        other = read_url(name, "URL", "http://127.0.0.1:8000")
        local = {"localhost": "127.0.0.1"}
        return (local.get(other.host, other.host), other.port) == (url.host, url.port)
    return False
