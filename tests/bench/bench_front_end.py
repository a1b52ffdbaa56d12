"""What one front end can do: streams open at once, streamed tokens a second, and what it adds to TTFT.

    python tests/bench/bench_front_end.py                       all parts, about two minutes
    python tests/bench/bench_front_end.py --parts rate --rates 20000 30000

Three processes: the front end (the app of `build_app`, its HTTP server and its sandbox, configured as `serve` does), an
engine that computes nothing but keeps a pace (tests/paced_engine.py), and `tokenmill bench serve`. They share the cores
of the machine: on two of them, client and engine have one at best. Nothing here is a test, because it is timed.

- *streams*: 1,000 streams open at once; all end right. Memory, and how late the event loop wakes, are printed.
- *rate*: 16 streams at rising rates of tokens. A rate is held where at least 97 % of it arrives while it is sent, in
  events of at most 1.1 tokens. The bar: 20,000 a second. A client or an engine that itself ran short is named.
- *ttft*: a call every 100 ms. From the client's send to the engine's having the request, and from the engine's giving
  its first token to the link to that token's arrival: together 1 ms at most in the median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenmill.net.unix import UnixFrontEnd, private_address

PARTS = ("streams", "rate", "ttft")
RATES = (10_000, 20_000, 25_000, 30_000, 40_000)
WANTED_STREAMS, WANTED_RATE, MOST_ADDED_S = 1000, 20_000, 0.001
RATE_STREAMS, HELD_SHARE, MOST_TOKENS_PER_EVENT, BUSY_CORES = 16, 0.97, 1.1, 0.9
SAMPLE_S = 0.01
MIB = 1 << 20


@dataclass(frozen=True)
class Measured:
    """client: the result of `bench serve`. front, engine: what the processes say of themselves."""

    client: dict[str, Any]
    front: dict[str, Any]
    engine: dict[str, Any]

    @property
    def good(self) -> list[dict[str, Any]]:
        """Calls that ended right, with every token that they asked for."""
        rows: list[dict[str, Any]] = self.client["requests"]
        return [row for row in rows if row["ok"] and row["output_tokens"] == row["wanted_output_tokens"]]


def measure(step_s: float, num_prompts: int, output_len: int, load: Sequence[str], endpoint: str) -> Measured:
    """A load on a fresh front end whose engine makes a step every `step_s` seconds."""
    with private_address() as address, tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        engine_script = str(Path(__file__).resolve().parent.parent / "paced_engine.py")
        with (
            _process(__file__, "--front-end", address, folder) as front,
            _process(engine_script, address, str(step_s)) as engine,
        ):
            url = _line(front)
            command = [
                sys.executable, "-m", "tokenmill.cli.main", "bench", "serve", "--url", url, "--endpoint", endpoint,
                "--ignore-eos", "--prompt-format", "text", "--dataset-name", "random", "--random-input-len", "64",
                "--random-range-ratio", "0", "--random-output-len", str(output_len), "--num-prompts", str(num_prompts),
                "--num-warmups", "0", "--json", str(result), *load,
            ]  # fmt: skip
            subprocess.run(command, stdout=subprocess.DEVNULL)
            assert front.stdin is not None
            front.stdin.close()
            told, did = json.loads(_line(front)), json.loads(_line(engine))
        return Measured(json.loads(result.read_text()), told, did)


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        yield process
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parent.parent.parent / "src")
    return os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the benchmark ended early; its message is above")
    return line


def front_end(address: str, folder: str) -> None:
    """The front end's process: print the URL, serve until standard input ends, print what was seen."""
    from scripted import Served, make_text_model
    from tokenmill.net.system import MonotonicClock

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's end closes standard input
    text = make_text_model(max_context=8192)
    with Served(text=text, attach=False, folder=Path(folder), max_queue_s=0.0) as served:
        link = UnixFrontEnd(address, MonotonicClock())
        samples = served.call(lambda: Samples(served.client))
        served.call(lambda: served.client.attach(link))
        served.wait_until(lambda: served.client.ready is not None)
        print(served.url, flush=True)
        sys.stdin.read()
        told = served.call(samples.end)
        served.call(link.close)
    print(json.dumps(told), flush=True)


class Samples:
    """What the front end's process uses, and how late its event loop wakes, while calls are open."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._idle_bytes = _resident_bytes()
        self._most_bytes = 0
        self._most_open = 0
        self._late_s: list[float] = []
        self._cpu_s = 0.0
        self._task = asyncio.create_task(self._run())

    def end(self) -> dict[str, Any]:
        self._task.cancel()
        return {
            "idle_bytes": self._idle_bytes,
            "most_bytes": self._most_bytes,
            "most_open": self._most_open,
            "late_s": self._late_s,
            "cpu_s": self._cpu_s,
        }

    async def _run(self) -> None:
        while True:
            due_s, before_s = time.perf_counter() + SAMPLE_S, time.process_time()
            was_open = self._client.num_open
            await asyncio.sleep(SAMPLE_S)
            if was_open or self._client.num_open:
                self._late_s.append(max(0.0, time.perf_counter() - due_s))
                self._cpu_s += time.process_time() - before_s
                self._most_open = max(self._most_open, self._client.num_open)
                self._most_bytes = max(self._most_bytes, _resident_bytes())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def streams(num: int, output_len: int, step_s: float, endpoint: str) -> bool:
    """`num` streams in a closed loop, each once."""
    measured = measure(step_s, num, output_len, ["--concurrency", str(num)], endpoint)
    most = min(measured.client["max_in_flight"], measured.engine["most_open"])
    passed = len(measured.good) == num and most == num
    front = measured.front
    grown = front["most_bytes"] - front["idle_bytes"]
    print(
        f"{verdict(passed)}  streams: {len(measured.good)} of {num} ended with all of their {output_len} tokens,"
        f" {most} were open at once; {measured.client['output_tokens_per_s']:,.0f} tokens/s"
    )
    print(
        f"      front end: {front['most_bytes'] / MIB:.0f} MiB resident, {grown / MIB:.0f} more than idle"
        f" ({grown / num / 1024:.0f} KiB a stream); event loop late {_points(front['late_s'])}"
    )
    _print_errors(measured)
    return passed


def rate(rates: Sequence[int], seconds: float, endpoint: str) -> bool:
    """16 streams for about `seconds` at each rate."""
    best = 0.0
    for offered in sorted(rates):
        output_len = max(2, min(4000, round(offered * seconds / RATE_STREAMS)))
        num = RATE_STREAMS * max(1, round(offered * seconds / RATE_STREAMS / output_len))
        load = ["--concurrency", str(RATE_STREAMS)]
        measured = measure(RATE_STREAMS / offered, num, output_len, load, endpoint)
        seen = _rate_of(measured)
        per_event = measured.client["tokens_per_event"] or 0.0
        cpu_us = 1e6 * measured.front["cpu_s"] / max(1, measured.engine["num_tokens"])
        cores = measured.client["client"]["cores"]
        is_held = len(measured.good) == num and seen >= HELD_SHARE * offered and per_event <= MOST_TOKENS_PER_EVENT
        best = max(best, offered if is_held else 0.0)
        short = []
        if cores > BUSY_CORES:
            short.append("client")
        if not is_held and measured.engine["full_tokens_per_s"] < HELD_SHARE * offered:
            short.append("engine, or the front end kept it waiting")
        note = f"; SHORT: {', '.join(short)}" if short else ""
        print(
            f"      {offered:,} tokens/s offered: {seen:,.0f} came, {per_event:.2f} an event, {cpu_us:.1f} us of front"
            f" end a token; event loop late {_points(measured.front['late_s'])}; client {cores:.2f} cores"
            f" {'held' if is_held else 'NOT HELD'}{note}",
            flush=True,
        )
        _print_errors(measured)
    passed = best >= WANTED_RATE
    print(f"{verdict(passed)}  rate: {best:,.0f} tokens/s held over {RATE_STREAMS} streams, wanted {WANTED_RATE:,}")
    return passed


def _rate_of(measured: Measured) -> float:
    """Tokens by the time in which they came, of each stream, summed; the streams run side by side."""
    speeds = [(row["output_tokens"] - 1) / (row["last_s"] - row["first_s"]) for row in measured.good]
    return RATE_STREAMS * statistics.harmonic_mean(speeds) if speeds else 0.0


def ttft(num: int, endpoint: str) -> bool:
    """`num` calls, one every 100 ms, of 4 tokens 10 ms apart: at most one is open."""
    measured = measure(0.01, num, 4, ["--request-rate", "10", "--burstiness", "inf", "--num-warmups", "4"], endpoint)
    start_s = measured.client["client"]["clock_start_s"]
    rows = sorted(measured.client["requests"], key=lambda row: row["sent_s"])
    records = measured.engine["records"][-len(rows) :]
    there = [got_s - start_s - row["sent_s"] for (got_s, _), row in zip(records, rows, strict=True)]
    back = [row["first_s"] + start_s - gave_s for (_, gave_s), row in zip(records, rows, strict=True)]
    added = [one + other for one, other in zip(there, back, strict=True)]
    passed = len(measured.good) == num and statistics.median(added) <= MOST_ADDED_S
    print(f"{verdict(passed)}  ttft: the front end adds {_points(added)}; wanted: median {MOST_ADDED_S * 1e3:g} ms")
    print(f"      request in {_points(there)}; first token out {_points(back)}")
    _print_errors(measured)
    return passed


def _points(values: Sequence[float]) -> str:
    """Nearest-rank percentiles."""
    ordered = sorted(values) or [0.0]
    p50, p99 = (ordered[math.ceil(share * len(ordered)) - 1] * 1e3 for share in (0.5, 0.99))
    return f"p50 {p50:.2f} p99 {p99:.2f} max {ordered[-1] * 1e3:.2f} ms"


def _print_errors(measured: Measured) -> None:
    for error in measured.client["errors"]:
        print(f"      {error['num']} x {error['kind']}: {error['example']}")


def verdict(passed: bool) -> str:
    return "PASS" if passed else "FAIL"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="chat", help="(default: chat)")
    parser.add_argument("--streams", type=int, default=WANTED_STREAMS, help="open at once (default: 1000)")
    parser.add_argument("--step", type=float, default=0.1, help="seconds between tokens of those (default: 0.1)")
    parser.add_argument("--tokens", type=int, default=150, help="of each of those (default: 150)")
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, help="tokens a second, offered in turn")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each rate (default: 5)")
    parser.add_argument("--calls", type=int, default=200, help="of the part ttft (default: 200)")
    parser.add_argument("--front-end", nargs=2, metavar=("ADDRESS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.front_end:
        front_end(*args.front_end)
        return 0
    print(f"load on the machine before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}, shared by all processes")
    parts = {
        "streams": lambda: streams(args.streams, args.tokens, args.step, args.endpoint),
        "rate": lambda: rate(args.rates, args.seconds, args.endpoint),
        "ttft": lambda: ttft(args.calls, args.endpoint),
    }
    results = [parts[name]() for name in PARTS if name in args.parts]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
