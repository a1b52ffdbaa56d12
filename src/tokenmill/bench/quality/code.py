"""Runs a program a model wrote, in a process that can do little harm, and says whether it passed its tests.

Each program gets a fresh interpreter (isolated mode, empty environment, a temporary directory that is removed) which
first gives up what it can and only then runs it:

    limits             CPU seconds, address space, file size, open files, no core dumps; wall clock from outside
    processes          no further process or thread (the limit does not bind root, so root becomes nobody first)
    network            a network namespace of its own, with nothing in it
    files              Landlock (Linux 5.13+): nothing outside the temporary directory can be written, made or removed
    privileges         no_new_privs, capabilities dropped; killed when this process dies

Rlimits are always there on Linux; the rest depends on kernel and container, so `probe` asks and every report says which
held. What remains: the program can read what this user (or nobody) can read, and a kernel bug is a way out. This
guards against accidents of generated code, not against an attacker: use a virtual machine for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from ...core.errors import ConfigError

_OUTPUT_BYTES = 10_000
"""Kept of what a program prints; the rest is cut."""


@dataclass(frozen=True, slots=True)
class CodeLimits:
    """What one program may use. Sizes in bytes; times in seconds."""

    cpu_s: int = 5
    wall_s: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    num_files: int = 32


@dataclass(frozen=True, slots=True)
class Verdict:
    """`status`: passed, failed (an exception or a failed assertion), ended (it left before its tests were done),
    timeout, or killed (a limit). `detail`: the exception, in one line. `held`: protections that were in force."""

    status: str
    detail: str = ""
    held: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.status == "passed"


def run_program(program: str, limits: CodeLimits | None = None) -> Verdict:
    """Run `program` as a main module; it passes if it reaches its end without an exception."""
    limits = limits or CodeLimits()
    with tempfile.TemporaryDirectory(prefix="tokenmill-code-") as folder:
        # The program could write to this pipe too: forging a verdict is possible, doing so by accident is not.
        report_read, report_write = os.pipe()
        try:
            job = json.dumps({"program": program, "folder": folder, "report_fd": report_write, **asdict(limits)})
            process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", str(Path(__file__).with_name("child.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                pass_fds=(report_write,),
                start_new_session=True,
            )
        finally:
            os.close(report_write)
        try:
            _finish(process, job, limits.wall_s)
            with os.fdopen(report_read, "rb", closefd=False) as report:
                # A descendant that escaped the kill could hold the pipe open; nothing may wait for it.
                os.set_blocking(report_read, False)
                lines = (report.read(_OUTPUT_BYTES) or b"").decode("utf-8", "replace").splitlines()
        finally:
            os.close(report_read)
    return _verdict(process.returncode, lines)


def probe(limits: CodeLimits | None = None) -> tuple[str, ...]:
    """The protections that hold here. Raises ConfigError where a harmless program fails or a bad one passes."""
    good = run_program("import collections, functools, heapq, itertools, math, re, string, typing\n", limits)
    bad = run_program("assert 1 + 1 == 3\n", limits)
    if not good.passed or bad.status != "failed":
        reason = good.detail or good.status if not good.passed else "a failing test was not noticed"
        raise ConfigError(f"Programs cannot be run safely on this machine: {reason}.", param="allow-code-execution")
    return good.held


def _finish(process: subprocess.Popen[bytes], job: str, wall_s: float) -> None:
    """Waits for the end; returncode -SIGALRM: the wall clock ran out. Nothing of its process group is left."""
    timed_out = False
    try:
        process.communicate(job.encode(), timeout=wall_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if timed_out:
        process.returncode = -signal.SIGALRM


def _verdict(returncode: int, lines: list[str]) -> Verdict:
    held = tuple(json.loads(lines[0])) if lines else ()
    if len(lines) > 1:
        status, _, detail = lines[1].partition(" ")
        return Verdict(status, detail, held)
    if returncode == -signal.SIGALRM:
        return Verdict("timeout", "it ran past the wall-clock limit", held)
    if returncode < 0:
        return Verdict("killed", f"signal {signal.Signals(-returncode).name}", held)
    return Verdict("ended", f"exit status {returncode} before the tests were done", held)
