"""`tokenmill bench profile`: where the time of a decode step and of a served request goes, as a page.

`cli` measures and hands in plain numbers; they become tables here, largest first, so that each table adds up to a time
that was measured on its own. Times are microseconds. The server that is streamed from is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.markdown import Markdown

from ..core.errors import TokenmillError
from .report import console_beside, markdown_row, write_json

SCHEMA = 1
ROWS = (1, 16, 32)
PAGE = Path("docs/develop/profile.md")
TITLE = """# Where the time goes

`tokenmill bench profile --write` makes this page; do not edit it. Times are microseconds, medians over the steps of a
run. A step's plan and arrays are made, and its results taken in, beside the native call of another step: that slows the
call down where the kernels' threads want all processors, and otherwise costs nothing.
What prevents less, and what was tried: [the log](log.md#what-is-left-to-the-targets).
"""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One decode step of `rows` rows at `context` positions each.

    operations  inside the native call, by operation of the program
    call        the native call with nothing beside it, seen from Python
    between     from the end of a call to the start of the next, in the running engine
    whole       from one step's outputs to the next's, in the running engine
    beside      what the event loop does meanwhile, by part
    """

    rows: int
    context: int
    operations: dict[str, float]
    call: float
    between: float
    whole: float
    beside: dict[str, float]

    @property
    def outside(self) -> float:
        """What is not computing: the budget of the engine process."""
        return self.whole - self.call


@dataclass(frozen=True, slots=True)
class ServedTimes:
    """A load of equal streams on a server. `processes`: processor time of each process for one streamed token; `parts`:
    of the front end's, what was timed alone; the rest is JSON, HTTP and the event loop. Latencies as the client saw
    them, in microseconds."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    first_token: float
    between_tokens: float
    encode: float
    processes: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--write", action="store_true", help=f"write {PAGE} instead of printing")
    group.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help=f"for --write (default: {PAGE})")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure; -: to standard output")
    group.add_argument("--steps", type=int, default=128, metavar="N", help="decode steps of each width (default: 128)")


def show(
    args: argparse.Namespace, steps: Sequence[StepTimes], served: Sequence[ServedTimes], facts: Mapping[str, str]
) -> int:
    page, console = to_page(steps, served, facts), console_beside(args.json)
    if args.write:
        args.output.write_text(page)
        console.print(f"wrote {args.output}", markup=False, highlight=False)
    else:
        console.print(Markdown(page))
    write_json(args.json, to_json(steps, served, facts), indent=2)
    return 0


def to_json(steps: Sequence[StepTimes], served: Sequence[ServedTimes], facts: Mapping[str, str]) -> dict[str, Any]:
    """Microseconds, as docs/operate/benchmarking.md says."""
    return {
        "schema": SCHEMA,
        "kind": "profile",
        "facts": dict(facts),
        "steps": [asdict(step) | {"outside": step.outside} for step in steps],
        "served": [asdict(one) for one in served],
    }


def to_page(steps: Sequence[StepTimes], served: Sequence[ServedTimes], facts: Mapping[str, str]) -> str:
    lines = [TITLE, *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["## A decode step", "", "In the engine process:", ""]
    parts = [
        {
            "native call": step.call,
            "between calls": step.between,
            "slower with work beside it": step.whole - step.call - step.between,
        }
        for step in steps
    ]
    heads = [f"{step.rows} row{'s' if step.rows > 1 else ''}, context {step.context}" for step in steps]
    wholes = [step.whole for step in steps]
    lines += _table("part", heads, parts, wholes, "whole step")
    outside = ", ".join(f"{step.outside:.0f} at {step.rows}" for step in steps)
    lines += ["", f"Outside the native call: {outside} (budget: 150 a step and 10 a row).", ""]
    lines += ["Beside the native call, on the event loop:", ""]
    totals = [sum(step.beside.values()) for step in steps]
    lines += [*_table("part", heads, [step.beside for step in steps], totals, "in all"), ""]
    lines += ["Inside the native call, all layers together:", ""]
    inside = [{**step.operations, "entering and checking": step.call - sum(step.operations.values())} for step in steps]
    lines += _table("operation", heads, inside, [step.call for step in steps], "native call")
    lines += ["", "## A served request", ""]
    heads = [f"{one.streams} stream{'s' if one.streams > 1 else ''}" for one in served]
    shape = served[0]
    lines += [
        f"{shape.prompt_tokens} prompt tokens, {shape.new_tokens} new ones, streamed over HTTP on one machine.",
        "",
    ]
    whole = [one.first_token + (one.new_tokens - 1) * one.between_tokens for one in served]
    spans = [
        {"to the first token": one.first_token, "further tokens": (one.new_tokens - 1) * one.between_tokens}
        for one in served
    ]
    lines += _table("as the client sees it", heads, spans, whole, "whole request")
    encodes = ", ".join(f"{one.encode:.0f}" for one in served[:1])
    lines += ["", f"Of the first token, turning the prompt's text into tokens: {encodes}.", ""]
    if any(one.processes for one in served):
        lines += ["Processor time of a streamed token, prompts included, by process (budget of the front end: 30):", ""]
        totals = [sum(one.processes.values()) for one in served]
        lines += _table("process", heads, [one.processes for one in served], totals, "both")
        fronts = [one.processes.get("front end", 0.0) for one in served]
        pieces = [
            {**one.parts, "JSON, HTTP, event loop": front - sum(one.parts.values())}
            for one, front in zip(served, fronts, strict=True)
        ]
        lines += ["", *_table("in the front end", heads, pieces, fronts, "front end")]
    return "\n".join(lines) + "\n"


def _table(
    name: str, heads: Sequence[str], columns: Sequence[Mapping[str, float]], wholes: Sequence[float], total: str
) -> list[str]:
    """Rows by their largest value; each cell with its share of the column's whole."""
    names = list(dict.fromkeys(key for column in columns for key in column))
    names.sort(key=lambda key: -max(column.get(key, 0.0) for column in columns))

    def cell(value: float, whole: float) -> str:
        return f"{value:.1f} ({value / whole:.0%})" if whole else f"{value:.1f}"

    rows = [
        [key, *(cell(column.get(key, 0.0), whole) for column, whole in zip(columns, wholes, strict=True))]
        for key in names
    ]
    rows.append([f"**{total}**", *(f"**{whole:.1f}**" for whole in wholes)])
    header = [name, *heads]
    return [markdown_row(header), markdown_row(["---"] * len(header)), *map(markdown_row, rows)]


START_S = 120.0


class Server:
    """A context in which `command`, given a --port, serves on 127.0.0.1."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process = subprocess.Popen([*self._command, "--port", str(self.port)], env=self._environment)
        give_up_s = time.monotonic() + START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.__exit__(None, None, None)
                raise TokenmillError(f"{self._command[0]} did not start as a server.")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def cpu_seconds(self, proc: Path = Path("/proc")) -> dict[str, float]:
        """Processor time so far of the front end and of the engine, its child; empty where there is no /proc."""
        assert self._process is not None
        front = self._process.pid
        if not (proc / str(front) / "schedstat").exists():
            return {}
        lists = (proc / str(front) / "task").glob("*/children")
        children = [int(pid) for path in lists for pid in path.read_text().split()]
        return {"front end": _cpu_seconds(proc, front), "engine": sum(_cpu_seconds(proc, pid) for pid in children)}

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as client:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in client.recv(64)
        return False


def _cpu_seconds(proc: Path, pid: int) -> float:
    """Of all threads that live: the first number of schedstat is nanoseconds on a processor."""
    total_ns = 0
    for task in (proc / str(pid) / "task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


async def run_streams(port: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[float]]:
    """All prompts at once, streamed: for each, the seconds from sending to the arrival of every piece of text."""
    return list(await asyncio.gather(*(_stream(port, prompt, max_tokens) for prompt in prompts)))


async def _stream(port: int, prompt: Sequence[int], max_tokens: int) -> list[float]:
    fields = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start_s = time.perf_counter()
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    times = []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(time.perf_counter() - start_s)
        elif line.startswith(b"HTTP/") and b" 200 " not in line:
            raise TokenmillError(f"The server answered {line.decode().strip()}.")
    writer.close()
    return times
