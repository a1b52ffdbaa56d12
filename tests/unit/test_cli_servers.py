"""Which servers `ps` lists and `stop` ends: those whose process lives, known by more than its id."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import run_command
from ports import free_port
from tokenmill.cli import servers
from tokenmill.cli.keys import keep_alive
from tokenmill.cli.servers import Registration, Served, file_of, named, running, told_time, wait_idle
from tokenmill.core.errors import ConfigError
from tokenmill.node import process as node_process
from tokenmill.node.process import has_ended, host_id, name_process, process_start

# Serves /health as it is told, and registers itself as a server does.
SERVER = """
import http.server, os, sys
from tokenmill.cli.servers import Registration
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2]))
        self.end_headers()
        if self.path == "/v1/models" and not sys.argv[3:]:
            self.wfile.write(b'{"data": [{"id": "a"}, {"id": "b"}, {"id": "c"}, {"id": "d"}, {"id": "e"}]}')
    def log_message(self, *args):
        pass
with http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server, Registration() as registration:
    registration.write(f"http://127.0.0.1:{sys.argv[1]}", sys.argv[3:], "/models/x.gguf", 300)
    print("registered", flush=True)
    server.serve_forever()
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


class Process:
    """A context manager: a process that is a server as far as its file and /health tell."""

    def __init__(self, status: int, *models: str) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-c", SERVER, str(self.port), str(status), *models]

    def __enter__(self) -> Process:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "registered\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def two() -> Iterator[tuple[Process, Process]]:
    with Process(200, "llama", "alias") as one, Process(503, "qwen:4b") as other:
        yield one, other


def test_ps_lists_what_lives_and_cleans_up_after_the_rest(two: tuple[Process, Process], state: Path) -> None:
    one, other = two
    lines = run_command("ps").stdout.splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines[1:]}
    assert lines[0].split() == ["MODEL", "ADDRESS", "PID", "MEMORY", "STATE", "UNTIL"]
    assert f"http://127.0.0.1:{one.port}" in rows["llama, alias"] and "ready" in rows["llama, alias"]
    assert rows["qwen:4b"][2] == str(other.process.pid) and "starting" in rows["qwen:4b"]
    assert rows["qwen:4b"][-3:] == ["in", "5", "min"]
    (first, _) = json.loads(run_command("ps", "--json").stdout)
    assert first["state"] in ("ready", "starting") and first["memory_bytes"] > 1 << 20
    one.process.kill()
    one.process.wait()
    (state / "servers" / file_of(1).name).write_text("{")
    assert [each.models for each in running()] == [("qwen:4b",)]
    assert len(list((state / "servers").iterdir())) == 1


def test_a_process_that_has_the_id_of_a_dead_server_is_not_taken_for_it(state: Path) -> None:
    with Registration() as registration:
        registration.write("http://127.0.0.1:1", ["m"], "/m", 0)
        assert [each.pid for each in running()] == [os.getpid()] and running()[0].ends_in(0) == "stopped"
        file = file_of(os.getpid())
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        file.write_text(json.dumps(json.loads(file.read_text()) | {"started": "earlier"}))
        assert not running() and not file.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="others tell the time of day at which a process started")
def test_a_process_of_an_earlier_boot_is_not_taken_for_one_of_this(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that start with the system have the same id and start at the same tick after each boot."""
    with Registration() as registration:
        registration.write("http://127.0.0.1:1", ["m"], "/m", 0)
        assert running()
        monkeypatch.setattr(node_process, "host_id", lambda: "another")
        assert not running()


@pytest.mark.parametrize("said", [{"pid": -1}, {"pid": -1, "started": None}, {"pid": 1}, {"started": None}])
def test_a_file_that_tells_of_another_process_than_its_name_does_is_none(state: Path, said: dict[str, object]) -> None:
    """A signal to process -1 would reach all of the user's."""
    with Registration() as registration:
        registration.write("http://127.0.0.1:1", ["m"], "/m", 0)
        file = file_of(os.getpid())
        told = json.loads(file.read_text()) | said
        told["started"] = process_start(told["pid"]) if "started" not in said else None
        file.write_text(json.dumps(told))
        assert not running() and not file.exists()


def test_files_of_another_machine_stay_though_its_name_begins_alike(state: Path) -> None:
    (state / "servers").mkdir(parents=True)
    other = file_of(77).with_name(file_of(77).name.replace(".77.", ".lab.77."))
    other.write_text("{}")
    assert not running() and other.exists()


def test_stop_signals_no_process_that_took_the_id_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --all, a server may end while another is waited for."""
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    gone = Served(os.getpid(), "earlier", "http://127.0.0.1:1", ("m",), "/m")
    monkeypatch.setattr(servers, "running", lambda: [gone])
    servers.stop(argparse.Namespace(all=True))
    assert not signalled


def test_an_ended_child_that_nobody_has_waited_for_does_not_live() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    until_s = time.monotonic() + 30
    while process_start(process.pid) is not None:
        assert time.monotonic() < until_s
    process.wait()


@pytest.mark.skipif(not host_id(), reason="the system does not tell which boot it is of")
def test_a_process_that_was_killed_is_known_to_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by its parent, who has not waited for it. Of another machine's, of another boot, nobody knows."""
    code = "from tokenmill.node.process import name_process; print(name_process(), flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip()
        assert name.startswith(f"{process.pid} ") and not has_ended(name) and not has_ended(name_process())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(name)
        process.wait()
        assert has_ended(name) and not any(map(has_ended, ("", "12 34", name + "x")))
        monkeypatch.setattr(node_process, "host_id", lambda: "another")
        assert not has_ended(name)


def test_stop_ends_the_one_that_is_named(two: tuple[Process, Process]) -> None:
    one, other = two
    assert "Which one?" in run_command("stop").stderr
    wrong = run_command("stop", "mistral").stderr
    assert "is or has 'mistral'" in wrong and "qwen:4b at http" in wrong and wrong.count("\n") == 1
    assert run_command("stop", "alias:latest").stdout == f"stopped llama at http://127.0.0.1:{one.port}\n"
    assert one.process.wait(30) < 0
    assert run_command("stop", "--all").stdout == f"stopped qwen:4b at http://127.0.0.1:{other.port}\n"
    ended = run_command("stop")
    assert ended.returncode == 2 and "No server of yours runs here" in ended.stderr


def test_a_server_with_models_of_a_folder_is_asked_for_them_and_not_ended_for_one() -> None:
    with Process(200) as folder:
        assert "a, b, c, d and 1 more  " in run_command("ps").stdout
        ended = run_command("stop", "b")
        assert ended.returncode == 2 and "b is one of several models at" in ended.stderr
        assert named("").title == "models of a folder"
        assert run_command("stop", str(folder.port)).returncode == 0


def test_a_server_is_named_by_model_address_port_or_process(two: tuple[Process, Process]) -> None:
    one, _ = two
    for name in (
        "llama",
        f"localhost:{one.port}",
        f"http://127.0.0.1:{one.port}/v1",
        str(one.port),
        str(one.process.pid),
    ):
        assert named(name).pid == one.process.pid, name
    for name in ("llama2", "http://127.0.0.1:1", "ftp://x", "/run/s"):
        with pytest.raises(ConfigError):
            named(name)


def test_a_stop_that_waits_for_calls_says_how_to_end_it_now(
    two: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(servers, "_STOP_S", 0.2)
        patch.setattr(servers, "_TELL_S", 0.0)
        patch.setattr(os, "kill", lambda pid, number: None)
        waits, gave_up = run_command("stop", "llama").stderr.splitlines()
        assert waits.startswith("llama at http") and waits.endswith(f"kill {two[0].process.pid}")
        assert gave_up.endswith(f"kill {two[0].process.pid}")


def test_doctor_says_which_server_has_the_port(two: tuple[Process, Process]) -> None:
    said = run_command("doctor", "--port", str(two[0].port)).stdout
    assert f"{two[0].port} is in use by a server of yours (process {two[0].process.pid})" in said


def test_a_key_that_no_running_server_reads_says_so(state: Path) -> None:
    """As one made in a terminal without the server's TOKENMILL_STATE is."""
    lonely = run_command("keys", "create", "a")
    assert lonely.returncode == 0 and f"no running server reads {state / 'control.db'}" in lonely.stderr
    with Process(200, "llama"):
        assert run_command("keys", "create", "b").stderr == ""


def test_a_folder_that_cannot_be_written_keeps_no_server_from_serving(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.write_text("a file")
    with Registration() as registration:
        registration.write("http://127.0.0.1:1", ["m"], "/m", 0)
    assert "will not list this server" in caplog.text and not running()


def test_a_server_on_a_unix_socket_tells_how_it_is(tmp_path: Path) -> None:
    served = Served(1, "", str(tmp_path / "s"), ("m",), "/m")
    assert served.state() == "no answer" and served.url() is None


@pytest.mark.parametrize(
    ("uses", "ends_at_s"),
    [([(0, 0)], 2.0), ([(0, 0), (1, 0), (1, 0), (0, 0)], 5.0), ([(0, 0), (0, 5)], 3.0)],
)
def test_a_server_is_idle_when_nothing_is_open_and_nothing_was(uses: list[tuple[int, int]], ends_at_s: float) -> None:
    """Two seconds of a clock that only sleeping moves; the last use is seen again and again."""
    now_s, noted = [0.0], []

    async def sleep(seconds: float) -> None:
        now_s[0] += seconds

    def use() -> tuple[int, int]:
        return uses.pop(0) if len(uses) > 1 else uses[0]

    asyncio.run(wait_idle(2.0, use, lambda: noted.append(now_s[0]), lambda: now_s[0], sleep))
    assert now_s[0] == ends_at_s and bool(noted) == (ends_at_s > 2)


def test_times_are_told_as_people_say_them() -> None:
    assert [told_time(each) for each in (45, 300, 7200)] == ["45 s", "5 min", "2 h"]


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("1h30m", 5400), ("90", 90), ("0", 1), ("-1", 0), ("-1s", 0)]
)
def test_keep_alive_is_read_as_ollama_reads_it(text: str, seconds: int) -> None:
    assert keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 m", "1d", "5mm", "-"])
def test_what_is_no_time_to_keep_alive_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        keep_alive(text)
