"""A killed engine costs its clients a pause, and nothing else; a request that kills engines costs others no more.

`python tests/live/kill.py --kills 20` does the same at length.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kill
import pytest
from serving import Server

from tokenmill.cli.engine_process import CRASH

POISON = 666


@pytest.mark.sampled(1 / 3)
def test_calls_of_every_kind_outlive_kills_bit_for_bit() -> None:
    assert not kill.run(num_kills=2, seed=1, max_tokens=400)


@pytest.mark.sampled(1 / 3)
def test_a_request_that_ends_engines_ends_with_its_own_error_and_nobody_elses(tmp_path: Path) -> None:
    folder = kill.write_model(tmp_path)
    lora = ("--enable-lora", "--lora-modules", f"lora={folder / 'lora'}")
    with Server(*kill.ARGS, *lora, "--max-queue-s", "60", model=str(folder), env={CRASH: str(POISON)}) as server:
        bodies = [body for body in kill.calls(random.Random(3), 1000) if "stop_of" not in body][:6]
        expected = [kill.ask(server, body).key() for body in bodies]
        with ThreadPoolExecutor(len(bodies) + 2) as pool:
            asking = [pool.submit(kill.ask, server, body) for body in bodies]
            time.sleep(0.1)
            poison = pool.submit(kill.ask, server, {**bodies[0], "seed": POISON, "stream": False})
            said = poison.result()
            assert said.status == 500 and "given up" in said.error["message"]
            assert [each.result().key() for each in asking] == expected
        metrics = server.metrics()
        assert metrics["tokenmill:requests_poisoned_total"] == 1
        assert 3 <= metrics["tokenmill:engine_losses_total"] <= 5
        assert kill.ask(server, bodies[0]).key() == expected[0]
