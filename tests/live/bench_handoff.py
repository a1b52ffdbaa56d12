"""What it costs that one engine computes a prompt and another draws the answer: the time to the second token.

By hand: `python tests/live/bench_handoff.py [--tokens N] [--rounds N]`.

Two servers run one after the other, with the same engines: one in which every request is handed over after its first
token, one in which none is. Both see the same prompts of random words, which nothing has cached, one at a time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from serving import Server

ENGINES = ("--prefill-workers", "1", "--decode-workers", "1", "--kv-cache-memory-bytes", "256MiB")


def times(server: Server, prompt: list[int], max_tokens: int) -> list[float]:
    """Seconds from the call to each token."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--kv-transfer", choices=("memory", "tcp"), default="memory")
    options = parser.parse_args()
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
            + f"; largest gap {1e3 * max(gaps):.1f}"
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
