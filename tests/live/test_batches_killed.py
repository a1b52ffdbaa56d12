"""kill -9 of a server in the middle of a batch: the next one goes on, and each line has one answer."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill import write_model
from serving import Server
from test_batches import client_of, wait

NUM_LINES = 120
PATH = "/v1/completions"


def lines(tokens_each: int) -> list[dict[str, Any]]:
    rng = random.Random(4)
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
        for number in range(NUM_LINES)
    ]


@pytest.mark.timeout(300)
def test_a_batch_outlives_its_servers(tmp_path: Path) -> None:
    """Killed three times on the way, whole process group, it ends with the answers that an undisturbed batch gets, each
    once and in whole lines; and a server that is stopped in order leaves a batch that goes on too."""
    (tmp_path / "model").mkdir()
    model = str(write_model(tmp_path / "model"))
    args = ("--files-dir", str(tmp_path / "files"), "--max-num-seqs", "4", "--kv-cache-memory-bytes", "16MiB")
    given = b"".join(json.dumps(line).encode() + b"\n" for line in lines(60))
    identifier = ""
    counts = []
    for life in range(6):
        with Server(*args, "--served-model-name", "tiny", model=model) as server, client_of(server) as client:
            if not identifier:
                file = client.files.create(file=("in.jsonl", given), purpose="batch")
                identifier = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h").id
            if life < 4:
                before = client.batches.retrieve(identifier).request_counts.completed
                until = time.monotonic() + 60
                while client.batches.retrieve(identifier).request_counts.completed < min(before + 15, NUM_LINES):
                    assert time.monotonic() < until
                    time.sleep(0.01)
                counts.append(client.batches.retrieve(identifier).request_counts.completed)
                if life < 3:
                    os.killpg(server.process.pid, signal.SIGKILL)
                    server.process.wait()
                continue
            batch = wait(client, identifier, timeout_s=120)
            answers = client.files.content(batch.output_file_id).read()
            expected = {
                line["custom_id"]: json.loads(server.request("POST", PATH, line["body"])[1])["choices"][0]["text"]
                for line in lines(60)[::7]
            }
            break
    assert counts == sorted(counts) and counts[2] < NUM_LINES, f"the batch was over before the kills: {counts}"
    assert answers.endswith(b"\n") and batch.error_file_id is None
    told = [json.loads(line) for line in answers.splitlines()]
    assert sorted(each["custom_id"] for each in told) == sorted(line["custom_id"] for line in lines(1))
    assert batch.request_counts.completed == batch.request_counts.total == NUM_LINES
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in told}
    assert {name: texts[name] for name in expected} == expected
