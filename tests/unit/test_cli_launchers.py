"""The process that keeps a worker running where a launcher has put it, and what it is started with."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest

from tokenmill.cli.launchers import child
from tokenmill.cli.launchers.child import FAILED, REFUSED_STATUS, WorkerChild
from tokenmill.cli.launchers.ray_workers import worker_command
from tokenmill.net.tcp import Credentials


class Refused:
    """A process that ends at once: what it was asked cannot be done."""

    pid = 1

    def __init__(self) -> None:
        self.stdout = io.StringIO("No such model.\n")

    def poll(self) -> int:
        return REFUSED_STATUS

    wait = poll


def test_where_no_process_can_be_made_another_is_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one says that it will never do."""
    tries: list[list[str]] = []

    def start(command: list[str], **_: Any) -> Refused:
        tries.append(command)
        if len(tries) == 1:
            raise BlockingIOError("no memory")
        return Refused()

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr(child, "FIRST_DELAY_S", 0.0)
    worker = WorkerChild(["model", "--connect=x:1"], {})
    deadline = time.monotonic() + 30
    while (status := worker.status())["state"] != FAILED:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(tries) == 2 and tries[0][-2:] == ["model", "--connect=x:1"]
    assert status["why"] == "No such model." and status["log"] == [
        "No process can be started now: no memory",
        "No such model.",
    ]


@pytest.mark.parametrize("switch", ["on", "off"])
def test_workers_elsewhere_have_the_front_ends_secret_and_switch_of_plugins(
    monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    """Their machines know nothing of its environment."""
    monkeypatch.setenv("TOKENMILL_PLUGINS", switch)
    env = worker_command("model", ["--threads=2"], Credentials(b"hush")).env
    assert env == {"TOKENMILL_WORKER_SECRET": "hush", "TOKENMILL_PLUGINS": switch}
