"""`tokenmill top`: what its page says, on a terminal and in a pipe, of a server that works and of one that does not."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from scripted import Served
from tokenmill.cli import main as cli
from tokenmill.cli.top import Server, page, told
from tokenmill.core.errors import ConfigError, Unavailable

COMMAND = [sys.executable, "-m", "tokenmill.cli.main", "top"]


def spread(count: int = 0) -> dict[str, Any]:
    return {"count": count, "p50": 0.1234, "p99": 1.5}


SEEN = {
    "load": {
        "time": 1000.0, "ready": True, "running": 3, "waiting": 2, "waiting_in_engines": 1, "open": 5,
        "predicted_wait_s": 0.25, "preemptions": 7, "steps_per_s": 31.4,
        "kv": {"usage": 0.5, "blocks": 80, "held": 40, "cached": 10, "free": 30},
        "tokens_per_s": {"prompt_computed": 100.0, "prompt_cached": 20.0, "output": 55.0},
        "ttft_s": spread(4), "tpot_s": spread(),
    },
    "tiers": {"tiers": {
        "host": {"bytes": 3 << 20, "max_bytes": 1 << 30, "blocks": 9, "hits": 5, "load_bytes": 1 << 20,
                 "save_bytes": 2 << 20, "evictions": 1, "corrupt": 0},
        "remote": {"hits": 2, "load_bytes": 0, "save_bytes": 0, "evictions": 0, "corrupt": 4},
    }},
    "workers": {"workers": [
        {"id": "local-0", "state": "ready", "pool": "prefill", "pid": 12, "num_open": 4, "num_running": 3,
         "num_waiting": 1, "kv_usage": 0.5, "num_steps": 99, "address": None},
        {"id": "far", "state": "lost", "pool": "decode", "pid": None, "num_open": 0, "num_running": 0,
         "num_waiting": 0, "kv_usage": 0.0, "num_steps": 0, "address": "10.0.0.2:5"},
    ]},
    "requests": {"data": [
        {"id": "cmpl-\x1b[31m-0", "state": "decode", "engine": 1, "prompt_tokens": 5, "output_tokens": 9,
         "max_tokens": 16, "age_s": 2.0, "ttft_s": 0.5, "num_moves": 1, "num_resumptions": 0,
         "lives": [{"why": None, "route": "prefix"}, {"why": "balance", "route": None}]},
    ]},
    "decisions": {"data": [
        {"time": 998.0, "kind": "moved", "worker": "local-0", "to": "far", "request": "cmpl-1-0", "why": "balance",
         "tokens": 512, "pause_s": 0.012, "error": None},
        {"time": 990.0, "kind": "not_moved", "worker": "a", "to": "b", "request": "r", "why": "drain", "tokens": 0,
         "pause_s": 0.0, "error": "no room"},
        {"time": 985.0, "kind": "copied", "worker": "a", "to": "b", "why": "hot", "tokens": 64, "took_s": 0.5,
         "error": None},
        {"time": 984.0, "kind": "not_copied", "worker": "a", "to": "b", "why": "hot", "tokens": 0, "took_s": 0.5,
         "error": "no room"},
        {"time": 980.0, "kind": "lost", "worker": "far", "pool": "decode"},
        {"time": 980.0, "kind": "resumed", "num_requests": 3},
        {"time": 970.0, "kind": "pool", "worker": "far", "pool": "decode"},
    ]},
}  # fmt: skip


def test_a_page_says_who_works_what_waits_and_what_was_decided() -> None:
    lines = page("http://x", SEEN, 200).splitlines()
    text = "\n".join(lines)
    assert "running 3  waiting 2 (in engines 1)" in text and "held 40  cached 10  free 30 of 80 blocks" in text
    assert "[##########..........] 50 %" in text and "TTFT p50 123 p99 1500 ms   TPOT -" in text
    (worker,) = (line.split() for line in lines if line.startswith("local-0"))
    assert worker == ["local-0", "ready", "prefill", "12", "4", "3", "1", "50", "99", "here"]
    assert any(line.split()[:4] == ["far", "lost", "decode", "-"] for line in lines)
    assert "and 4 more" in text
    assert "host      3.0 MiB of 1.0 GiB, 9 blocks  hits 5  loaded 1.0 MiB  saved 2.0 MiB  evicted 1" in text
    assert any(line.startswith("remote    hits 2") and line.endswith("corrupt 4") for line in lines)
    (stream,) = (line.split() for line in lines if line.startswith("cmpl-"))
    assert stream[-3:] == ["1", "0", "balance"]
    assert lines[-7:] == [
        "    2.0 s ago  moved local-0 -> far (balance), KV of 512 tokens, pause 12 ms  cmpl-1-0",
        "   10.0 s ago  not moved a -> b (drain): no room  r",
        "   15.0 s ago  copied a prefix a -> b (hot), KV of 64 tokens in 500 ms",
        "   16.0 s ago  not copied a prefix a -> b (hot): no room",
        "   20.0 s ago  far is lost",
        "   20.0 s ago  resumed: 3 requests",
        "   30.0 s ago  far serves in pool decode",
    ]


def test_a_page_fits_the_terminal_and_names_cannot_steer_it() -> None:
    lines = page("http://x", SEEN, 40, 9).split("\n")
    assert len(lines) == 9 and max(map(len, lines)) <= 40
    assert "\x1b" not in page("http://x", SEEN, 200)


def test_every_kind_of_decision_that_a_server_tells_has_words() -> None:
    """The words are made from what the server's own list writes."""
    with Served() as served:
        served.ask("/v1/completions", {"prompt": "one", "max_tokens": 2})
        served.kill_engine()
        served.restart_engine()
        seen = Server(served.url, "").read()
    kinds = [each["kind"] for each in seen["decisions"]["data"]]
    assert kinds == ["ready", "lost", "ready"]
    assert all(told(each) for each in seen["decisions"]["data"])


def test_once_and_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One page is not cut at the terminal's last line: nobody draws over it."""
    monkeypatch.setenv("LINES", "9")
    with Served() as served:
        assert cli.main(["top", served.url, "--once"]) == 0
        text = capsys.readouterr().out
        assert "ready" in text and "WORKER" in text and "DECISIONS" in text and "\x1b" not in text
        assert " is ready" in text
        assert cli.main(["top", served.url + "/v1", "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out).keys() == {"load", "workers", "requests", "decisions"}


def test_a_server_that_is_not_there_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "http://127.0.0.1:9", "--once"]) == 2
    assert "There is no answer from 127.0.0.1:9" in capsys.readouterr().err
    with Served(api_keys=("secret",)) as served:
        assert cli.main(["top", served.url, "--once"]) == 2
        assert "API key of scope admin" in capsys.readouterr().err
        assert cli.main(["top", served.url, "--once", "--api-key", "secret"]) == 2
        assert "scope admin" in capsys.readouterr().err
    for wrong in ("ftp://x", "http://", "http://x:port"):
        with pytest.raises(ConfigError):
            Server(wrong, "")
    with pytest.raises(Unavailable):
        Server("127.0.0.1:9", "").read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_it_draws_over_itself_and_leaves_it_as_it_was(number: int) -> None:
    with Served() as served:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, served.url, "--interval", "0.1"], stdin=theirs, stdout=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )  # fmt: skip
        os.close(theirs)
        data = b""
        until_s = time.monotonic() + 120
        while data.count(b"DECISIONS") < 3:
            assert time.monotonic() < until_s, data
            if select.select([ours], [], [], 0.1)[0]:
                data += os.read(ours, 1 << 16)
        process.send_signal(number)
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            assert time.monotonic() < until_s, data
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    data += os.read(ours, 1 << 16)
                except OSError:  # its end of the terminal is closed
                    break
        assert process.wait(30) == 0
        os.close(ours)
    assert data.startswith(b"\x1b[?1049h") and b"\x1b[?25h" in data and data.endswith(b"\x1b[?1049l")
    pages = [each for each in data.split(b"\x1b[H") if b"DECISIONS" in each]
    assert len(pages) >= 3 and all(b"WORKER" in each and b"tokens/s" in each for each in pages)


def test_in_a_pipe_one_page_follows_another() -> None:
    with Served() as served:
        process = subprocess.Popen(
            [*COMMAND, served.url, "--interval", "0.1", "--json"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 0
        process.stdout.close()
    assert all(each["load"]["ready"] for each in lines)
    assert re.search(r"^\d", str(lines[0]["load"]["time"]))
