"""kill -9 and SIGSTOP of random workers under a steady load of streams: what clients lose, and for how long they wait.

    python tests/live/kill_workers.py [--workers 3 --kills 100 --stops 20] [--model smollm2|tiny]
                                      [--prefill N --decode M] [flags of serve, such as --disaggregation always]

Each stream is asked for once undisturbed, and again and again while workers are killed and stopped. The next signal is
sent when the worker is back and each stream has got on: what is hit each time that it runs would be taken for a request
that kills engines. It prints

    tokens   that were lost, wrong or repeated against the undisturbed answer, by position, log probabilities included
    pause    gaps of GAP_S and more between two chunks of a stream in which a signal was sent (p50, p99, most)
    back     from the signal until the worker is ready again, in a new life
    noticed  from SIGSTOP until the worker is taken out
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kill
from serving import Server, wait_until

GAP_S = 0.03

Said = list[tuple[str, float]]
"""A token's text and log probability, by position."""


@dataclass
class Count:
    """Of all streams."""

    num_streams: int = 0
    num_tokens: int = 0
    failed: list[str] = field(default_factory=list)
    lost: int = 0
    wrong: int = 0
    repeated: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (when it began, seconds)

    @property
    def is_clean(self) -> bool:
        return not (self.failed or self.lost or self.wrong or self.repeated)

    def compare(self, found: Said, expected: Said) -> None:
        self.num_streams += 1
        self.num_tokens += len(found)
        self.lost += max(0, len(expected) - len(found))
        self.repeated += max(0, len(found) - len(expected))
        self.wrong += sum(one != other for one, other in zip(found, expected, strict=False))


def bodies(rng: random.Random, count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Streams of prompts short and long, which have a seed of their own."""
    made = []
    for seed in range(count):
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice([5, 60, 300]))]
        made.append(
            {
                "prompt": prompt, "max_tokens": rng.randrange(num_tokens // 2, num_tokens * 2), "seed": seed,
                "temperature": 1, "ignore_eos": True, "stream": True, "logprobs": 1,
            }
        )  # fmt: skip
    return made


def ask(
    server: Server, body: dict[str, Any], on_chunk: Callable[[float], None] = lambda now: None
) -> tuple[Said, list[tuple[float, float]], str]:
    """What the stream says, its gaps, and what went wrong."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    said: Said = []
    gaps: list[tuple[float, float]] = []
    last_s, is_done, error = 0.0, False, ""
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                is_done |= bool(data)
                continue
            part = json.loads(data)
            error = error or str(part.get("error") or "")
            now = time.monotonic()
            if last_s and now - last_s >= GAP_S:
                gaps.append((last_s, now - last_s))
            last_s = now
            on_chunk(now)
            for choice in part.get("choices", ()):
                logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
                said += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    except (OSError, http.client.HTTPException, ValueError) as failure:
        error = repr(failure)
    finally:
        connection.close()
    return said, gaps, error or ("" if is_done else "a stream ended without [DONE]")


class Load:
    """So many streams at once, each followed by another, until the block ends."""

    def __init__(self, server: Server, asked: list[dict[str, Any]], expected: list[Said], num_streams: int) -> None:
        self.count = Count()
        self._server = server
        self._asked = asked
        self._expected = expected
        self._is_over = threading.Event()
        self._chunk_s = [0.0] * num_streams
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_streams)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def has_got_on(self, since_s: float) -> bool:
        """Whether each stream has said something since then."""
        return all(chunk_s > since_s for chunk_s in self._chunk_s)

    def _note(self, number: int, now: float) -> None:
        self._chunk_s[number] = now

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over.is_set():
            index = rng.randrange(len(self._asked))
            said, gaps, error = ask(self._server, self._asked[index], partial(self._note, number))
            with self._lock:
                if error:
                    self.count.failed.append(error)
                self.count.compare(said, self._expected[index])
                self.count.gaps += gaps


def workers(server: Server) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]}


class Saboteur:
    """Sends a signal to a random worker that has work, and waits until it is back and all streams have got on."""

    def __init__(self, server: Server, rng: random.Random, load: Load) -> None:
        self.server = server
        self.rng = rng
        self.load = load
        self.signals: dict[float, int] = {}  # when -> which
        self.back_s: dict[int, list[float]] = {signal.SIGKILL: [], signal.SIGSTOP: []}
        self.noticed_s: list[float] = []

    def strike(self, number: int) -> None:
        time.sleep(self.rng.uniform(0.05, 0.5))
        wait_until(lambda: any(each["num_open"] for each in self._ready()), "a worker with work")
        busy = [each for each in self._ready() if each["num_open"]]
        worker = self.rng.choice(busy or self._ready())
        os.kill(worker["pid"], number)
        began_s = time.monotonic()
        self.signals[began_s] = number
        if number == signal.SIGSTOP:
            wait_until(lambda: self._now(worker)["engine"] != worker["engine"], "it is noticed")
            self.noticed_s.append(time.monotonic() - began_s)
        wait_until(
            lambda: self._now(worker)["state"] == "ready" and self._now(worker)["incarnation"] != worker["incarnation"],
            "its return",
        )
        self.back_s[number].append(time.monotonic() - began_s)
        wait_until(lambda: self.load.has_got_on(began_s), "all streams get on")

    def _now(self, worker: dict[str, Any]) -> dict[str, Any]:
        return workers(self.server)[worker["id"]]

    def _ready(self) -> list[dict[str, Any]]:
        return [each for each in workers(self.server).values() if each["state"] == "ready"]


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def spread(values: list[float]) -> str:
    return f"p50 {at(values, 0.5):.2f} s, p99 {at(values, 0.99):.2f} s, most {max(values, default=0):.2f} s"


def run(model: str, args: tuple[str, ...], *, num_kills: int, num_stops: int, num_streams: int, seed: int) -> Count:
    """Prints figures."""
    rng = random.Random(seed)
    asked = bodies(rng, 3 * num_streams, 120 if model != "smollm2" else 80)
    with tempfile.TemporaryDirectory() as name:
        path = model if model == "smollm2" else str(kill.write_model(Path(name)))
        with Server("--disable-access-log", "--max-queue-s", "120", *args, model=path) as server:
            wait_until(lambda: all(each["state"] == "ready" for each in workers(server).values()), "all workers")
            expected = []
            for body in asked:
                said, _, error = ask(server, body)
                assert said and not error, error
                expected.append(said)
            with Load(server, asked, expected, num_streams) as load:
                saboteur = Saboteur(server, rng, load)
                strikes = [signal.SIGKILL] * num_kills + [signal.SIGSTOP] * num_stops
                rng.shuffle(strikes)
                for number in strikes:
                    saboteur.strike(number)
            resumed = server.metrics()["tokenmill:requests_resumed_total"]
            alarms = server.output.count("gives no sign") + server.output.count("is taken out")
    count = load.count
    print(
        f"{num_kills} kills and {num_stops} stops under {num_streams} streams: {count.num_streams} streams,"
        f" {count.num_tokens} tokens, {resumed:.0f} resumed"
    )
    print(
        f"tokens   {count.lost} lost, {count.wrong} wrong, {count.repeated} repeated;"
        f" {len(count.failed)} streams failed {count.failed[:3] or ''}"
    )
    for name, kind in (("kill -9", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
        times = [at_s for at_s, number in saboteur.signals.items() if number == kind]
        hit = [length for began_s, length in count.gaps if any(0 <= at_s - began_s <= length for at_s in times)]
        if times:
            print(f"pause    {name}: {spread(hit)} ({len(hit)} gaps)")
            print(f"back     {name}: {spread(saboteur.back_s[kind])}")
    if num_stops:
        print(f"noticed  {spread(saboteur.noticed_s)}; {alarms - num_stops} false alarms")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 and SIGSTOP of workers under streams.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    args: tuple[str, ...] = ("--kv-cache-memory-bytes", "128MiB", "--threads", "1", *more)
    if options.prefill:
        args += ("--prefill-workers", str(options.prefill), "--decode-workers", str(options.decode))
    else:
        args += ("--workers", str(options.workers))
    count = run(
        options.model,
        args,
        num_kills=options.kills,
        num_stops=options.stops,
        num_streams=options.streams,
        seed=options.seed,
    )
    return not count.is_clean


if __name__ == "__main__":
    sys.exit(main())
