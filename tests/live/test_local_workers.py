"""Several engines of one machine, forked by a zygote: one copy of the weights, and no call that notices a kill."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kill
import pytest
from serving import Server, open_files, wait_until

SMALL = (*kill.ARGS, "--threads", "1", "--max-queue-s", "60")
BODIES = [body for body in kill.calls(random.Random(5), 600) if "stop_of" not in body]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kill.write_model(tmp_path_factory.mktemp("model"))


def lora(folder: Path) -> tuple[str, ...]:
    return ("--enable-lora", "--lora-modules", f"lora={folder / 'lora'}")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """What an engine alone says."""
    with Server(*SMALL, *lora(folder), model=str(folder)) as server:
        return answers(server)


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[Server]:
    with Server(*SMALL, *lora(folder), "--workers", "3", model=str(folder)) as server:
        wait_until(lambda: all_ready(server), "three engines")
        assert "3 mixed" in server.output and len(server.forked_pids()) == 3
        yield server


def answers(server: Server) -> list[str]:
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return [said.key() for said in pool.map(lambda body: kill.ask(server, body), BODIES)]


def weights(pid: int) -> tuple[int, int]:
    """(number, bytes by share) of mappings that hold read-only memory of no file and of the size of an arena's."""
    found, shared, is_one = 0, 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            begin, end = (int(part, 16) for part in words[0].split("-"))
            is_one = words[1] == "r--p" and len(words) == 5 and end - begin >= 64 * 2**20
            found += is_one
        elif is_one and words[0] == "Pss:":
            shared += int(words[1]) * 1024
    return found, shared


def test_engines_share_write_protected_weights(three: Server) -> None:
    zygote = three.zygote_pid
    assert zygote is not None and len(os.listdir(f"/proc/{zygote}/task")) == 1
    found = [weights(pid) for pid in (zygote, *three.forked_pids())]
    assert all(number for number, _ in found)
    alone = max(shared for _, shared in found)
    assert sum(shared for _, shared in found) <= 4.2 * alone, found


def test_a_kill_under_load_changes_no_answer(three: Server, expected: list[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(answers, three)
        for _ in range(3):
            before = three.forked_pids()
            os.kill(random.Random(len(before)).choice(before), signal.SIGKILL)
            wait_until(lambda before=before: len(set(three.forked_pids()) & set(before)) == 2, "its end")
            wait_until(lambda: len(three.forked_pids()) == 3, "another engine")
        assert asking.result() == expected
    assert answers(three) == expected


def workers(server: Server) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]}


def test_lives_leave_no_files_open(three: Server) -> None:
    zygote = three.zygote_pid
    assert zygote is not None
    found = []
    for _ in range(3):
        few = {"model": "tiny", "prompt": [5] * 9, "max_tokens": 2, "n": 6}
        assert three.request("POST", "/v1/completions", few)[0] == 200  # who has made a step is back at once
        for name, each in workers(three).items():
            os.kill(each["pid"], signal.SIGKILL)
            wait_until(lambda name=name, each=each: workers(three)[name]["pid"] not in (None, each["pid"]), "another")
        wait_until(lambda: all_ready(three), "three engines")
        found.append((open_files(three.process.pid), open_files(zygote)))
    assert found[-1][0] < found[0][0] + 6 and found[-1][1] == found[0][1], found  # six lives are between them


def all_ready(server: Server) -> bool:
    return {each["state"] for each in workers(server).values()} == {"ready"}


def test_all_engines_are_replaced_in_turn_while_calls_go_on(three: Server, expected: list[str]) -> None:
    """A rolling restart: each gets no more, finishes what it has, and another follows."""
    wait_until(lambda: all_ready(three), "three engines")
    before = workers(three)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(answers, three)
        for name in before:
            status, body = three.request("POST", f"/admin/workers/{name}/drain?restart=true")
            assert status == 202 and json.loads(body)["state"] in ("draining", "lost"), body
            wait_until(lambda name=name: workers(three)[name]["pid"] not in (None, before[name]["pid"]), "another")
        assert asking.result() == expected
    after = workers(three)
    assert {each["state"] for each in after.values()} == {"ready"}
    assert not {each["incarnation"] for each in after.values()} & {each["incarnation"] for each in before.values()}
    assert "was to end" not in three.output


def test_an_engine_serves_in_another_pool_and_its_next_life_too(three: Server) -> None:
    assert three.request("POST", "/admin/workers/w1/pool", {"pool": "spare"})[0] == 200
    found = workers(three)
    assert [each["pool"] for each in found.values()] == ["mixed", "spare", "mixed"]
    os.kill(found["w1"]["pid"], signal.SIGKILL)
    wait_until(lambda: workers(three)["w1"]["pid"] not in (None, found["w1"]["pid"]), "another life")
    assert workers(three)["w1"]["pool"] == "spare"
    assert three.request("POST", "/admin/workers/w1/pool", {"pool": "mixed"})[0] == 200


def test_a_zygote_is_replaced_while_its_engines_serve(three: Server, expected: list[str]) -> None:
    zygote, engines = three.zygote_pid, three.forked_pids()
    assert zygote is not None
    os.kill(zygote, signal.SIGKILL)
    assert answers(three) == expected
    wait_until(lambda: three.zygote_pid not in (None, zygote), "another zygote")
    assert three.forked_pids() == [], "engines outlive their zygote, and only those that end are forked again"
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(three.forked_pids()) == 3, "engines of the new zygote")
    assert answers(three) == expected


def test_ends_that_a_zygote_never_told_are_heard_of(three: Server, expected: list[str]) -> None:
    """It was stopped when its engines ended, and dies so: nobody waits for what it would have told."""
    zygote, engines = three.zygote_pid, three.forked_pids()
    assert zygote is not None and len(engines) == 3
    os.kill(zygote, signal.SIGSTOP)
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(has_ended(pid) for pid in engines), "the ends of the engines")
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: three.zygote_pid != zygote and len(three.forked_pids()) == 3, "engines of another zygote")
    assert answers(three) == expected


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_an_engine_leaves_for_good(three: Server, expected: list[str]) -> None:
    assert three.request("POST", "/admin/workers/w2/drain")[0] == 202
    wait_until(lambda: list(workers(three)) == ["w0", "w1"], "its end")
    assert answers(three) == expected and len(three.forked_pids()) == 2


@pytest.mark.parametrize("workers", [(), ("--workers", "2")])
def test_a_model_that_cannot_be_loaded_is_one_line(folder: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    for file in folder.glob("*.json"):
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace('"hidden_size": 64', '"hidden_size": 96'))
    shutil.copy(folder / "model.safetensors", tmp_path)
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(tmp_path), "--port", "0", *workers]
    env = {**os.environ, "TOKENMILL_STATE": str(tmp_path / "state")}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.count("\n") == 1 and "misshaped" in ended.stderr, ended.stderr


def test_nothing_outlives_the_server(folder: Path) -> None:
    with Server(*SMALL, "--prefill-workers", "1", "--decode-workers", "1", model=str(folder)) as server:
        assert "1 prefill, 1 decode" in server.output
        wait_until(lambda: len(server.forked_pids()) == 2, "two engines")
        pids = server.pids()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "their end")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
