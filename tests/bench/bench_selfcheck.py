"""How true the load generator is, against a server whose send times are known. Prints figures with pass or fail.

    python tests/bench/bench_selfcheck.py                    all checks, about two minutes
    python tests/bench/bench_selfcheck.py --streams 1 16     accuracy at these streams only

- *accuracy*: p50 to p99 of TTFT, ITL and E2EL within 1 ms or 1 % of what the server's own send times say, from the
  client's send to the server's (p99.9 is printed beside them), streams in a closed loop.
- *schedule*: an open loop at twice what the server can do keeps sending on time (lateness p99 below 5 ms) or warns.
- *cost*: events per second that one core of client could take, from its processor time per event: at least 20,000.

A busy machine fails these honestly: client and server each need a core. Nothing here is part of the test suite,
because a timed assertion on a shared machine proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "src"))

from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.datasets import Lengths, random_prompts
from tokenmill.bench.load.histogram import describe
from tokenmill.bench.load.http import parse_url
from tokenmill.bench.load.material import token_material
from tokenmill.bench.load.run import Load, run_async, run_load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.load.target import Target
from tokenmill.bench.result import Distribution, Run

SERVER = Path(__file__).resolve().parent.parent / "synthetic_server.py"
POINTS = ("p50", "p90", "p95", "p99")
ALLOWED_S, ALLOWED_SHARE = 0.001, 0.01
WANTED_EVENTS_PER_S = 20_000


def measure(
    schedule: Schedule, num: int, output_len: int, server_flags: Sequence[str]
) -> tuple[Run, list[dict[str, Any]]]:
    """A run on a fresh server, and for each of its rows the server's record of that request."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records.json")
        command = [sys.executable, str(SERVER), *server_flags, "--records", str(records)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            target = Target(
                "synthetic",
                parse_url(f"http://127.0.0.1:{port}"),
                BodyFormat("completions", "tokens", "synthetic"),
                f"http://127.0.0.1:{port}/metrics",
            )
            load = Load(
                make_plan=lambda num, seed, rate: random_prompts(num, seed, Lengths(64, output_len)),
                make_material=lambda seed, prompt_format: token_material(seed, 1000, 30000),
                schedule=schedule,
                num_prompts=num,
                seed=0,
            )
            run = run_async(run_load(target, load))
        finally:
            process.terminate()
            process.stdout.close()
            process.wait()
        sent = json.loads(records.read_text())[load.num_warmups :]
        by_index = {int(record["request_id"].rpartition("-")[2]): record for record in sent}
        return run, [by_index[row.index] for row in run.requests]


def accuracy(num_streams: int) -> bool:
    """Closed loop of num_streams streams at about 8,000 events a second or 10 ms between tokens, what is slower."""
    itl_s = max(0.01, num_streams / 8000)
    flags = ["--ttft", "0.05", "--itl", str(itl_s), "--jitter", "0.5"]
    run, records = measure(Schedule(concurrency=num_streams), max(40, num_streams * 3), 60, flags)
    start_s = run.client.clock_start_s
    starts = [start_s + (row.sent_s or 0.0) for row in run.requests]
    truth = {
        "TTFT": (describe(r["events_s"][0] - at for r, at in zip(records, starts, strict=True)), run.ttft_from_send_s),
        "ITL": (describe(b - a for r in records for a, b in pairwise(r["events_s"])), run.itl_s),
        "E2EL": (describe(r["events_s"][-1] - at for r, at in zip(records, starts, strict=True)), run.e2el_from_send_s),
    }
    reading = describe(r["arrived_s"] - at for r, at in zip(records, starts, strict=True))
    passed = True
    for name, (true, seen) in truth.items():
        errors = [(seen_at(seen, point) - seen_at(true, point), seen_at(true, point)) for point in POINTS]
        ok = all(abs(error) <= max(ALLOWED_S, ALLOWED_SHARE * value) for error, value in errors)
        passed &= ok
        shown = "  ".join(
            f"{point} {v * 1e3:8.3f} {e * 1e3:+7.3f}" for point, (e, v) in zip(POINTS, errors, strict=True)
        )
        tail = (
            f"p99.9 {seen_at(true, 'p99_9') * 1e3:8.3f} {(seen_at(seen, 'p99_9') - seen_at(true, 'p99_9')) * 1e3:+7.3f}"
        )
        print(f"{verdict(ok)}  {num_streams:3} streams  {name:4} ms  {shown}  ({tail})", flush=True)
    lag = run.client.loop_lag_s.p99 or 0.0
    print(
        f"      client {run.client.cores:.2f} cores, loop lag p99 {lag * 1e3:.2f} ms; requests reached the server's"
        f" program after p50 {seen_at(reading, 'p50') * 1e3:.2f} ms, p99 {seen_at(reading, 'p99') * 1e3:.2f} ms"
    )
    return passed and run.num_failed == 0


def seen_at(values: Distribution, point: str) -> float:
    value: float = getattr(values, point)
    return value


def schedule_kept() -> bool:
    """The server does 16 requests at once of 0.2 s each, 80 a second; it is offered 160."""
    flags = ["--ttft", "0.05", "--itl", "0.01", "--max-running", "16"]
    run, _ = measure(Schedule(request_rate=160.0), 800, 16, flags)
    late = run.lateness_s
    assert late.p99 is not None and late.p50 is not None
    kept = late.p99 < 0.005
    says_so = any("late" in warning for warning in run.warnings)
    print(
        f"{verdict(kept or says_so)}  2x overload: offered {run.offered_requests_per_s:.0f}/s, served"
        f" {run.requests_per_s:.0f}/s, lateness p50 {late.p50 * 1e3:.3f} ms, p99 {late.p99 * 1e3:.3f} ms,"
        f" most in flight {run.max_in_flight}{'' if kept else ' (late, and says so)'}"
    )
    return kept or says_so


def cost() -> bool:
    """400 streams at 20 ms a token are 20,000 events a second, each in a packet of its own; then 128 streams as fast as
    the server can send, where packets hold many."""
    passed = True
    for name, streams, flags in (
        ("20,000 events/s asked", 400, ["--ttft", "0.02", "--itl", "0.02", "--jitter", "0.5"]),
        ("as fast as it goes", 128, ["--ttft", "0", "--itl", "0"]),
    ):
        run, _ = measure(Schedule(concurrency=streams), streams * 3, 200, flags)
        can = 1e6 / (run.client.cpu_us_per_event or 1e6)
        passed &= can >= WANTED_EVENTS_PER_S
        print(
            f"{verdict(can >= WANTED_EVENTS_PER_S)}  {name}: got {run.output_tokens_per_s:,.0f}/s for"
            f" {run.client.cores:.2f} cores of client, {run.client.cpu_us_per_event:.1f} us an event:"
            f" {can:,.0f}/s on one core"
        )
    return passed


def verdict(ok: bool) -> str:
    return "PASS" if ok else "FAIL"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="*", help="accuracy only, at these streams")
    args = parser.parse_args()
    print(f"load on the machine before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}")
    results = [accuracy(num) for num in args.streams or (1, 4, 16, 64, 256)]
    if args.streams is None:
        results += [schedule_kept(), cost()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
