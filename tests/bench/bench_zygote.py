"""What it costs and saves that a zygote forks engines: memory of weights, speed of one stream, time until one is back.

    python tests/bench/bench_zygote.py [--model smollm2] [--rounds 5] [--kills 5] [--only memory|speed|return]

memory  the share (PSS) that two engines and their zygote have of the mappings in which weights lie, against those of an
        engine that loaded for itself; and how much of them is in huge pages
speed   tokens a second of one stream: a forked engine against one that loaded for itself, on the same threads, asked in
        turns while the other is idle
return  from kill -9 until /admin/workers shows another life as ready
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from serving import Server, wait_until

ARENA_BYTES = 64 * 2**20
KV = ("--kv-cache-memory-bytes", "256MiB")


def arenas(pid: int, access: str) -> dict[str, int]:
    """Sums over mappings without a file, of an arena's size and with this access: bytes by the words of smaps."""
    sums = dict.fromkeys(("Rss", "Pss", "AnonHugePages"), 0)
    is_one = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            is_one = words[1] == access and len(words) == 5 and end - begin >= ARENA_BYTES
        elif is_one and words[0][:-1] in sums:
            sums[words[0][:-1]] += int(words[1]) * 1024
    return sums


def workers(server: Server) -> dict[str, dict[str, object]]:
    return {each["id"]: each for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]}


def memory(model: str) -> None:
    with Server(*KV, "--workers", "2", model=model) as server:
        wait_until(lambda: all(each["state"] == "ready" for each in workers(server).values()), "two engines")
        zygote = server.zygote_pid
        assert zygote is not None
        server.request("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 8, "n": 4})
        own, forked = arenas(zygote, "r--p"), [arenas(pid, "r--p") for pid in server.forked_pids()]
    one = own["Rss"]
    engines = sum(each["Pss"] for each in forked)
    print(
        f"memory  weights of one: {one / 2**20:.1f} MiB; PSS of two engines {engines / 2**20:.1f} MiB,"
        f" with the zygote's {(engines + own['Pss']) / 2**20:.1f} MiB: {(engines + own['Pss']) / one:.3f} of one;"
        f" huge pages {min(each['AnonHugePages'] for each in forked) / one:.0%}"
    )


def stream_s(server: Server, num_tokens: int) -> float:
    """Seconds for so many tokens after a warm prompt."""
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    began_s = time.monotonic()
    status, text = server.request("POST", "/v1/completions", body)
    assert status == 200, text
    return time.monotonic() - began_s


def speed(model: str, rounds: int, num_tokens: int) -> None:
    threads = ("--threads", str(os.cpu_count() or 1))
    with Server(*KV, *threads, model=model) as own, Server(*KV, *threads, "--workers", "1", model=model) as forked:
        took: dict[str, list[float]] = {"own": [], "forked": []}
        for index in range(rounds + 1):
            order = [("own", own), ("forked", forked)]
            for name, server in order if index % 2 else order[::-1]:
                taken = stream_s(server, num_tokens)
                if index:  # the first warms up
                    took[name].append(taken)
    ratios = sorted(mine / other for mine, other in zip(took["forked"], took["own"], strict=True))
    rates = {name: num_tokens / statistics.median(values) for name, values in took.items()}
    print(
        f"speed   one stream: own weights {rates['own']:.1f} tokens/s, forked {rates['forked']:.1f};"
        f" time forked / own: median {statistics.median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f},"
        f" {rounds} rounds)"
    )


def returns(model: str, kills: int) -> None:
    took = []
    with Server(*KV, "--workers", "2", model=model) as server:
        wait_until(lambda: all(each["state"] == "ready" for each in workers(server).values()), "two engines")
        for index in range(kills):
            name = f"w{index % 2}"
            before = workers(server)[name]
            stream_s(server, 4)
            os.kill(int(str(before["pid"])), signal.SIGKILL)
            began_s = time.monotonic()
            wait_until(
                lambda name=name, before=before: (
                    workers(server)[name]["state"] == "ready"
                    and workers(server)[name]["incarnation"] != before["incarnation"]
                ),
                "another life",
            )
            took.append(time.monotonic() - began_s)
    print(f"return  median {statistics.median(took):.2f} s, most {max(took):.2f} s ({kills} kills)")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a zygote costs and saves.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", choices=("memory", "speed", "return"))
    options = parser.parse_args()
    if options.only in (None, "memory"):
        memory(options.model)
    if options.only in (None, "return"):
        returns(options.model, options.kills)
    if options.only in (None, "speed"):
        speed(options.model, options.rounds, options.tokens)


if __name__ == "__main__":
    main()
