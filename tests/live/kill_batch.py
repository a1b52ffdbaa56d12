"""kill -9 of a server in the middle of a batch, again and again: each line has one answer, and is billed once.

    python tests/live/kill_batch.py [--lines 1000] [--kills 10] [--seed 0]

After each kill the next server goes on from the same folders. In the end the output has each line once, in whole lines,
with the answers that an undisturbed call gets; what is billed for the batch is the sum of what its answers tell.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill import write_model
from serving import Server
from test_batches import client_of, wait

PATH = "/v1/completions"


def lines(num_lines: int, tokens_each: int, seed: int = 4) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": PATH,
            "body": {
                "prompt": [rng.randrange(3, 250) for _ in range(20)],
                "max_tokens": tokens_each,
                "seed": number,
                "ignore_eos": True,
            },
        }
        for number in range(num_lines)
    ]


def run(folder: Path, num_lines: int, num_kills: int, *, tokens_each: int = 200, seed: int = 4) -> list[str]:
    """What is wrong. One server more is stopped in order before the last."""
    (folder / "model").mkdir()
    model = str(write_model(folder / "model"))
    args = (
        "--files-dir", str(folder / "files"), "--usage-dir", str(folder / "usage"), "--max-num-seqs", "4",
        "--kv-cache-memory-bytes", "16MiB", "--served-model-name", "tiny",
    )  # fmt: skip
    wanted = lines(num_lines, tokens_each, seed)
    given = b"".join(json.dumps(line).encode() + b"\n" for line in wanted)
    share = num_lines // (2 * num_kills + 2)
    rng = random.Random(seed)
    identifier = ""
    counts: list[int] = []
    for life in range(num_kills + 2):
        with Server(*args, model=model) as server, client_of(server) as client:
            if not identifier:
                file = client.files.create(file=("in.jsonl", given), purpose="batch")
                identifier = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h").id
            if life <= num_kills:
                before = client.batches.retrieve(identifier).request_counts.completed
                until = time.monotonic() + 60
                while client.batches.retrieve(identifier).request_counts.completed < min(before + share, num_lines):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                counts.append(client.batches.retrieve(identifier).request_counts.completed)
                if life < num_kills:
                    time.sleep(rng.uniform(0, 0.03))
                    os.killpg(server.process.pid, signal.SIGKILL)
                    server.process.wait()
                continue
            batch = wait(client, identifier, timeout_s=600)
            answers = client.files.content(batch.output_file_id).read()
            usage = json.loads(server.request("GET", "/v1/usage?limit=30")[1])
            expected = {
                line["custom_id"]: json.loads(server.request("POST", PATH, line["body"])[1])["choices"][0]["text"]
                for line in wanted[:: max(7, num_lines // 30)]
            }
    problems = []
    if not (counts == sorted(counts) and counts[num_kills - 1] < num_lines):
        problems.append(f"the batch was over before the kills: {counts}")
    if not answers.endswith(b"\n") or batch.error_file_id is not None:
        problems.append(f"the output does not end with a whole line, or there are errors: {batch}")
    told = [json.loads(line) for line in answers.splitlines()]
    if sorted(each["custom_id"] for each in told) != sorted(line["custom_id"] for line in wanted):
        problems.append(f"{len(told)} answers, not each line's once")
    if not batch.request_counts.completed == batch.request_counts.total == num_lines:
        problems.append(f"{batch.request_counts} of {num_lines}")
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in told}
    problems += [
        f"{name}: {texts.get(name)!r}, not {text!r}" for name, text in expected.items() if texts.get(name) != text
    ]
    results = [each for bucket in usage["data"] for each in bucket["results"]]
    for name, known in (
        ("num_model_requests", None),
        ("input_tokens", "prompt_tokens"),
        ("output_tokens", "completion_tokens"),
    ):
        owed = sum(1 if known is None else each["response"]["body"]["usage"][known] for each in told)
        found = sum(each[name] for each in results)
        problems += [] if found == owed else [f"{name}: {found} billed, {owed} told"]
    print(f"{num_lines} lines, {num_kills} kills after {counts} answers")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 of servers under a batch.")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        problems = run(Path(name), options.lines, options.kills, seed=options.seed)
    print("\n".join(problems) or "each line was answered once and billed once")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
