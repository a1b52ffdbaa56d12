"""What a link costs, and how soon a stopped engine is noticed.

    python tests/bench/bench_links.py                     one worker over TCP beside the front end's own engine
    python tests/bench/bench_links.py --baseline DIR      the same, and an engine of another checkout (DIR/src)
    python tests/bench/bench_links.py --stops 20          SIGSTOP of one of two workers under streams

Servers take turns, so that a drift of the machine meets all alike. Throughput: tokens a second of streams that run at
once. TTFT: of short prompts one after the other, seen by a client. Both as medians of rounds, with the spread.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from front_ends import SECRET, Worker, front_end
from kill import ask, write_model
from serving import Server, wait_until

from ports import free_port

ENGINE = ("--kv-cache-memory-bytes", "256MiB", "--max-model-len", "2048")


def first_token_s(server: Server, number: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.connect()
    body = {"prompt": f"Number {number}:", "max_tokens": 4, "stream": True, "ignore_eos": True, "seed": 1}
    started_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.readline()
    took_s = time.perf_counter() - started_s
    response.read()
    connection.close()
    return took_s


def tokens_a_second(server: Server, num_streams: int, max_tokens: int) -> float:
    def call(number: int) -> int:
        body = {"prompt": f"Story {number}:", "max_tokens": max_tokens, "ignore_eos": True, "seed": number}
        status, text = server.request("POST", "/v1/completions", body, timeout_s=300)
        assert status == 200, text
        return int(json.loads(text)["usage"]["completion_tokens"])

    started_s = time.perf_counter()
    with ThreadPoolExecutor(num_streams) as pool:
        num_tokens = sum(pool.map(call, range(num_streams)))
    return num_tokens / (time.perf_counter() - started_s)


def compare(args: argparse.Namespace) -> None:
    with contextlib.ExitStack() as held:
        servers: dict[str, Server] = {}
        if args.baseline:
            env = {"PYTHONPATH": f"{args.baseline}/src"}
            servers["baseline"] = held.enter_context(Server(*ENGINE, model=args.model, env=env))
        servers["own engine"] = held.enter_context(Server(*ENGINE, model=args.model))
        port = free_port()
        flags = ("--no-engine", "--listen-workers", f"127.0.0.1:{port}", "--max-model-len", "2048")
        held.enter_context(Worker(args.model, port, args=ENGINE, kv=()))
        servers["worker over TCP"] = server = held.enter_context(Server(*flags, model=args.model, env=SECRET))
        wait_until(lambda: server.request("GET", "/health")[0] == 200, "the worker")
        rates: dict[str, list[float]] = {name: [] for name in servers}
        firsts: dict[str, list[float]] = {name: [] for name in servers}
        for round_ in range(args.rounds + 1):
            for name, each in servers.items():
                first = [first_token_s(each, number) for number in range(20)]
                rate = tokens_a_second(each, args.streams, args.tokens)
                if round_:  # the first warms up
                    rates[name].append(rate)
                    firsts[name] += first
    base_rate, base_first = (statistics.median(found[next(iter(servers))]) for found in (rates, firsts))
    for name in servers:
        rate, first = statistics.median(rates[name]), statistics.median(firsts[name])
        few = statistics.quantiles(firsts[name], n=10)[0]
        print(
            f"{name:16} {rate:8.1f} tokens/s ({min(rates[name]):.1f} to {max(rates[name]):.1f}), "
            f"{100 * (rate / base_rate - 1):+.1f} %   TTFT {1e3 * first:6.2f} ms, {1e3 * (first - base_first):+.2f}; "
            f"first decile {1e3 * few:.2f} ms"
        )


def busy(server: Server) -> list[int]:
    """Processes of workers that have work."""
    workers = json.loads(server.request("GET", "/admin/workers")[1])["workers"]
    return [each["pid"] for each in workers if each.get("num_open")]


def stop(args: argparse.Namespace) -> None:
    """How long after SIGSTOP the front end takes a worker out."""
    rng, noticed_s = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as name:
        model, port = str(write_model(Path(name))), free_port()
        with Worker(model, port), Worker(model, port), front_end(model, port) as server:
            wait_until(lambda: server.output.count("has joined") == 2, "both workers")
            bodies: list[dict[str, Any]] = [
                {"model": "tiny", "prompt": [number + 3] * 50, "max_tokens": 2500, "seed": number, "ignore_eos": True,
                 "stream": True}
                for number in range(args.streams)
            ]  # fmt: skip
            with ThreadPoolExecutor(args.streams) as pool:
                expected = [said.key() for said in pool.map(lambda body: ask(server, body), bodies)]
                for number in range(args.stops):
                    asked = pool.map(lambda body: ask(server, body), bodies)
                    time.sleep(rng.uniform(0.3, 1.0))
                    before = server.output.count("taken out")
                    victim = rng.choice(busy(server))
                    os.kill(victim, signal.SIGSTOP)
                    started_s = time.perf_counter()
                    wait_until(lambda before=before: server.output.count("taken out") > before, "the notice")
                    noticed_s.append(time.perf_counter() - started_s)
                    os.kill(victim, signal.SIGCONT)
                    assert [said.key() for said in asked] == expected, "an answer has changed"
                    wait_until(lambda number=number: server.output.count("has joined") >= 3 + number, "its return")
    noticed_s.sort()
    shown = " ".join([f"{each:.2f}" for each in noticed_s])
    print(f"{len(noticed_s)} stops: noticed after {statistics.median(noticed_s):.2f} s ({shown})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--baseline", help="another checkout, with its native library built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (stop if args.stops else compare)(args)


if __name__ == "__main__":
    main()
