"""KV tiers whose store is killed, stopped, emptied and damaged, under engines that are killed: the same tokens and log
probabilities as of one engine without tiers.

`TOKENMILL_SCHEDULES=N` runs so many random schedules; usually 20.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill
import kill_workers
import pytest
from serving import Server, wait_until

ARGS = ("--disable-access-log", "--max-queue-s", "120", "--kv-cache-memory-bytes", "512KiB", "--threads", "1")
"""Pools that hold a few of the prompts."""

LAYOUTS = {
    "host": ("--kv-host", "16MiB"),
    "host and disk": ("--kv-host", "16MiB", "--kv-disk", "{folder}:32MiB", "--kv-write", "write-back"),
    "two workers": ("--kv-host", "16MiB", "--kv-disk", "{folder}:32MiB", "--workers", "2"),
    "shared folder": ("--kv-host", "16MiB", "--kv-remote", "file://{folder}", "--kv-key-file", "{key}"),
    "selective": ("--kv-disk", "{folder}:20MiB", "--kv-write", "selective", "--kv-tier-policy", "lru"),
}
NUM_STREAMS = 4
NUM_SCHEDULES = int(os.environ.get("TOKENMILL_SCHEDULES", "20"))
DAMAGED = 200
"""Places that are changed at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(kill.write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    """Prompts that begin alike in families, and have the KV fetched that there is, however fast computing it is."""
    rng = random.Random(3)
    heads = [[rng.randrange(3, 250) for _ in range(400)] for _ in range(4)]
    made = []
    for seed in range(4 * NUM_STREAMS):
        head = heads[seed % len(heads)]
        prompt = head[: rng.randrange(150, 400)] + [rng.randrange(3, 250) for _ in range(rng.randrange(5, 60))]
        made.append(
            {
                "prompt": prompt, "max_tokens": rng.randrange(10, 60), "seed": seed, "temperature": 1,
                "ignore_eos": True, "stream": True, "logprobs": 1, "kv_transfer_params": {"do_remote_prefill": True},
            }
        )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def expected(model: str, asked: list[dict[str, Any]]) -> Iterator[list[kill_workers.Said]]:
    """What an engine says that has no tiers, and computes each prompt by itself."""
    plain = [{name: value for name, value in body.items() if name != "kv_transfer_params"} for body in asked]
    with Server(*ARGS, "--no-enable-prefix-caching", model=model) as server:
        answers = [kill_workers.ask(server, body) for body in plain]
    assert all(said and not error for said, _, error in answers)
    yield [said for said, _, _ in answers]


class Schedule:
    """What happens, one thing after another, at random moments."""

    def __init__(self, server: Server, folder: Path, rng: random.Random, counts: Counter[str]) -> None:
        self._server = server
        self._folder = folder
        self._rng = rng
        self._counts = counts

    def run(self, load: kill_workers.Load) -> None:
        for _ in range(self._rng.choice([2, 3, 4])):
            time.sleep(self._rng.uniform(0.05, 0.3))
            name = self._rng.choice(["kill_store", "stop_store", "kill_engine", "damage", "damage", "clear", "evict"])
            self._counts[name] += 1
            began_s = time.monotonic()
            getattr(self, f"_{name}")()
            wait_until(lambda began_s=began_s: load.has_got_on(began_s), "all streams get on")  # type: ignore[misc]

    def _store(self) -> int:
        wait_until(lambda: self._server._child("tokenmill.cli.kv_store") is not None, "the store")
        return self._server._child("tokenmill.cli.kv_store") or 0

    def _kill_store(self) -> None:
        before = self._store()
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self._store() != before, "another store")

    def _stop_store(self) -> None:
        pid = self._store()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._rng.uniform(0.05, 0.6))
        os.kill(pid, signal.SIGCONT)

    def _kill_engine(self) -> None:
        workers = kill_workers.workers(self._server)
        worker = self._rng.choice(list(workers.values()))
        if worker["pid"] is None or worker["state"] != "ready":
            return
        os.kill(int(worker["pid"]), signal.SIGKILL)

        def is_back() -> bool:
            now = kill_workers.workers(self._server)[worker["id"]]
            return now["state"] == "ready" and now["incarnation"] != worker["incarnation"]

        wait_until(is_back, "another life")

    def _damage(self) -> None:
        """Blocks in host memory and on disk, while they are read and written."""
        pid = self._store()
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        descriptors = Path(f"/proc/{pid}/fd")
        for link in descriptors.iterdir() if descriptors.exists() else ():
            try:
                if "memfd:tokenmill-kv" in os.readlink(link):
                    files.append(link)
            except OSError:
                continue
        objects = [path for path in files if "tokenmill-kv1" in path.parts]
        for path in [path for path in files if path not in objects]:
            with path.open("r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_blocks * 512
                for _ in range(DAMAGED if size > 1 << 16 else 0):
                    file.seek(self._rng.randrange(1 << 15, size))
                    file.write(self._rng.randbytes(self._rng.choice([1, 64, 4096])))
        self._damage_objects(objects)

    def _damage_objects(self, files: list[Path]) -> None:
        """Of a remote store: a byte is changed, the end is missing, one lies where another was."""
        for path in self._rng.sample(files, min(len(files), DAMAGED)):
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(path.read_bytes())
                how = self._rng.choice(["changed", "cut", "swapped"])
                if how == "changed" and data:
                    data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                elif how == "cut":
                    del data[self._rng.randrange(len(data) + 1) :]
                elif how == "swapped":
                    data = bytearray(self._rng.choice(files).read_bytes())
                path.write_bytes(data)

    def _clear(self) -> None:
        self._server.request("POST", "/admin/kv/clear", {})

    def _evict(self) -> None:
        self._server.request("POST", "/admin/kv/clear", {"tier": "host"})


@pytest.mark.sampled(1 / 3)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_happens_to_tiers_answers_are_those_without(
    layout: str, model: str, asked: list[dict[str, Any]], expected: list[kill_workers.Said], tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    key = tmp_path / "kv.key"
    key.touch(0o600)
    key.write_text("the key of these machines, which is long enough")
    args = [each.format(folder=tmp_path / "kv", key=key) for each in LAYOUTS[layout]]
    corrupt = fetched = 0.0
    with Server(*ARGS, *args, model=model) as server:
        for seed in range(list(LAYOUTS).index(layout), NUM_SCHEDULES, len(LAYOUTS)):
            with kill_workers.Load(server, asked, expected, NUM_STREAMS) as load:
                Schedule(server, tmp_path, random.Random(seed), counts).run(load)
            assert load.count.is_clean, f"schedule {seed}: {load.count}"
            counts["streams"] += load.count.num_streams
            corrupt = max(corrupt, server.metrics().get("tokenmill:kv_tier_corrupt_total", 0))
        fetched = server.metrics()["vllm:external_prefix_cache_hits_total"]
    print(json.dumps(counts), f"{fetched:.0f} tokens fetched, {corrupt:.0f} corrupt blocks seen")
    assert counts["streams"] >= NUM_STREAMS and fetched > 0, (counts, fetched)
