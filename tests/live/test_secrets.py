"""Keys and prompts go nowhere that nobody asked for: not into logs, metrics, files, errors, or what `ps` shows.

A server with everything on and at its most talkative is asked for every path of its own document, with its keys in
every place where clients put keys, and with a prompt that can be found again.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, wait_until

from tokenmill.cli.main import main
from tokenmill.control.tenants.store import TenantStore

KEY, WRONG, PROMPT = "sk-marker-of-the-key", "sk-marker-of-a-wrong-key", "markerofaprompt"


def ask(server: Server, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, response.read().decode("utf8", "replace")
    finally:
        connection.close()


def misplaced(key: str) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Calls of callers who put their key where none belongs: (method, path, body, headers)."""
    encoded = "".join(f"%{ord(each):02x}" for each in key)
    for place in (key, encoded, f"v1/x_{key}", f"v1/models/{key}", f"{'a' * (195 - len(key) // 2)}/{key}"):
        yield "GET", f"/{place}", None, {}
        yield "DELETE", f"/v1/responses/{place}", None, {}
        yield "DELETE", f"/admin/tenants/{place}", None, {"authorization": f"Bearer {key}"}
    good = {"prompt": PROMPT, "max_tokens": 2}
    for headers in (
        {"x-request-id": key}, {"x-request-id": f"job_{key}"}, {"idempotency-key": key}, {"user-agent": key},
        {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "tracestate": f"vendor={key}"},
        {"x-request-id": key, "x-tokenmill-resume": "true", "x-custom": key},
    ):  # fmt: skip
        for stream in (False, True):
            yield "POST", f"/v1/completions?t={key}", good | {"stream": stream}, headers
        yield "POST", "/v1/messages", {"a": 1}, headers
    for more in ({"model": key}, {"request_id": key}, {"user": key}, {f"{key}": 1}, {"cache_salt": key}):
        yield "POST", "/v1/completions", good | more, {}
    for path in ("/v1/load_lora_adapter", "/admin/models"):
        yield "POST", path, {"lora_name": key, "lora_path": key, "model": key}, {}


def shown_by_the_system(server: Server) -> str:
    """What other users see of the processes, and what processes that were started inherit."""
    texts = []
    for pid in server.pids():
        texts.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        if pid != server.process.pid:  # whose own environment its user has made
            texts.append(Path(f"/proc/{pid}/environ").read_bytes())
    return b"".join(texts).decode("utf8", "replace")


@pytest.mark.slow
def test_no_key_and_no_prompt_is_where_it_should_not_be(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "keys").chmod(0o600)
    store = TenantStore(str(tmp_path / "tenants.db"))
    given = store.create_key("ops", "ops", is_admin=True)[1]
    store.close()
    arguments = ["--api-key-file", str(tmp_path / "keys"), "--tenants", str(tmp_path / "tenants.db")]
    audit: list[str] = []
    try:
        import cryptography  # noqa: F401

        from tokenmill.control.signing import make_key

        (tmp_path / "secret").mkdir()
        make_key(tmp_path / "secret" / "k")
        key = str(tmp_path / "secret" / "k")
        audit = ["--audit-log", str(tmp_path / "audit"), "--audit-key", key, "--sign-responses", key]
    except ImportError:
        pass
    env = {"TOKENMILL_API_KEY": f"{KEY}-of-the-environment"}
    kept = ["--resume-file", str(tmp_path / "resume.db"), "--step-log", str(tmp_path / "steps")]
    audit += ["--audit-prompts", "text"] if audit else []
    answers = []
    with Server("--log-level", "debug", "--enable-log-requests", *arguments, *audit, *kept, env=env) as server:
        document = json.loads(ask(server, "GET", "/openapi.json", None, {})[1])
        bodies = [
            {"prompt": PROMPT, "max_tokens": 2},
            {"messages": [{"role": "user", "content": PROMPT}]},
            {"a": PROMPT},
        ]
        for key in (KEY, given, WRONG, f"{KEY}-of-the-environment"):
            placed = [({"authorization": f"Bearer {key}"}, ""), ({"x-api-key": key}, f"?api_key={key}&token={key}")]
            for path, methods in document["paths"].items():
                if path.startswith("/admin/keys"):  # whose answers have a key by intent
                    continue
                for number, method in enumerate(methods):
                    headers, query = placed[number % 2]
                    body = None if method == "get" else bodies[len(path) % 3]
                    where = path.replace("{", "").replace("}", "") + query
                    status, text = ask(server, method.upper(), where, body, headers)
                    assert status < 500, (method, path, status, text)
                    answers.append(text if status >= 400 else "")
            for headers, query in placed:
                for body in bodies[:2]:
                    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
                    answers.append(ask(server, "POST", path + query, body | {"max_tokens": 2}, headers)[1] * 0)
        for key in (KEY, given):
            for method, path, body, headers in misplaced(key):
                signed = {"x-api-key": given} | headers
                status, text = ask(server, method, path, body, signed)
                assert status < 500, (method, path, body, headers, status, text)
        answers.append(ask(server, "GET", "/admin/requests", None, {"x-api-key": given})[1])
        metrics = ask(server, "GET", "/metrics", None, {"x-api-key": given})[1]
        answers.append(metrics)
        processes = shown_by_the_system(server)
        server.process.terminate()
        wait_until(lambda: server.process.poll() is not None, "the server's end")
        kept = [
            path
            for folder in (Path(server._state.name), tmp_path)
            for path in folder.rglob("*")
            if path.is_file() and path != tmp_path / "keys"
        ]
        files = {str(path): path.read_bytes() for path in kept}
        modes = {str(path): path.stat().st_mode & 0o077 for path in kept if path.name != "k.pub"}
        log = server.output
    secrets = [KEY, given, WRONG]
    for secret in secrets:
        assert secret not in log, [line for line in log.splitlines() if secret in line][:3]
        assert secret not in processes
        assert not [text for text in answers if secret in text]
        assert not [name for name, data in files.items() if secret.encode() in data]
    assert "?api_key=...&token=..." in log
    assert PROMPT not in log and PROMPT not in metrics
    held = {Path(name).name for name, data in files.items() if PROMPT.encode() in data} - {"audit"}
    assert not [name for name in held if not name.startswith("kept.db")], held  # which clients ask for with `store`
    assert not {name: oct(mode) for name, mode in modes.items() if mode}
    if audit:
        log_file, key_file = str(tmp_path / "audit"), str(tmp_path / "secret" / "k.pub")
        assert main(["audit", "verify", log_file, "--public-key", key_file]) == 0
        actions = {json.loads(line)["action"] for line in (tmp_path / "audit").read_bytes().splitlines()}
        assert {"server.start", "server.stop", "call.end", "key.refused", "http.delete"} <= actions
