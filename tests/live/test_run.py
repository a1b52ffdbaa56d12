"""`tokenmill run` with real servers: it starts one, finds it again, and leaves it to end by itself."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill import write_model

from commands import run_command
from scripted import EOS, SPECIAL
from tokenmill.cli.servers import Served, file_of, running
from tokenmill.node.process import process_start

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PATIENCE_S = 120


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, and with a state of its own; no server is left."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    config = {"eos_token": SPECIAL[EOS], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENMILL_STATE", str(tmp_path_factory.mktemp("state")))
        yield folder
        assert run_command("stop", "--all").returncode == 0


def typed(*words: str, piped: str = "") -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(piped))
        return run_command(*words)


def the_one() -> Served:
    (served,) = running()
    return served


def until_gone(served: Served) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while process_start(served.pid) == served.started:
        assert time.monotonic() < until_s, "the server did not end"
        time.sleep(0.05)


def test_a_model_is_talked_with_by_its_name_and_its_server_stays_a_while(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a service of systemd calls it, the server tells nothing in that service's name."""
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    ask = ("run", str(place), "--temperature", "0", "-n", "8")
    first = typed(*ask, "hello", "world")
    assert first.returncode == 0, first.stderr
    served = the_one()
    again = typed(*ask, piped="hello world\n")
    assert again.stdout == first.stdout and first.stdout.strip()
    assert "tokens" in typed(*ask, "hello", "--verbose", "--system", "hello").stderr
    assert the_one() == served and served.exit_idle_s == 300 and served.models == (place.name,)
    chat = typed("chat", served.address, *ask[2:], piped="hello world\n/bye\n").stdout
    assert chat.split("\n", 1)[1] == first.stdout
    listed = run_command("ps").stdout
    assert served.address in listed and " ready " in listed
    assert run_command("stop", place.name).stdout == f"stopped {place.name} at {served.address}\n"
    assert not running() and not file_of(served.pid).exists()
    with told, pytest.raises(BlockingIOError):
        told.recv(100, socket.MSG_DONTWAIT)


def test_a_server_that_nobody_uses_ends_by_itself(place: Path) -> None:
    assert typed("run", str(place), "hello", "-n", "2", "--keepalive", "1s").returncode == 0
    for served in running():
        assert served.exit_idle_s == 1
        until_gone(served)
    assert not running() and (file_of(0).parent / f"{place.name}.log").read_text().count("no call for 1 s") == 1


def test_what_cannot_start_says_why_in_one_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for words, says in (
        (("run", "nope", "hello"), "no model called 'nope'"),
        (("run", str(tmp_path), "hello"), "did not start: "),
        (("run", str(place)), "There is no prompt"),
        (("run", str(place), "x", "--format", "yaml"), "--format must be json"),
    ):
        ended = typed(*words)
        assert ended.returncode == 2 and says in ended.stderr and ended.stderr.count("\n") == 1, ended.stderr
    assert not running()
