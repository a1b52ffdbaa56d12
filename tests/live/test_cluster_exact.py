"""One engine, three workers, prompts and answers apart, killed, stopped, drained, put into other pools: the same tokens
and log probabilities.

`TOKENMILL_SCHEDULES=N` runs so many random schedules of what happens to the workers; usually 20.
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

import kill
import kill_workers
import pytest
from serving import Server, wait_until

ARGS = ("--disable-access-log", "--max-queue-s", "120", "--kv-cache-memory-bytes", "64MiB", "--threads", "1")
LAYOUTS = (
    ("--workers", "3", "--migration", "on"),
    ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregation", "always", "--migration", "on"),
    ("--prefill-workers", "1", "--decode-workers", "2", "--disaggregation", "always", "--migration", "on"),
)
NUM_STREAMS = 4
STOPPED_S = 4.0
NUM_SCHEDULES = int(os.environ.get("TOKENMILL_SCHEDULES", "20"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(kill.write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def asked() -> list[dict[str, object]]:
    return kill_workers.bodies(random.Random(5), 3 * NUM_STREAMS, 120)


@pytest.fixture(scope="module")
def expected(model: str, asked: list[dict[str, object]]) -> Iterator[list[kill_workers.Said]]:
    """What one engine says, which nothing happens to."""
    with Server(*ARGS, model=model) as server:
        answers = [kill_workers.ask(server, body) for body in asked]
    assert all(said and not error for said, _, error in answers)
    yield [said for said, _, _ in answers]


class Schedule:
    """What happens to the workers of a server, one thing after another, at random moments."""

    def __init__(self, server: Server, rng: random.Random, counts: Counter[str]) -> None:
        self._server = server
        self._rng = rng
        self._counts = counts

    def run(self, load: kill_workers.Load) -> None:
        for _ in range(self._rng.choice([1, 2, 3])):
            time.sleep(self._rng.uniform(0.0, 0.4))
            name = self._rng.choice(["kill", "kill", "drain", "drain", "pool", "pool", "stop"])
            self._counts[name] += 1
            began_s = time.monotonic()
            getattr(self, f"_{name}")(self._pick())
            wait_until(lambda began_s=began_s: load.has_got_on(began_s), "all streams get on")

    def _pick(self) -> dict[str, object]:
        wait_until(lambda: all(each["state"] == "ready" for each in self._workers().values()), "all workers")
        return self._rng.choice(list(self._workers().values()))

    def _workers(self) -> dict[str, dict[str, object]]:
        return kill_workers.workers(self._server)

    def _kill(self, worker: dict[str, object]) -> None:
        os.kill(int(str(worker["pid"])), signal.SIGKILL)
        self._await_another(worker)

    def _stop(self, worker: dict[str, object]) -> None:
        """One that has work is missed and replaced; one that has none is not, and goes on."""
        os.kill(int(str(worker["pid"])), signal.SIGSTOP)
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s:
            if self._workers()[str(worker["id"])]["engine"] != worker["engine"]:
                self._await_another(worker)
                return
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):  # it may have been missed just now
            os.kill(int(str(worker["pid"])), signal.SIGCONT)

    def _drain(self, worker: dict[str, object]) -> None:
        status, answer = self._server.request("POST", f"/admin/workers/{worker['id']}/drain?restart=true", {})[:2]
        assert status in (200, 202), (status, answer)
        self._await_another(worker)

    def _pool(self, worker: dict[str, object]) -> None:
        pool = self._rng.choice(["prefill", "decode", "mixed"])
        status, answer = self._server.request("POST", f"/admin/workers/{worker['id']}/pool", {"pool": pool})[:2]
        assert status == 200, (status, answer)
        wait_until(lambda: self._workers()[str(worker["id"])]["pool"] == pool, "it is in the pool")

    def _await_another(self, worker: dict[str, object]) -> None:
        def is_back() -> bool:
            now = self._workers()[str(worker["id"])]
            return now["state"] == "ready" and now["incarnation"] != worker["incarnation"]

        wait_until(is_back, "another life")


@pytest.mark.sampled(1 / 3)
@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(LAYOUTS)), ids=["workers", "one and one", "one and two"])
def test_whatever_happens_to_workers_answers_are_those_of_one_engine(
    place: int, model: str, asked: list[dict[str, object]], expected: list[kill_workers.Said]
) -> None:
    counts: Counter[str] = Counter()
    with Server(*ARGS, *LAYOUTS[place], model=model) as server:
        for seed in range(place, NUM_SCHEDULES, len(LAYOUTS)):
            with kill_workers.Load(server, asked, expected, NUM_STREAMS) as load:
                Schedule(server, random.Random(seed), counts).run(load)
            assert load.count.is_clean, f"schedule {seed}: {load.count}"
            counts["streams"] += load.count.num_streams
        metrics = server.metrics()
        counts["resumed"] = int(metrics["tokenmill:requests_resumed_total"])
        moved = {name: value for name, value in metrics.items() if "move" in name and value}
    print(json.dumps(counts), moved)
    assert counts["streams"] >= NUM_STREAMS and (place == 0 or moved), (counts, moved)
