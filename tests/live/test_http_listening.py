"""Where a server listens, who may call it and what it logs: TLS, Unix sockets, root paths, browsers' pages, logs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, resident_bytes
from test_http import get, post
from test_http_connections import ask, completion, refusal, rest, statuses

import links
from scripted import Served, made_connections
from tokenmill.control.observe.request_log import REQUEST_LOGGER
from tokenmill.net.system import new_event_loop
from tokenmill.server.access_log import ACCESS_LOGGER
from tokenmill.server.connections import HttpBounds
from tokenmill.server.listen import make_tls


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost, signed by itself, with its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_text(links.certificate())
    return path


@pytest.fixture
def secure(certificate: Path) -> Iterator[Served]:
    with Served(lambda prompt: "abc" * 20, listen={"tls": make_tls(str(certificate))}) as served:
        yield served


def secured(served: Served, certificate: Path, **identity: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificate))
    if identity:
        context.load_cert_chain(**identity)
    return context.wrap_socket(served.connect(), server_hostname="localhost")


# ---- TLS ----


def test_tls_serves_whole_answers_streams_and_large_bodies(secure: Served, certificate: Path) -> None:
    with secured(secure, certificate) as raw:
        raw.sendall(completion(max_tokens=50) + completion(max_tokens=50, stream=True))
        raw.sendall(completion(b"connection: close", pad="x" * 1_000_000))
        answer = rest(raw)
        assert statuses(answer) == [200] * 3 and b"data: [DONE]" in answer
        assert raw.version() in ("TLSv1.2", "TLSv1.3")
    with secured(secure, certificate) as raw:
        raw.sendall(b"x" * 100_000)
        assert statuses(rest(raw)) == [400]


def test_plain_http_and_half_handshakes_on_a_tls_port_leave_no_traceback(
    secure: Served, certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for junk in (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00" + b"\0" * 512):
        with secure.connect() as raw:
            raw.sendall(junk)
            time.sleep(0.05)
    with secured(secure, certificate) as raw:
        raw.sendall(b"GET / HT")
    with secured(secure, certificate) as raw:
        raw.sendall(completion(b"connection: close"))
        assert statuses(rest(raw)) == [200]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_does_not_finish_the_handshake_holds_a_place_for_a_bounded_time(certificate: Path) -> None:
    bounds = HttpBounds(head_s=0.5, max_connections=4)
    with Served(listen={"tls": make_tls(str(certificate))}, http=bounds) as served, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(served.connect()) for _ in range(4)]
        with secured(served, certificate) as raw:
            raw.sendall(completion(b"connection: close"))
            assert statuses(rest(raw)) == [200], "it takes the place of one that only waits"
        assert [rest(raw) for raw in raws] == [b""] * 4


@pytest.mark.parametrize("new_loop", [new_event_loop, asyncio.new_event_loop])
def test_who_gave_way_in_the_handshake_is_forgotten(
    certificate: Path, new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Served, "new_loop", staticmethod(new_loop))
    made = made_connections(monkeypatch)
    bounds = HttpBounds(max_connections=2)
    with Served(listen={"tls": make_tls(str(certificate))}, http=bounds) as served, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(served.connect()) for _ in range(8)]
        assert [rest(raw) for raw in raws[:6]] == [b""] * 6
        deadline = time.monotonic() + 60
        while len(made) > 2:
            assert time.monotonic() < deadline, len(made)
            time.sleep(0.05)
            gc.collect()


def test_a_client_that_leaves_a_tls_connection_is_cancelled(secure: Served, certificate: Path) -> None:
    secure.call(lambda: setattr(secure.script, "step_s", 0.02))
    for stream in (False, True):
        with secured(secure, certificate) as raw:
            raw.sendall(completion(max_tokens=300, ignore_eos=True, stream=stream))
            secure.wait_until(lambda: secure.client.num_open == 1)
            start = secure.client.stats.num_steps
        secure.wait_until(lambda: secure.client.num_open == 0)
        assert secure.call(lambda: secure.client.stats.num_steps) - start < 40


def test_clients_certificates_can_be_demanded(certificate: Path) -> None:
    tls = make_tls(str(certificate), ca_certs=str(certificate), cert_reqs=2)
    with Served(listen={"tls": tls}) as served:
        with secured(served, certificate, certfile=str(certificate)) as raw:
            raw.sendall(completion(b"connection: close"))
            assert statuses(rest(raw)) == [200]
        with pytest.raises((ssl.SSLError, ConnectionError)), secured(served, certificate) as raw:
            raw.sendall(completion())
            if raw.recv(1) == b"":
                raise ConnectionError("closed without an answer")
            raise AssertionError("served without a certificate")


# ---- Unix sockets, root paths ----


def test_a_unix_socket_serves_and_tells_the_gone_from_the_half_closed_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "api")

    def connect() -> socket.socket:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(20)
        raw.connect(path)
        return raw

    with Served(lambda prompt: "abc" * 40, step_s=0.01, listen={"uds": path}, allowed_hosts=None) as served:
        with connect() as raw:
            raw.sendall(completion(max_tokens=5).replace(b"localhost", b"anything"))
            raw.shutdown(socket.SHUT_WR)
            assert statuses(rest(raw))[-1] == 200
        with connect() as raw:
            raw.sendall(completion(max_tokens=100))
            served.wait_until(lambda: served.client.stats.num_running == 1)
        served.wait_until(lambda: served.client.num_open == 0)
        assert served.call(lambda: served.client.stats.num_steps) < 60
    assert not os.path.exists(path)


def test_a_root_path_may_be_cut_off_by_the_proxy_or_not() -> None:
    with Served(root_path="/llm", api_keys=("k",)) as served:
        for prefix in ("", "/llm"):
            assert get(served, prefix + "/health")[0] == 200
            assert get(served, prefix + "/v1/models", authorization="Bearer k")[0] == 200
            assert post(served, prefix + "/v1/completions", {"prompt": "x"}, authorization="Bearer k")[0] == 200
        assert get(served, "/llmx/health", authorization="Bearer k")[0] == 404


def test_several_names_are_all_served_and_the_first_answers() -> None:
    with Served(model_names=("first", "second")) as served:
        for name in ("first", "second"):
            assert post(served, "/v1/completions", {"prompt": "x", "model": name})[1]["model"] == "first"
        assert [card["id"] for card in get(served, "/v1/models")[1]["data"]] == ["first", "second"]


# ---- pages ----


def test_pages_of_other_origins_cannot_run_anything() -> None:
    """A form's or script's simple request needs no permission of the server to be sent: it must be refused."""
    with Served() as served:
        simple = {"content-type": "text/plain"}
        for headers in ({"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/load_lora_adapter", "/ping"):
                status, body, _ = post(served, path, {"prompt": "x"}, **simple, **headers)
                assert (status, body["error"]["type"]) == (403, "permission_error")
        assert post(served, "/v1/completions", {"prompt": "x"}, **simple)[0] == 200, "as curl -d sends it"
        assert post(served, "/v1/completions", {"prompt": "x"}, origin=served.url)[0] == 200
        assert served.call(lambda: served.client.num_open) == 0


def test_a_name_that_was_made_to_lead_here_is_refused() -> None:
    with Served(allowed_hosts=()) as served:
        rebound = completion(b"connection: close").replace(b"localhost", b"evil.example:80")
        answer = ask(served, rebound)
        assert statuses(answer) == [403] and "--allowed-hosts" in refusal(answer)
        absolute = completion(b"connection: close", path=b"http://evil.example/v1/completions")
        assert statuses(ask(served, absolute)) == [403], "the target's own host counts"
        assert statuses(ask(served, b"GET /metrics HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n")) == [
            403
        ]


def test_allowed_origins_may_act() -> None:
    with Served(cors_origins=("https://app.example",)) as served:
        body = {"prompt": "x"}
        status, _, headers = post(
            served, "/v1/completions", body, origin="https://app.example", **{"sec-fetch-site": "cross-site"}
        )
        assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert post(served, "/v1/completions", body, origin="https://other.example")[0] == 403


# ---- logs ----


def logged(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == name]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_line_for_each_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    with Served(max_body_bytes=1000) as served:
        post(served, "/v1/completions?a=b", {"prompt": "x"})
        post(served, "/v1/completions", {"prompt": "x" * 2000})
        get(served, "/health")
        ask(served, b'GET /\xff"\x7f%0a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n')
        until(lambda: len(logged(caplog, ACCESS_LOGGER)) >= 2)
    lines = logged(caplog, ACCESS_LOGGER)
    assert lines[0].startswith("127.0.0.1:") and '"POST /v1/completions?a=b HTTP/1.1" 200 ' in lines[0]
    assert '" 413 ' in lines[1] and not any("/health" in line for line in lines)
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_a_client_that_left_is_499_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    with Served(lambda prompt: "abc" * 40, step_s=0.01) as served:
        with served.connect() as raw:
            raw.sendall(completion(max_tokens=100))
            served.wait_until(lambda: served.client.stats.num_running == 1)
        until(lambda: logged(caplog, ACCESS_LOGGER))
    assert '" 499 ' in logged(caplog, ACCESS_LOGGER)[0]


def test_request_logs_say_lengths_times_and_ends_and_no_text_unasked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    with Served(log_requests=True) as served:
        body = {"prompt": "secret", "n": 2, "seed": 7, "temperature": 0.5, "stop": ["hidden"], "logit_bias": {"5": 1}}
        post(served, "/v1/completions", body, **{"x-request-id": "mine\u00e9"})
        post(served, "/v1/completions", {"prompt": "x", "stop": ["lo"]})
        until(lambda: len(logged(caplog, REQUEST_LOGGER)) == 5)
    lines = logged(caplog, REQUEST_LOGGER)
    assert "as 'cmpl-mine\\xe9': model=toy choices=2 prompt_tokens=6 max_tokens=16 seed=7 temperature=0.5" in lines[0]
    assert "stop=(1)" in lines[0] and "logit_bias=(1)" in lines[0]
    assert not any(text in "".join(lines) for text in ("secret", "hidden", "hello"))
    ends = [line for line in lines if line.startswith("ended")]
    assert sum("stop, prompt_tokens=6 cached=0 output_tokens=" in line for line in ends) == 2
    assert all(" queue=" in line and " ttft=" in line and " total=" in line for line in ends)


def test_prompts_are_logged_as_far_as_allowed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    with Served(log_requests=True, max_log_len=6) as served:
        post(served, "/v1/completions", {"prompt": "line\n12345"})
    assert "prompt='line\\n1'" in logged(caplog, REQUEST_LOGGER)[0]


def test_a_request_that_outlives_its_engine_ends_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    with Served(lambda prompt: "abc" * 40, step_s=0.02, log_requests=True) as served, served.connect() as raw:
        raw.sendall(completion(b"connection: close", max_tokens=20))
        served.wait_until(lambda: served.client.stats.num_running == 1)
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        served.restart_engine()
        assert statuses(rest(raw)) == [200]
    (end,) = (line for line in logged(caplog, REQUEST_LOGGER) if line.startswith("ended"))
    assert "length" in end and "output_tokens=20" in end


# ---- the command ----


def test_the_command_with_tls_keys_names_and_logs(certificate: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-file\n")
    flags = ["--ssl-certfile", str(certificate), "--api-key-file", str(tmp_path / "keys"), "--root-path", "/llm"]
    names = ["--served-model-name", "one", "two", "--api-key", "from-flag", "--enable-log-requests", "--threads", "1"]
    with Server(*flags, *names) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        for key in ("from-file", "from-flag"):
            connection = http.client.HTTPSConnection("localhost", server.port, timeout=60, context=context)
            body = json.dumps({"model": "two", "prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
            connection.request("POST", "/llm/v1/completions", body, {"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            assert answer.status == 200 and json.loads(answer.read())["model"] == "one"
            connection.close()
        until(lambda: server.output.count("tokenmill.access") == 2 and server.output.count("ended cmpl-") == 2)
        assert f"ready at https://127.0.0.1:{server.port}/llm after" in server.output


def test_ctrl_c_says_what_it_waits_for_and_a_unix_socket_goes(tmp_path: Path) -> None:
    path = str(tmp_path / "api")
    with Server("--uds", path, "--threads", "1", "--disable-access-log") as server:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.connect(path)
        raw.sendall(completion(max_tokens=4000, ignore_eos=True, stream=True))
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGINT)
        until(lambda: "stopping" in server.output)
        assert "stopping: 1 open request has 30 s to finish; again to stop at once" in server.output
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        until(lambda: server.output.endswith("tokenmill: stopped"))
        raw.close()
        assert not os.path.exists(path) and "Traceback" not in server.output and "access" not in server.output


def test_a_server_whose_output_nobody_reads_stops_when_it_is_told_to(tmp_path: Path) -> None:
    """As where its log was piped into a program that has died."""
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", "smollm2", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--uds", str(tmp_path / "api"), "--disable-access-log"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TOKENMILL_STATE": str(tmp_path / "state")},
    )
    try:
        assert process.stdout is not None
        with process.stdout as lines:
            assert any(b"ready at" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 141
    finally:
        process.kill()
        process.wait()


def test_memory_that_a_flood_without_a_key_took_is_given_back() -> None:
    with Server("--api-key", "a-secret-key", "--threads", "1") as server, contextlib.ExitStack() as stack:
        before = resident_bytes(server.process.pid)
        for _ in range(300):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            with contextlib.suppress(ConnectionError):
                raw.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nh: " + b"v" * 60_000)
        during = resident_bytes(server.process.pid)
        assert server.request("GET", "/health")[0] == 200
        stack.close()
        until(lambda: resident_bytes(server.process.pid) - before < 8 << 20)
        assert during - before < HttpBounds().max_bytes()
