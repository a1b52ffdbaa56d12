"""What a served application writes into its audit log: calls, changes and refused keys; never a key, never a prompt."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from scripted import Served, make_text_model
from tokenmill.control.audit.entries import CallWatch, digest_of
from tokenmill.control.audit.log import AuditLog
from tokenmill.control.audit.verify import verify
from tokenmill.control.signing import Signer, load_signer, make_key
from tokenmill.control.tenants.access import Access
from tokenmill.control.tenants.store import TenantStore
from tokenmill.server import audit as door

KEY = "sk-the-key-of-a-caller"
PROMPT = "a secret prompt"


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    make_key(tmp_path / "key.pem")
    return load_signer(str(tmp_path / "key.pem"), "KEY")


@pytest.fixture
def log(tmp_path: Path, signer: Signer) -> AuditLog:
    log = AuditLog(str(tmp_path / "log" / "audit.jsonl"), signer)
    log.open()
    return log


def ask(served: Served, path: str, body: Any = None, key: str = KEY, method: str | None = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(
        served.url + path, data, {"content-type": "application/json", "authorization": f"Bearer {key}"}, method=method
    )
    try:
        with urllib.request.urlopen(call, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.status, error.read()


def entries_of(tmp_path: Path, signer: Signer) -> list[dict[str, Any]]:
    path = tmp_path / "log" / "audit.jsonl"
    assert verify(path, keys=[signer.public]).problems == []
    text = path.read_text()
    assert KEY not in text
    return [json.loads(line) for line in text.splitlines()]


def watching(log: AuditLog, served: Served, prompts: str = "digest", tells_coming: bool = False) -> None:
    decode = served.text.tokenizer.decode
    watch = CallWatch(log, tells_coming=tells_coming, prompts=prompts, decode=decode, model_of=lambda digest: "toy")
    served.call(lambda: served.client.observers.added.append(watch))


@pytest.mark.parametrize("prompts", ["off", "digest", "text"])
def test_calls_are_noted_with_as_much_of_their_text_as_is_wanted(
    tmp_path: Path, signer: Signer, log: AuditLog, prompts: str
) -> None:
    with Served(audit=log, api_keys=(KEY,)) as served:
        watching(log, served, prompts, tells_coming=True)
        for stream in (False, True):
            body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "stream": stream}
            assert ask(served, "/v1/completions", body)[0] == 200
        encode = served.text.tokenizer.encode
        prompt, output = encode(PROMPT, add_special=False), encode("hello world", add_special=False)[:3]
    log.close()
    entries = entries_of(tmp_path, signer)
    ends = [entry for entry in entries if entry["action"] == "call.end"]
    assert [entry["action"] for entry in entries].count("call.come") == len(ends) == 4
    for entry in ends:
        assert entry["outcome"] == "length" and entry["model"] == "toy" and entry["object"].startswith("cmpl-")
        assert (entry["prompt_tokens"], entry["output_tokens"]) == (len(prompt), 3)
        assert (entry.get("prompt_sha256") == digest_of(prompt)) == (prompts == "digest")
        assert (entry.get("output_sha256") == digest_of(output)) == (prompts == "digest")
        assert (entry.get("prompt") == PROMPT) == (prompts == "text")
    assert (PROMPT in (tmp_path / "log" / "audit.jsonl").read_text()) == (prompts == "text")


def test_changes_and_refused_keys_are_noted(
    tmp_path: Path, signer: Signer, log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many refused keys only so many have an entry each, and the rest are counted."""
    monkeypatch.setattr(door, "BURST", 3)
    monkeypatch.setattr(door, "RATE", 0.0)
    with Served(audit=log, api_keys=(KEY,)) as served:
        for number in range(8):
            assert ask(served, "/v1/models", key=f"wrong-{number}")[0] == 401
        assert ask(served, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})[0] == 400
        assert ask(served, "/v1/files/file-0", method="DELETE")[0] == 400
        assert ask(served, "/v1/responses/resp_0", method="DELETE")[0] == 404
        assert ask(served, "/v1/chat/completions", {"messages": []})[0] == 400
        assert ask(served, "/version", key="wrong")[0] == 200
    log.close()
    entries = entries_of(tmp_path, signer)
    refused = [entry for entry in entries if entry["action"] == "key.refused"]
    assert sum(entry.get("count", 1) for entry in refused) == 8
    assert len([entry for entry in refused if "count" not in entry]) == 3
    assert refused[0]["actor"]["address"] == "127.0.0.1" and refused[0]["object"] == "/v1/models"
    changes = [(entry["action"], entry["object"], entry["outcome"]) for entry in entries if entry not in refused]
    assert changes == [
        ("http.post", "/v1/load_lora_adapter", "400"),
        ("http.delete", "/v1/files/file-0", "400"),
    ]
    assert "wrong-" not in (tmp_path / "log" / "audit.jsonl").read_text()


def test_keys_and_tenants_are_noted_whoever_changes_them(tmp_path: Path, signer: Signer, log: AuditLog) -> None:
    """By the store itself, as the command line does it, and over HTTP by an admin, who is named."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    admin = store.create_key("ops", "ops", is_admin=True)[1]
    access = Access((), str(tmp_path / "tenants.db"))
    access.open()
    with Served(audit=log, access=access) as served:
        record, key = store.create_key("a", "team")
        assert ask(served, "/v1/models", key=key)[0] == 200
        assert ask(served, "/admin/tenants/team", {"weight": 2}, key=admin, method="PATCH")[0] == 200
        assert ask(served, f"/admin/keys/{record.id}", key=admin, method="DELETE")[0] == 200
    access.close()
    log.close()
    store.close()
    entries = entries_of(tmp_path, signer)
    told = [(entry["action"], entry["object"]) for entry in entries]
    assert told == [
        ("key.begin", record.id), ("tenant.begin", "team"),
        ("tenant.change", "team"), ("http.patch", "/admin/tenants/team"),
        ("key.end", record.id), ("http.delete", f"/admin/keys/{record.id}"),
    ]  # fmt: skip
    assert entries[2]["terms"]["weight"] == 2
    assert entries[3]["actor"]["tenant"] == "ops" and entries[3]["actor"]["key"].startswith("key_")
    assert key not in json.dumps(entries) and admin not in json.dumps(entries)


def test_pages_of_other_origins_cannot_fill_the_log(
    tmp_path: Path, signer: Signer, log: AuditLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused before a key was looked at has a bounded number of entries, and is counted beyond."""
    monkeypatch.setattr(door, "BURST", 3)
    monkeypatch.setattr(door, "RATE", 0.0)
    with Served(audit=log) as served:
        for _ in range(8):
            call = urllib.request.Request(
                f"{served.url}/v1/batches", b"{}", {"origin": "http://elsewhere.example"}, method="POST"
            )
            with pytest.raises(urllib.error.HTTPError, match="403") as refusal:
                urllib.request.urlopen(call, timeout=20)
            refusal.value.close()
    log.close()
    entries = entries_of(tmp_path, signer)
    assert [(entry["action"], entry["outcome"], entry.get("count")) for entry in entries] == [
        *[("http.post", "403", None)] * 3, ("http.post", "403", 5),
    ]  # fmt: skip


def test_the_head_is_shown(tmp_path: Path, signer: Signer, log: AuditLog) -> None:
    with Served(audit=log) as served:
        log.note({"action": "test", "outcome": "done"})
        served.wait_until(lambda: log.status()["seq"] == 1)
        status, body = ask(served, "/admin/audit")
        assert status == 200 and json.loads(body)["seq"] == 1
    log.close()
    with Served() as served:
        assert ask(served, "/admin/audit")[0] == 404


def test_nothing_is_served_that_cannot_be_noted(tmp_path: Path, log: AuditLog) -> None:
    """But what monitoring asks for and what shows an operator why are."""
    with Served(audit=log) as served:
        log._failure = "No space left on device"
        status, body = ask(served, "/v1/completions", {"prompt": "x"})
        assert status == 503 and "The audit log cannot be written: No space left" in body.decode()
        assert ask(served, "/health")[0] == 200
        assert json.loads(ask(served, "/admin/audit")[1])["failure"] == "No space left on device"
        assert ask(served, "/admin/keys", {"name": "x"})[0] == 503
        log._failure = ""
        assert ask(served, "/v1/completions", {"prompt": "x"})[0] == 200
    log.close()


def test_text_model_of_the_tests_decodes_prompts_back() -> None:
    text = make_text_model()
    assert text.tokenizer.decode(text.tokenizer.encode(PROMPT, add_special=False)) == PROMPT
