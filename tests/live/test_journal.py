"""What a live engine did, told again: `serve --journal` and `python -m tokenmill.sim.run --replay`."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import Server, wait_until


def replay(path: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "tokenmill.sim.run", "--replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_the_journals_of_a_killed_engine_and_of_the_next_replay_equal(smollm2, tmp_path):
    """Calls side by side, with shared prefixes, penalties and logprobs; then a kill -9; then another life."""
    path = tmp_path / "journal"
    with Server("--kv-cache-memory-bytes", "200MiB", "--journal", str(path)) as server:

        def complete(number: int) -> int:
            body = {
                "model": "smollm2",
                "prompt": "Once upon a time, " * 9 + "x" * number,
                "max_tokens": 10 + number,
                "seed": number,
                "n": 1 + number % 2,
                "logprobs": number % 3,
                "presence_penalty": number % 2,
            }
            return server.request("POST", "/v1/completions", body)[0]

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(complete, range(6))) == [200] * 6
        first = server.engine_pid
        assert first is not None
        wait_until(lambda: path.read_bytes().count(b"Committed") > 12, "the file")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.engine_pid not in (None, first), "the next engine")
        wait_until(lambda: server.request("GET", "/health")[0] == 200, "the engine's return")
        assert complete(1) == 200
        assert "all prompts and answers" in server.output
    for each in (path, tmp_path / "journal.1"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
        code, said = replay(each)
        assert code == 0 and "are planned as recorded" in said, said
    # The same story under another budget of tokens.
    other = tmp_path / "other"
    lines = (tmp_path / "journal.1").read_text().splitlines(keepends=True)
    assert '"max_num_batched_tokens"' in lines[0]
    budget = lines[0].split('"max_num_batched_tokens":')[1].split(",")[0]
    lines[0] = lines[0].replace(f'"max_num_batched_tokens":{budget}', '"max_num_batched_tokens":64')
    other.write_text("".join(lines))
    code, said = replay(other)
    assert code == 1 and "differs from the recorded one" in said, said
