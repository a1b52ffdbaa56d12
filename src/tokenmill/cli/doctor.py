"""`doctor`: what this machine offers, which kernels will be used and why, and what could be better."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from ..core.units import format_bytes
from ..formats.hub import default_cache_dir
from ..node.load import describe_kernels
from ..node.machine import MachineFacts, read_machine
from ..node.options import KV_SHARE
from ..ops.native import available
from ..ops.select import select_ops
from ..plugins.load import VARIABLE, are_on, installed
from .servers import running
from .state import default_state_dir

_SHOWN = ("TOKENMILL_ISA",)
"""Variables whose value is no secret and no folder."""

PACKAGES = (
    "numpy",
    "msgspec",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "tokenizers",
    "jinja2",
    "prometheus-client",
    "rich",
)


_REPORT = """\
**What did you do?** (the command or the call, and the model)

**What did you expect, and what happened?** (with the lines that the server logged)

<details><summary>tokenmill doctor --report</summary>

```
{facts}
```
</details>"""


def doctor(args: argparse.Namespace) -> int:
    machine = read_machine()
    kernels = _kernels(machine)
    if args.brief:
        print(f"tokenmill {__version__}: {kernels}")
        return 0
    if args.report:
        print(_REPORT.format(facts="\n".join(_report(machine, kernels, args.port))))
        return 0
    for name, value in _facts(machine, kernels, args.port):
        print(f"{name:<10} {value}")
    return 0


def _facts(machine: MachineFacts, kernels: str, port: int) -> Iterator[tuple[str, str]]:
    yield "tokenmill", f"{__version__}, Python {platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    quota = "" if machine.cpu_quota is None else f", of which the container grants {machine.cpu_quota:g}"
    yield "cpu", f"{machine.cpu_model}, {machine.num_cpus} usable{quota}"
    yield "features", " ".join(machine.cpu_features) or "none that the kernels know"
    limit = "no container limit" if machine.cgroup_headroom is None else format_bytes(machine.cgroup_headroom) + " left"
    yield "memory", f"{format_bytes(machine.memory_available)} available, {limit}"
    yield "kv pool", f"{format_bytes(machine.usable_memory * KV_SHARE)} by default ({KV_SHARE:.0%} of what is usable)"
    yield "kernels", kernels
    yield "packages", ", ".join(_versions())
    for said in _plugins():
        yield "plug-in", said
    yield "cache", str(default_cache_dir())
    yield "port", _port(port)


def _report(machine: MachineFacts, kernels: str, port: int) -> Iterator[str]:
    """The facts, and more that a maintainer asks for. Neither names of this machine, its user and folders, nor values
    of variables that may be secret."""
    hidden = {sys.executable: "python", str(Path.home()): "~"}
    for name, value in _facts(machine, kernels, port):
        if name != "cache":
            for text, instead in hidden.items():
                value = value.replace(text, instead) if len(text) > 1 else value
            yield f"{name:<10} {value}"
    yield f"{'libc':<10} {' '.join(platform.libc_ver()) or 'unknown'}"
    distribution = "unknown"
    with contextlib.suppress(OSError):
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", distribution)
    yield f"{'os':<10} {distribution}"
    ours = sorted(name for name in os.environ if name.startswith("TOKENMILL_"))
    shown = (f"{name}={os.environ[name]}" if name in _SHOWN else f"{name} (set)" for name in ours)
    yield f"{'variables':<10} {', '.join(shown) or 'none of TOKENMILL_*'}"
    state = default_state_dir()
    files = sorted(path for path in state.iterdir() if path.is_file()) if state.is_dir() else []
    sizes = (f"{path.name} {format_bytes(path.stat().st_size)}" for path in files)
    yield f"{'state':<10} {', '.join(sizes) or 'none yet'}"


def _kernels(machine: MachineFacts) -> str:
    reason = available()
    if reason is not None:
        remedy = "install a C++ compiler, then tokenmill again, or a wheel built elsewhere"
        return f"numpy reference, slow: the native kernels cannot be used ({reason}); {remedy}"
    ops = select_ops("native", machine.usable_cpus)
    try:
        return describe_kernels(ops)
    finally:
        ops.close()


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} missing"


def _plugins() -> Iterator[str]:
    """What packages add, told from their metadata: none is imported."""
    if not are_on():
        yield f"none is looked at ({VARIABLE}=off)"
        return
    for plugin in installed():
        yield f"{plugin.group.name} {plugin.name}, of {plugin.package} {plugin.version}"


def _port(port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"{port}: {error.strerror}"
            own = (each for each in running() if (url := each.url()) is not None and url.port == port)
            return f"{port} is in use" + next((f" by a server of yours (process {each.pid})" for each in own), "")
    return f"{port} is free"
