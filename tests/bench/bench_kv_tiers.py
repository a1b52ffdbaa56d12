"""What tiers do for a working set of four times the engine's pool: traces, replayed to servers with and without them.

    python tests/bench/bench_kv_tiers.py TRACE.jsonl[.gz] [--scale 0.25] [--requests 60] [--settings off,host,host+disk]
    python tests/bench/bench_kv_tiers.py --random [--rounds 4]

The requests of a trace (Mooncake: whole conversations, drawn from all over it, in its order; agentic: the first turns
of some conversations, taken in turns) go to one server after another, one request at a time: what is measured is the
time to the first token. All lengths are multiplied by --scale and cut at --most; blocks that the trace shares are
shared. The pool has room for a quarter of the distinct blocks of all prompts, host memory for a quarter (alone: for
half), the disk for all. Answers must be the same tokens everywhere.

A request is `known` where at least 75 % of its prompt's blocks were in prompts before it, `new` where less than
10 % were. `lost`: known, and no longer in the pool of the server without tiers. `held`: of those, what the last setting
had 75 % of.

With --random: prompts that nobody has seen, several at a time, to a server without tiers and one with all, in turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from bench_kv_restart import ask, document
from serving import Server

from tokenmill.bench.load.plan import Call
from tokenmill.bench.load.traces import Fit, read_trace
from tokenmill.core.units import MiB

BLOCK, BLOCK_BYTES = 16, 368_640
FIRST_ID, NUM_IDS = 1000, 40000
SHARE = 4


class Job(NamedTuple):
    """known: of the prompt's blocks, the share that were in prompts before."""

    prompt: list[int]
    known: float


class Seen(NamedTuple):
    first_s: float
    tokens: list[int]
    num_cached: int


def read_jobs(path: Path, num: int, scale: float, most: int, seed: int) -> tuple[list[Job], int]:
    """And how many distinct blocks they have."""
    fit = Fit(scale, most + 1)
    is_agentic = "agentic" in path.name
    plan = read_trace(path, 100 * num if is_agentic else num, seed, fit, is_sampled=not is_agentic)
    calls = _in_turns(plan.calls, num, seed) if is_agentic else sorted(plan.calls, key=lambda call: call.delay_s)[:num]
    blocks: set[tuple[int, ...]] = set()
    jobs = []
    for call in calls:
        prompt = [token for part in call.parts for token in drawn(part.key, part.num_tokens)]  # type: ignore[union-attr]
        heads = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        keys = [(end, hash(head)) for end, head in enumerate(heads)]
        jobs.append(Job(prompt, sum(key in blocks for key in keys) / max(1, len(keys))))
        blocks |= set(keys)
    return jobs, len(blocks)


def drawn(key: str, num_tokens: int) -> list[int]:
    rng = random.Random(key)
    return [FIRST_ID + rng.randrange(NUM_IDS) for _ in range(num_tokens)]


def _in_turns(calls: tuple[Call, ...], num: int, seed: int) -> list[Call]:
    """Of about a sixth as many conversations as requests, the first turns, in a drawn order."""
    sessions: dict[str, list[Call]] = {}
    for call in calls:
        sessions.setdefault(call.session.partition("/")[0], []).append(call)
    chosen = list(sessions.values())[: max(2, num // 6)]
    rng, found = random.Random(seed), []
    nexts = [iter(each[: -(-num // len(chosen))]) for each in chosen]
    while nexts and len(found) < num:
        one = rng.choice(nexts)
        call = next(one, None)
        if call is None:
            nexts.remove(one)
        else:
            found.append(call)
    return found


def options(setting: str, num_blocks: int, most: int, folder: str) -> tuple[str, ...]:
    quarter = -(-num_blocks // SHARE) * BLOCK_BYTES
    pool = max(quarter, 2 * most // BLOCK * BLOCK_BYTES)
    found = ["--kv-cache-memory-bytes", f"{pool // MiB}MiB", "--disable-access-log", "--max-queue-s", "0"]
    if setting != "off":
        host = max(quarter, 64 * MiB) * (2 if setting == "host" else 1)
        found += ["--kv-host", f"{host // MiB}MiB"]
    if setting == "host+disk":
        found += ["--kv-disk", f"{folder}:{max(6 * quarter, 64 * MiB) // MiB}MiB"]
    return tuple(found)


def replay(jobs: list[Job], setting: str, num_blocks: int, args: argparse.Namespace) -> list[Seen]:
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        Server(*options(setting, num_blocks, args.most, folder), *args.args, model=args.model) as server,
    ):
        for _ in range(3):  # costs are measured
            ask(server, document(random.Random(9), 200), 4)
            ask(server, document(random.Random(8), 600), 4)
        found = [Seen(*ask(server, job.prompt, args.answer)) for job in jobs]
        if args.verbose and setting != "off":
            print(server.request("GET", "/admin/kv/tiers")[1], flush=True)
    return found


def show(jobs: list[Job], runs: dict[str, list[Seen]]) -> None:
    base, last = runs.get("off") or next(iter(runs.values())), list(runs.values())[-1]
    lost = [
        job.known >= 0.75 and seen.num_cached < 0.25 * len(job.prompt) for job, seen in zip(jobs, base, strict=True)
    ]
    groups = {
        "all": [True] * len(jobs),
        "known": [job.known >= 0.75 for job in jobs],
        "lost": lost,
        "held": [
            is_lost and seen.num_cached >= 0.75 * len(job.prompt)
            for is_lost, job, seen in zip(lost, jobs, last, strict=True)
        ],
        "new": [job.known < 0.1 for job in jobs],
    }
    for group, chosen in groups.items():
        if not any(chosen):
            continue
        ours = [seen.first_s for seen, is_one in zip(base, chosen, strict=True) if is_one]
        for setting, run in runs.items():
            times = [seen.first_s for seen, is_one in zip(run, chosen, strict=True) if is_one]
            cached = sum(seen.num_cached for seen, is_one in zip(run, chosen, strict=True) if is_one)
            asked = sum(len(job.prompt) for job, is_one in zip(jobs, chosen, strict=True) if is_one)
            pairs = [b / a for a, b in zip(times, ours, strict=True)]
            print(
                f"{group:6} {setting:10} {len(times):4} requests: TTFT p50 {statistics.median(times) * 1e3:7.0f} ms,"
                f" mean {statistics.fmean(times) * 1e3:7.0f}, cached {cached / asked:4.0%};"
                f" off / this: p50 {statistics.median(ours) / statistics.median(times):5.2f},"
                f" sum {sum(ours) / sum(times):5.2f}, worst {min(pairs):5.2f}"
            )


def throughput(setting: str, rounds: int, args: argparse.Namespace) -> list[float]:
    """Tokens a second, prompts and answers, of each round."""
    found = []
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        Server(*options(setting, 4000, args.most, folder), *args.args, model=args.model) as server,
    ):
        for nth in range(-1, rounds):
            rng = random.Random(f"{setting} {nth} {time.time_ns()}")
            prompts = [document(rng, 800) for _ in range(12)]
            began_s = time.perf_counter()
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda prompt: ask(server, prompt, 32), prompts))
            if nth >= 0:
                found.append(12 * 832 / (time.perf_counter() - began_s))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--most", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--settings", default="off,host,host+disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--folder", type=Path, help="on the file system to be used (default: a temporary one)")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--verbose", action="store_true", help="print what the store counts")
    parser.add_argument("--args", nargs=argparse.REMAINDER, default=[], help="more options of serve")
    args = parser.parse_args()
    if args.random:
        speeds: dict[str, list[float]] = {"off": [], "host+disk": []}
        for _ in range(args.rounds):
            for setting, found in speeds.items():
                found += throughput(setting, 2, args)
        ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
        for setting, found in speeds.items():
            print(f"{setting:10} {statistics.median(found):.0f} tokens/s ({min(found):.0f} to {max(found):.0f})")
        print(f"with tiers / without: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
        return 0
    if args.trace is None:
        parser.error("a trace is needed, or --random")
    jobs, num_blocks = read_jobs(args.trace, args.requests, args.scale, args.most, args.seed)
    known = sum(job.known >= 0.75 for job in jobs)
    print(
        f"{args.trace.name}: {len(jobs)} requests of {statistics.fmean(len(job.prompt) for job in jobs):.0f} tokens,"
        f" lengths times {args.scale}, cut at {args.most}; {known} known; {num_blocks} distinct blocks,"
        f" {num_blocks * BLOCK_BYTES / MiB:.0f} MiB; pool {options('off', num_blocks, args.most, '')[1]}",
        flush=True,
    )
    runs: dict[str, list[Seen]] = {}
    for setting in args.settings.split(","):
        runs[setting] = replay(jobs, setting, num_blocks, args)
        print(f"{setting} took {sum(seen.first_s for seen in runs[setting]):.0f} s", flush=True)
    assert all(
        [seen.tokens for seen in run] == [seen.tokens for seen in next(iter(runs.values()))] for run in runs.values()
    )
    show(jobs, runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
