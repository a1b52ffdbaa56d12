"""kill -9 of one engine after the other, faster than they come back, under many streams: nobody may be blamed for it.

    python tests/live/kill_storm.py [--workers 3 --streams 200 --kills 200 --every-s 0.3] [--poisons 20]
                                    [--model tiny|smollm2] [flags of serve]

A kill hits an engine that serves, or one that is just starting where none does. With `--poisons N`, N requests that
crash each engine that runs them come among the streams, one after the other, and then N that take all memory; the kills
go on until all have ended. It prints

    tokens   that were lost, wrong or repeated against the undisturbed answer, by position, log probabilities included
    failed   streams that ended with an error
    poisons  of each kind, how many were given up, and how long that took
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kill
from kill_workers import Count, Load, ask, bodies, spread, workers
from serving import Server, wait_until

from tokenmill.cli.engine_process import CRASH, OUT_OF_MEMORY

ARGS = ("--kv-cache-memory-bytes", "32MiB", "--threads", "1")
SEEDS = {CRASH: 1_000_001, OUT_OF_MEMORY: 1_000_002}


class Storm:
    """Kills an engine every so often, at least `num_kills` times and as long as the block lasts."""

    def __init__(self, server: Server, rng: random.Random, num_kills: int, every_s: float) -> None:
        self.num_done = 0
        self._server = server
        self._rng = rng
        self._num_kills = num_kills
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Storm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while self.num_done < self._num_kills or not self._is_over.is_set():
            ready = [each["pid"] for each in workers(self._server).values() if each["state"] == "ready"]
            if ready:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._rng.choice(ready), signal.SIGKILL)
                    self.num_done += 1
            time.sleep(self._every_s)


def poison(server: Server, body: dict[str, Any], seed: int) -> tuple[bool, float]:
    """Whether it was given up, and after how many seconds."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    with contextlib.closing(connection):
        call = {**body, "seed": seed, "stream": False}
        connection.request("POST", "/v1/completions", json.dumps(call), {"Content-Type": "application/json"})
        response = connection.getresponse()
        said = response.read().decode()
    return response.status == 500 and "given up" in said, time.monotonic() - began_s


def run(
    model: str,
    args: tuple[str, ...],
    *,
    num_streams: int,
    num_kills: int,
    every_s: float,
    num_poisons: int,
    seed: int,
) -> tuple[Count, dict[str, list[tuple[bool, float]]]]:
    """What became of the streams, and of the poisons of each kind. Prints figures."""
    rng = random.Random(seed)
    asked = bodies(rng, min(60, 3 * num_streams), 120)
    told: dict[str, list[tuple[bool, float]]] = {CRASH: [], OUT_OF_MEMORY: []}
    with tempfile.TemporaryDirectory() as name:
        path = model if model == "smollm2" else str(kill.write_model(Path(name)))
        env = {variable: str(number) for variable, number in SEEDS.items()}
        flags = ("--disable-access-log", "--max-queue-s", "120", *args)
        with Server(*flags, model=path, env=env) as server:
            wait_until(lambda: all(each["state"] == "ready" for each in workers(server).values()), "all workers")
            expected = []
            for body in asked:
                said, _, error = ask(server, body)
                assert said and not error, error
                expected.append(said)
            began_s = time.monotonic()
            with Load(server, asked, expected, num_streams) as load, Storm(server, rng, num_kills, every_s) as storm:
                for variable, found in told.items():
                    found += [poison(server, asked[0], SEEDS[variable]) for _ in range(num_poisons)]
            lasted_s = time.monotonic() - began_s
            metrics = server.metrics()
    count = load.count
    convicted = metrics["tokenmill:requests_poisoned_total"]
    print(
        f"{storm.num_done} kills in {lasted_s:.0f} s under {num_streams} streams: {count.num_streams} streams,"
        f" {count.num_tokens} tokens, {metrics['tokenmill:requests_resumed_total']:.0f} resumed,"
        f" {convicted:.0f} convicted, {metrics['tokenmill:engine_losses_total']:.0f} engines lost"
    )
    print(f"tokens   {count.lost} lost, {count.wrong} wrong, {count.repeated} repeated")
    print(f"failed   {len(count.failed)} {count.failed[:3] or ''}")
    for variable, found in told.items():
        if found:
            print(
                f"poisons  {variable}: {sum(was for was, _ in found)} of {len(found)}; {spread([s for _, s in found])}"
            )
    return count, told


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 of engines faster than they come back.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every-s", type=float, default=0.3)
    parser.add_argument("--poisons", type=int, default=0)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    count, told = run(
        options.model,
        (*ARGS, "--workers", str(options.workers), *more),
        num_streams=options.streams,
        num_kills=options.kills,
        every_s=options.every_s,
        num_poisons=options.poisons,
        seed=options.seed,
    )
    return not (count.is_clean and all(was for found in told.values() for was, _ in found))


if __name__ == "__main__":
    sys.exit(main())
