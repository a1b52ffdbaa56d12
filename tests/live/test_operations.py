"""A server as its operator sees it: real processes, signals, kill -9."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import kill
import pytest
from serving import Server, wait_until

from tokenmill.cli.engine_process import CRASH
from tokenmill.cli.main import main
from tokenmill.core.flight import read_flight

POISON = 667


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    status, text = server.request("POST", "/v1/completions", {"prompt": "p" * 300, "temperature": 0} | fields)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def test_what_an_engine_did_last_outlives_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step that a request killed its engine in is found in the file that is left, with the request; SIGUSR2 makes a
    copy; a server that ends in order leaves no file of its engine."""
    model, flights = tmp_path / "model", tmp_path / "flights"
    model.mkdir()
    kill.write_model(model)
    with Server(*kill.ARGS, "--flight-recorder", str(flights), model=str(model), env={CRASH: str(POISON)}) as server:
        name = ask(server, max_tokens=8)["id"]
        os.kill(server.process.pid, signal.SIGUSR2)
        wait_until(lambda: bool(list(flights.glob("asked-*"))), "a copy")
        shown = json.loads(server.request("GET", f"/admin/requests/{name}")[1])
        chunks = [event for span in shown["timeline"] for event in span["events"]]
        assert sum(chunk["tokens"] for chunk in chunks) == 300 - shown["cached_tokens"], (
            "told by the engine's own record"
        )
        trace = json.loads(server.request("GET", "/admin/flight?steps=20")[1])
        assert any(event["ph"] == "X" and event["name"].startswith("step ") for event in trace["traceEvents"])
        poisoning = threading.Thread(
            target=server.request, args=("POST", "/v1/completions", {"prompt": "deadly", "seed": POISON})
        )
        poisoning.start()
        wait_until(lambda: bool(list(flights.glob("lost-*"))), "the file of the engine that died")
        first = min(flights.glob("lost-*"), key=lambda path: path.stat().st_mtime)
        poisoning.join(60)
        assert not poisoning.is_alive()
    assert not list(flights.glob("engine-*"))
    found = read_flight(first.read_bytes())
    assert found.steps[-1].ended_s == 0.0 and found.steps[-1].num_rows >= 1, "in flight as the engine died"
    assert found.requests[-1].ended_s == 0.0 and not found.requests[-1].reason
    assert main(["flight", str(first)]) == 0
    assert "in flight" in capsys.readouterr().out
