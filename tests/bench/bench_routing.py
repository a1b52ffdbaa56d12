"""Policies of routing, live: the conversations of a trace, made smaller, on one server with several workers.

    python tests/bench/bench_routing.py TRACE.jsonl[.gz] [--workers 3] [--requests 90] [--rate 2]

Of the trace's conversations the first with three turns or more are taken; every 512 tokens of a prompt become 48.
Requests come at `--rate` a second on average, in the trace's order, by gaps that are the same for each policy; each
policy has a fresh server. Printed: the time to the first token, and how much of the prompts was cached.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import statistics
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))
from serving import Server

TOKENS = 48
OF_TRACE = 512
MOST = 1500
FIRST_ID, NUM_IDS = 1000, 40000


class Job(NamedTuple):
    at_s: float
    prompt: list[int]
    num_output: int


def read(path: str, num_requests: int, rate: float) -> list[Job]:
    with gzip.open(path, "rt") if path.endswith(".gz") else open(path) as file:
        rows = [json.loads(line) for line, _ in zip(file, range(4 * MOST), strict=False)]
    turns = Counter(row["hash_ids"][1] for row in rows if len(row["hash_ids"]) > 1)
    rows = [row for row in rows if len(row["hash_ids"]) > 1 and turns[row["hash_ids"][1]] >= 3]
    rows = [row for row in rows if row["input_length"] * TOKENS // OF_TRACE <= MOST]
    chosen, num_rows = set(), 0
    for first in dict.fromkeys(row["hash_ids"][1] for row in rows):
        if num_rows < num_requests:
            chosen.add(first)
            num_rows += sum(row["hash_ids"][1] == first for row in rows)
    rows = [row for row in rows if row["hash_ids"][1] in chosen]
    random, at_s, jobs = Random(1), 0.0, []
    for row in rows:
        prompt = [token for each in row["hash_ids"] for token in Random(each).choices(range(NUM_IDS), k=TOKENS)]
        prompt = [FIRST_ID + token for token in prompt[: max(2, row["input_length"] * TOKENS // OF_TRACE)]]
        if len(jobs) < num_requests:
            at_s += random.expovariate(rate)
            jobs.append(Job(at_s, prompt, min(32, max(2, row["output_length"] // 16))))
    return jobs


def serve(jobs: list[Job], policy: str, args: argparse.Namespace) -> tuple[list[float], int]:
    ttfts: list[float] = []
    cached: list[int] = []

    def ask(port: int, job: Job) -> None:
        body = {
            "prompt": job.prompt, "max_tokens": job.num_output, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        began_s, ttft_s = time.perf_counter(), -1.0
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: {"):
                if ttft_s < 0:
                    ttft_s = time.perf_counter() - began_s
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        connection.close()
        ttfts.append(ttft_s)

    options = ("--workers", str(args.workers), "--routing-policy", policy, "--kv-cache-memory-bytes", "256MiB")
    with Server(*options, "--max-queue-s", "0", "--disable-access-log", model=args.model) as server:
        for tokens in ([7] * 300, [8] * 600, [9] * 300):  # costs are measured
            ask(server.port, Job(0.0, tokens, 8))
        ttfts.clear()
        cached.clear()
        threads = []
        began_s = time.perf_counter()
        for job in jobs:
            time.sleep(max(0.0, began_s + job.at_s - time.perf_counter()))
            threads.append(threading.Thread(target=ask, args=(server.port, job)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert len(ttfts) == len(jobs), "some requests failed"
    return ttfts, sum(cached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--requests", type=int, default=90)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--policies", default="least_load,prefix_affinity,kv_aware")
    args = parser.parse_args()
    jobs = read(args.trace, args.requests, args.rate)
    num_tokens = sum(len(job.prompt) for job in jobs)
    print(f"{len(jobs)} requests in {jobs[-1].at_s:.0f} s, {num_tokens / len(jobs):.0f} tokens each")
    for policy in args.policies.split(","):
        ttfts, num_cached = serve(jobs, policy, args)
        p90 = sorted(ttfts)[int(0.9 * len(ttfts))]
        print(
            f"{policy:16} TTFT mean {1e3 * statistics.fmean(ttfts):7.0f} ms, median "
            f"{1e3 * statistics.median(ttfts):6.0f}, p90 {1e3 * p90:7.0f}; cached {num_cached / num_tokens:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
