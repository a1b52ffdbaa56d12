"""`--idle-command`: a job that runs in idle time, stopped by calls and ended with the server."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable
from pathlib import Path

from serving import Server, alive, wait_until

SMALL = ("--kv-cache-memory-bytes", "100MiB")


def spinning(folder: Path) -> str:
    """A job of two processes, whose numbers it writes down."""
    return f"echo $$ > {folder}/leader; (echo $BASHPID; exec sleep 1000) > {folder}/child & while :; do :; done"


def command_of(folder: Path) -> str:
    script = folder / "job.sh"
    script.write_text(spinning(folder))
    return f"exec bash {script}"


def pids_of(folder: Path) -> tuple[int, int]:
    wait_until(lambda: all(_read(folder / name).strip() for name in ("leader", "child")), "the job has begun")
    leader, child = (int(_read(folder / name)) for name in ("leader", "child"))
    return leader, child


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T"


def shown(server: Server) -> dict[str, object]:
    body: dict[str, object] = json.loads(server.request("GET", "/admin/slo")[1])["idle_command"]
    return body


def ask(server: Server, max_tokens: int) -> Callable[[], None]:
    """Begins a call in a thread; the function that is returned waits for its end."""
    body = {"model": "smollm2", "prompt": "Count: 1 2 3", "max_tokens": max_tokens, "ignore_eos": True}

    def run() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server may be killed meanwhile
            server.request("POST", "/v1/completions", body)

    asking = threading.Thread(target=run)
    asking.start()
    return asking.join


def test_the_job_runs_in_idle_time_alone(smollm2: object, tmp_path: Path) -> None:
    """Every process of its group is stopped while a call is open, goes on afterwards, and is gone with the server."""
    with Server(*SMALL, "--idle-command", command_of(tmp_path)) as server:
        pids = pids_of(tmp_path)
        wait_until(lambda: not any(map(is_stopped, pids)), "the job runs")
        wait = ask(server, 200)
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1, "the call runs")
        assert all(map(is_stopped, pids)) and shown(server)["state"] == "stopped"
        wait()
        wait_until(lambda: not any(map(is_stopped, pids)), "the job goes on")
        metrics = server.metrics()
        assert metrics["tokenmill:idle_job_stops_total"] >= 1 and metrics["tokenmill:idle_job_seconds_total"] > 0
    assert not any(map(alive, pids))
