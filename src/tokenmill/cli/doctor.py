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
from ..core.units import MiB, format_bytes
from ..formats.hub import default_cache_dir
from ..node.load import describe_kernels
from ..node.machine import MachineFacts, read_machine
from ..node.options import KV_SHARE
from ..node.processors import ThreadOptions, read_processors, thread_options
from ..ops.native import NativeOps, available
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
    threads = thread_options(read_processors(), machine.cpu_quota)
    if args.report:
        print(_REPORT.format(facts="\n".join(_report(machine, threads, kernels, args.port))))
        return 0
    for name, value in _facts(machine, threads, kernels, args.port):
        print(f"{name:<10} {value}")
    return _measure(threads) if args.measure else 0


READ_BYTES = (4 * MiB, 32 * MiB, 256 * MiB)
"""Working sets: such as caches hold, and such as they do not."""

READ_PER_PROBE = 512 * MiB
PROBE_TURNS = 2000
PHASES = 20000
ARITHMETIC = ("int8", "bf16", "f32")


def _measure(threads: ThreadOptions) -> int:
    """What the kernels' own instructions reach, for each number of threads worth trying, and with one. About a second
    for each."""
    if available() is not None:
        print("nothing to measure: the native kernels cannot be used", file=sys.stderr)
        return 1
    reads = [f"read {format_bytes(size)}" for size in READ_BYTES]
    header = ("threads", *(f"{name} GB/s" for name in reads), *(f"{name} GOP/s" for name in ARITHMETIC), "phase us")
    print("\n" + "  ".join(header))
    ops = NativeOps(threads.most)
    ops.use_threads(threads.most, threads.places)
    try:
        for count in sorted({1, *threads.counts}):
            ops.limit_threads([(1, count)])
            found = [ops.probe("read", size, max(2, READ_PER_PROBE // size)) / 1e9 for size in READ_BYTES]
            found += [ops.probe(what, rounds=PROBE_TURNS) / 1e9 for what in ARITHMETIC]
            cells = [str(count), *(f"{value:.1f}" if value else "none" for value in found)]
            cells.append(f"{1e6 / ops.probe('phase', rounds=PHASES):.2f}")
            print("  ".join(f"{cell:>{len(name)}}" for cell, name in zip(cells, header, strict=True)))
    finally:
        ops.close()
    print("a phase: from the end of one operation to the next, all threads taking part")
    return 0


def _threads(threads: ThreadOptions) -> str:
    """What an engine will take where --threads does not say."""
    if len(threads.counts) == 1:
        return f"{threads.default}, one for each core: {threads.about}"
    counts = ", ".join(map(str, threads.counts))
    return f"{threads.default}, or what steps timed at start choose of {counts}: {threads.about}"


def _facts(machine: MachineFacts, threads: ThreadOptions, kernels: str, port: int) -> Iterator[tuple[str, str]]:
    yield "tokenmill", f"{__version__}, Python {platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    quota = "" if machine.cpu_quota is None else f", of which the container grants {machine.cpu_quota:g}"
    yield "cpu", f"{machine.cpu_model}, {machine.num_cpus} usable{quota}"
    yield "threads", _threads(threads)
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


def _report(machine: MachineFacts, threads: ThreadOptions, kernels: str, port: int) -> Iterator[str]:
    """The facts, and more that a maintainer asks for. Neither names of this machine, its user and folders, nor values
    of variables that may be secret."""
    hidden = {sys.executable: "python", str(Path.home()): "~"}
    for name, value in _facts(machine, threads, kernels, port):
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
    ops = select_ops("native", machine.usable_cores)
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
