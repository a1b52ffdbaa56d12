"""What it costs that one engine computes a prompt and another draws the answer: the time to the second token.

By hand: `python tests/bench/bench_handoff.py [--tokens N] [--rounds N] [--kv-transfer tcp]`; with --moves, the longest
pause of streams whose worker is drained.

Two servers run one after the other, with the same engines: one in which every request is handed over after its first
token, one in which none is. Both see the same prompts of random words, which nothing has cached, one at a time.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from serving import Server

ENGINES = ("--prefill-workers", "1", "--decode-workers", "1", "--kv-cache-memory-bytes", "256MiB")


def times(
    server: Server, prompt: list[int], max_tokens: int, hear: Callable[[int], None] = lambda number: None
) -> list[float]:
    """Seconds from the call to each token; `hear` is told the number of each."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    found = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            assert b'"error"' not in line, line
            found.append(time.perf_counter() - began_s)
            hear(len(found))
    connection.close()
    return found


def measure(extra: tuple[str, ...], prompts: list[list[int]], max_tokens: int) -> tuple[list[list[float]], str]:
    with Server(*ENGINES, *extra) as server:
        for prompt in prompts[:2]:
            times(server, prompt[::-1], 4)
        found = [times(server, prompt, max_tokens) for prompt in prompts]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        connection.close()
        return found, metrics


def measure_moves(kv_transfer: str, num_tokens: int, rounds: int) -> None:
    """The largest gap of a stream after its worker was told to drain, beside the median gap before."""
    rng = random.Random(1)
    pauses, steps = [], []
    with Server("--workers", "2", "--kv-cache-memory-bytes", "256MiB", "--kv-transfer", kv_transfer) as server:
        for _ in range(rounds):
            prompt = [rng.randrange(100, 40000) for _ in range(num_tokens)]
            drained: list[threading.Thread] = []

            def drain(number: int, drained: list[threading.Thread] = drained) -> None:
                if number == 40:
                    workers = json.loads(server.request("GET", "/admin/workers")[1])["workers"]
                    name = next(worker["id"] for worker in workers if worker["num_running"])
                    path = f"/admin/workers/{name}/drain?restart=true"
                    drained.append(threading.Thread(target=server.request, args=("POST", path)))
                    drained[0].start()

            found = times(server, prompt, 120, drain)
            drained[0].join()
            gaps = [later - sooner for sooner, later in itertools.pairwise(found)]
            steps.append(statistics.median(gaps[:40]))
            pauses.append(max(gaps[39:]))
            deadline_s = time.monotonic() + 30
            while time.monotonic() < deadline_s:
                workers = json.loads(server.request("GET", "/admin/workers")[1])["workers"]
                if sum(worker["state"] == "ready" for worker in workers) == 2:
                    break
                time.sleep(0.1)
        moved = [line for line in server.request("GET", "/metrics")[1].splitlines() if "moved_kv_tokens_total{" in line]
    print(
        f"moves at {num_tokens} tokens ({kv_transfer}): pauses in ms "
        f"{', '.join(f'{1e3 * each:.1f}' for each in pauses)}; a step {1e3 * statistics.median(steps):.1f}; "
        + " ".join(moved)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--kv-transfer", choices=("memory", "tcp"), default="memory")
    parser.add_argument("--moves", action="store_true", help="measure streams that move while they run instead")
    options = parser.parse_args()
    if options.moves:
        measure_moves(options.kv_transfer, options.tokens, options.rounds)
        return
    rng = random.Random(0)
    prompts = [[rng.randrange(100, 40000) for _ in range(options.tokens)] for _ in range(options.rounds)]
    gap_s = {}
    for how in ("never", "always"):
        found, metrics = measure(("--disaggregation", how, "--kv-transfer", options.kv_transfer), prompts, 8)
        first, second = ([each[place] for each in found] for place in (0, 1))
        gaps = [each[1] - each[0] for each in found]
        steps = [(each[-1] - each[2]) / (len(each) - 3) for each in found]
        gap_s[how] = statistics.median(gaps)
        print(
            f"{how:>7}: medians of {len(found)} in ms: "
            + ", ".join(
                f"{name} {1e3 * statistics.median(values):.1f}"
                for name, values in (("first", first), ("second", second), ("gap", gaps), ("step", steps))
            )
            + f"; gaps {1e3 * min(gaps):.1f} to {1e3 * max(gaps):.1f}"
        )
        for line in metrics.splitlines():
            if line.startswith(
                ("tokenmill:moves_total", "tokenmill:moved_kv_tokens_total", "tokenmill:move_pause_seconds_sum")
            ):
                print("   ", line)
    added_ms = 1e3 * (gap_s["always"] - gap_s["never"])
    print(f"a hand-over of {options.tokens} tokens ({options.kv_transfer}) adds {added_ms:.1f} ms to the second token")


if __name__ == "__main__":
    main()
