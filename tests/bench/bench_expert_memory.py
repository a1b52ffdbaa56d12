"""Weights beyond memory: what decoding and a prompt cost beside what the disk allows, and beside llama.cpp.

    python tests/bench/bench_expert_memory.py MODEL [--share N] [--new N] [--weights] [--llama-bin DIR] [--repeats N]

MODEL: a mixture of experts, of whose experts one in N (default 3) has room in memory; with --weights a dense model, of
whose layers one in N. Each repeat measures

    disk      bytes a second of the packed file, read past the system's cache
    memory    decoding and a prompt of 512 tokens with all weights in memory
    limited   the same with the room given, bytes read for a token, and the time in which the disk gives these

With --llama-bin, llama-bench decodes in a memory cgroup (version 1) whose limit is what ours holds at most: its
resident memory less that of shared files. It maps the file, so what does not fit is read again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

from tokenmill import LLM, SamplingParams

PIECE, READERS = 512 * 1024, 8
PROMPT = 512
CGROUP = Path("/sys/fs/cgroup/memory/tokenmill_bench")


def disk_speed(path: Path, least_bytes: int = 2**30) -> float:
    """Bytes a second, in pieces and by as many readers as the kernels have: processes of dd, each with its part."""
    count = os.path.getsize(path) // PIECE // READERS
    rounds = -(-least_bytes // (count * READERS * PIECE))
    part = f"bs={PIECE} count={count} iflag=direct status=none"
    loop = f"for i in $(seq {rounds}); do dd if={path} of=/dev/null skip=$0 {part}; done"
    began = time.perf_counter()
    readers = [subprocess.Popen(["sh", "-c", loop, str(first * count)]) for first in range(READERS)]
    assert not any([reader.wait() for reader in readers])
    return rounds * count * READERS * PIECE / (time.perf_counter() - began)


def anonymous_bytes() -> int:
    """Of this process, now."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


class Engine:
    """One model in this process."""

    def __init__(self, model: str, **how: Any) -> None:
        self.llm = LLM(model, max_model_len=2048, kv_cache_memory_bytes="256MiB", **how)
        self.vocab_size = self.llm.ready.vocab_size
        self._rng = random.Random(7)

    def reads(self) -> Any:
        return self.llm._runtime.engine.ops.weight_reads()

    def run(self, num_prompt: int, num_new: int) -> tuple[float, float, int, Any]:
        """Seconds to the first token, seconds a token from there, bytes read a token, and what was read."""
        prompt = [self._rng.randrange(10, self.vocab_size - 10) for _ in range(num_prompt)]
        # With a temperature: random weights that are asked for the best token repeat themselves.
        sampling = SamplingParams(temperature=1.0, seed=self._rng.randrange(2**31), max_tokens=num_new, ignore_eos=True)
        began, first, before, count = time.perf_counter(), 0.0, None, 0
        for piece in self.llm.stream(prompt, sampling):
            if count == 0:
                first, before = time.perf_counter(), self.reads()
            count += len(piece.tokens)
        ended, after = time.perf_counter(), self.reads()
        num_bytes = 0 if after is None else (after.bytes_read - before.bytes_read) // max(1, count - 1)
        return first - began, (ended - first) / max(1, count - 1), num_bytes, after


def measure(engine: Engine, num_new: int) -> dict[str, Any]:
    engine.run(16, num_new)  # memory has what it will have
    ttft_s, _, _, _ = engine.run(PROMPT, 1)
    engine.run(16, num_new // 2)
    _, token_s, num_bytes, reads = engine.run(16, num_new)
    return {
        "ttft_s": ttft_s,
        "token_s": token_s,
        "bytes": num_bytes,
        "reads": None if reads is None else reads._asdict(),
    }


def llama(folder: Path, model: str, limit: int, num_new: int, how: list[str]) -> float:
    """Seconds a token of llama-bench where it and the pages of the file that it maps have `limit` bytes."""
    CGROUP.mkdir(exist_ok=True)
    try:
        (CGROUP / "memory.limit_in_bytes").write_text(str(limit))
        command = [str(folder / "llama-bench"), "-m", model, "-p", "0", "-n", str(num_new), "-t", "2", "-r", "1", *how]

        def enter() -> None:
            (CGROUP / "cgroup.procs").write_text(str(os.getpid()))

        # The file leaves the system's cache first, where its pages count for whoever read them.
        with open(model, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        done = subprocess.run([*command, "-o", "json"], preexec_fn=enter, capture_output=True, text=True, check=True)
        return 1 / float(json.loads(done.stdout)[0]["avg_ts"])
    finally:
        CGROUP.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--share", type=float, default=3.0)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument(
        "--llama", default="--repack 0", help="its further options; repacked weights are no mapped ones"
    )
    parser.add_argument("--skip-memory", action="store_true")
    args = parser.parse_args()
    what = "weight_memory" if args.weights else "expert_memory"
    with Engine(args.model, **{what: "1TiB"}).llm as llm:  # packs
        ops: Any = llm._runtime.engine.ops
        room, path = ops.disk_memory_bytes[args.weights], ops._shelf._where.path
    limit = int(room / args.share)
    rows = []
    for _ in range(args.repeats):
        row: dict[str, Any] = {"packed": room, "room": limit, "disk": disk_speed(path)}
        if not args.skip_memory:
            engine = Engine(args.model)
            with engine.llm:
                row["memory"] = measure(engine, args.new)
        engine = Engine(args.model, **{what: str(limit)})
        with engine.llm:
            row["limited"] = measure(engine, args.new)
            row["anonymous"] = anonymous_bytes()
        row["disk_after"] = disk_speed(path)
        say(row)
        if args.llama_bin is not None:
            row["llama_s"] = llama(
                args.llama_bin, args.model, row["anonymous"], max(8, args.new // 4), args.llama.split()
            )
            print(f"llama.cpp in {row['anonymous'] / 2**20:.0f} MiB: {row['llama_s'] * 1e3:.1f} ms a token,", end=" ")
            print(f"{row['llama_s'] / row['limited']['token_s']:.2f} times ours")
        rows.append(row)
    if len(rows) > 1:
        print(f"median: {median(_bound(row) / row['limited']['token_s'] for row in rows):.2f} of the bound")


def _bound(row: dict[str, Any]) -> float:
    """Seconds in which the disk gives a token's bytes."""
    return float(row["limited"]["bytes"]) / (row["disk"] + row["disk_after"]) * 2


def say(row: dict[str, Any]) -> None:
    limited, memory = row["limited"], row.get("memory")
    print(json.dumps(row))
    print(f"disk {row['disk'] / 1e9:.2f}, {row['disk_after'] / 1e9:.2f} GB/s; room {row['room'] / 2**20:.0f} MiB")
    print(
        f"decode {limited['token_s'] * 1e3:.1f} ms a token, {limited['bytes'] / 1e6:.1f} MB read;"
        f" the disk needs {_bound(row) * 1e3:.1f} ms ({_bound(row) / limited['token_s']:.0%})"
    )
    if memory is not None:
        most = 2 * memory["ttft_s"] + row["packed"] / row["disk"]
        print(f"in memory {memory['token_s'] * 1e3:.1f} ms a token")
        print(f"prompt of {PROMPT}: {limited['ttft_s']:.2f} s; in memory {memory['ttft_s']:.2f} s, bar {most:.2f} s")


if __name__ == "__main__":
    main()
