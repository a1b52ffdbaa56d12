"""Keys that a server gives out: who may call, what they manage, and how soon a server knows what another has done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tenants import ask, models, serving, until

from tokenmill.cli.main import main
from tokenmill.control.tenants.settings import TenantSettings
from tokenmill.control.tenants.store import TenantStore
from tokenmill.server.http import OPEN_PATHS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TenantStore]:
    made = TenantStore(str(tmp_path / "tenants.db"))
    yield made
    made.close()


def test_the_first_key_closes_a_running_server_and_the_end_of_the_last_does_not_open_it(store: TenantStore) -> None:
    """Made by the command line while the server runs; a new key is good at once, a revoked one bad within a second."""
    with serving(Path(store.path)) as served:
        assert models(served) == 200
        key = store.create_key("a", "t")[1]
        until(served, "", 401, 1.0)
        assert models(served, key) == 200
        further = store.create_key("b", "t")[1]
        assert models(served, further) == 200
        assert models(served, "tm-wrong") == 401
        for name in ("a", "b"):
            store.revoke_keys(name)
        until(served, key, 401, 1.0)
        until(served, further, 401, 1.0)
        assert models(served) == 401


def test_two_front_ends_share_keys(store: TenantStore) -> None:
    """What one does over HTTP, the other knows: of a new key at once, of a revoked one within a second."""
    admin = store.create_key("ops", "ops", is_admin=True)[1]
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving(Path(store.path))) for _ in range(2))
        status, made, _ = ask(one, "POST", "/admin/keys", {"name": "new", "tenant": "t"}, admin)
        assert (status, made["tenant"], made["key"][:3]) == (201, "t", "tm-")
        assert models(other, made["key"]) == 200
        assert ask(other, "DELETE", f"/admin/keys/{made['id']}", key=admin)[1]["state"] == "revoked"
        assert models(other, made["key"]) == 401
        until(one, made["key"], 401, 1.0)


def test_the_admin_api_manages_tenants_and_keys(store: TenantStore) -> None:
    """Create, list, change, rotate with an overlap, revoke, delete; no key is shown twice."""
    admin = store.create_key("ops", "ops", is_admin=True)[1]
    with serving(Path(store.path)) as served:

        def call(method: str, path: str, body: Any = None, key: str = admin) -> tuple[int, Any]:
            return ask(served, method, f"/admin{path}", body, key)[:2]

        status, tenant = call("POST", "/tenants", {"id": "t", "requests_per_minute": 5, "name": "Team"})
        assert (status, tenant["requests_per_minute"], tenant["name"]) == (201, 5, "Team")
        assert call("PATCH", "/tenants/t", {"weight": 3})[1] == {**tenant, "weight": 3}
        assert tenant["tokens_per_minute"] is tenant["ttft_ms"] is tenant["shorten_to"] is None
        unlimited = call("PATCH", "/tenants/t", {"requests_per_minute": None})[1]
        assert unlimited == {**tenant, "weight": 3, "requests_per_minute": None}
        assert [each["id"] for each in call("GET", "/tenants")[1]["data"]] == ["ops", "t"]
        first = call("POST", "/keys", {"name": "k", "tenant": "t"})[1]
        second = call("POST", f"/keys/{first['id']}/rotate", {"overlap_s": 60})[1]
        assert models(served, first["key"]) == models(served, second["key"]) == 200
        third = call("POST", f"/keys/{second['id']}/rotate")[1]
        assert (models(served, second["key"]), models(served, third["key"])) == (401, 200)
        listed = call("GET", "/keys?tenant=t")[1]
        assert [each["state"] for each in listed["data"]] == ["live", "revoked", "live"]
        assert not any(each["key"][3:] in json.dumps(listed) for each in (first, second, third))
        assert call("GET", "/tenants", key=third["key"])[0] == 403
        assert call("DELETE", "/tenants/t")[1]["keys_revoked"] == 2
        assert models(served, third["key"]) == 401
        for method, path, body, wrong, field in [
            ("POST", "/tenants", {"id": "t"}, 400, "tenant"),
            ("POST", "/tenants", {"id": "u", "weight": -1}, 400, "weight"),
            ("POST", "/tenants", {"id": "u", "wieght": 1}, 400, "wieght"),
            ("POST", "/tenants", {}, 400, "id"),
            ("PATCH", "/tenants/nobody", {"weight": 1}, 404, "tenant"),
            ("PATCH", "/tenants/ops", {"kv_share": True}, 400, "kv_share"),
            ("GET", "/tenants/nobody", None, 404, "tenant"),
            ("POST", "/keys", {"name": "k", "scopes": ["root"]}, 400, "scopes"),
            ("POST", "/keys", {"name": "ops"}, 400, "name"),
            ("POST", "/keys", {"name": "k", "expires_at": 1}, 400, "expires_at"),
            ("POST", "/keys/nothing/rotate", {}, 404, "key"),
            ("POST", "/keys/ops/rotate", {"overlap_s": -1}, 400, "overlap_s"),
            ("DELETE", "/keys/nothing", None, 404, "key"),
        ]:
            status, told = call(method, path, body)
            assert (status, told["error"]["param"]) == (wrong, field), (method, path, body, told)


def test_without_keys_the_command_line_alone_manages_them(store: TenantStore) -> None:
    """Whoever reaches a loopback port is not whoever owns the server's files."""
    with serving(Path(store.path)) as served:
        status, told, _ = ask(served, "POST", "/admin/keys", {"name": "mine", "scopes": ["admin"]})
        assert status == 403 and "command line" in told["error"]["message"]
        assert store.all_keys() == []


def test_every_path_but_those_of_monitoring_needs_a_key(store: TenantStore) -> None:
    """Whatever the application answers is walked, so that a path that is added is in this test."""
    key = store.create_key("a", "t")[1]
    with serving(Path(store.path), files_dir=str(Path(store.path).parent / "files")) as served:
        walked = [(method, route.path) for route in served.app.routes for method in route.methods]
        assert len(walked) > 60
        for method, path in walked:
            status = ask(served, method, path.replace("{name:path}", "x").replace("{", "").replace("}", ""))[0]
            is_open = path in OPEN_PATHS or path.startswith("/console")  # whose files have nothing of anybody's
            assert (status == 401) is not is_open, (method, path, status)
        assert models(served, key) == 200


def test_no_key_but_an_admins_opens_what_manages_the_server(store: TenantStore) -> None:
    """Every path below /admin is walked, with the key of a tenant and with one of --api-key."""
    key = store.create_key("a", "a")[1]
    with serving(Path(store.path), api_keys=("plain",)) as served:
        walked = [(m, route.path) for route in served.app.routes if "/admin" in route.path for m in route.methods]
        assert len(walked) > 15
        for method, path in walked:
            for mine in (key, "plain"):
                status = ask(served, method, path.replace("{", "").replace("}", ""), {}, mine)[0]
                assert status == 403, (method, path, status)


def test_no_tenant_takes_anothers_adapter_away(store: TenantStore, tmp_path: Path) -> None:
    """What all share is loaded and unloaded with an admin key, or one of --api-key."""
    key, admin = store.create_key("a", "a")[1], store.create_key("ops", "ops", is_admin=True)[1]
    given = {"lora_dir": str(tmp_path), "api_keys": ("plain",)}
    with serving(store.path, **given) as served:
        load, forget = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        both = {"lora_name": "l", "lora_path": "l"}
        assert ask(served, "POST", load, both, key)[0] == 403
        for good in (admin, "plain"):
            assert ask(served, "POST", load, both, good)[0] != 403
            assert ask(served, "POST", forget, both, key)[0] == 403
            assert ask(served, "POST", forget, both, good)[0] != 403


def test_keys_of_flags_and_of_the_store_are_served_side_by_side(store: TenantStore) -> None:
    """A key of --api-key is no admin."""
    key = store.create_key("a", "t")[1]
    with serving(Path(store.path), api_keys=("plain",)) as served:
        assert models(served, key) == models(served, "plain") == 200
        assert ask(served, "GET", "/admin/keys", key="plain")[0] == 403


def test_the_command_line_prints_the_key_as_its_last_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: TenantStore
) -> None:
    """create, rotate, list, revoke, and what a tenant may use, beside a running server."""
    where = ["--tenants", store.path]

    def run(*args: str) -> str:
        assert main([*args, *where]) == 0
        return capsys.readouterr().out

    with serving(Path(store.path)) as served:
        key = run("keys", "create", "alice", "--requests-per-minute", "60", "--expires-in", "30d").split()[-1]
        assert models(served, key) == 200
        assert store.tenant("alice").settings == TenantSettings(requests_per_minute=60)
        rotated = run("keys", "rotate", "alice", "--overlap", "10m").split()[-1]
        assert models(served, key) == models(served, rotated) == 200
        assert "replaced" in run("keys", "list") and key not in run("keys", "list", "--all", "--json")
        said = dict(line.split() for line in run("tenants", "set", "alice", "--weight", "2").splitlines())
        assert said["requests_per_minute"] == "60" and said["tokens_per_minute"] == said["profile"] == "none"
        assert said["weight"] == "2.0" and said["priority_class"] == "1"
        assert json.loads(run("tenants", "show", "alice", "--json"))["data"][0]["weight"] == 2
        assert run("keys", "revoke", "alice").count("revoked") == 2
        until(served, rotated, 401, 1.0)
    for wrong in (
        ["keys", "revoke", "alice"],
        ["tenants", "set", "alice"],
        ["tenants", "set", "alice", "--weight", "0"],
    ):
        assert main([*wrong, *where]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["keys", "create", "x", "--expires-in", "soon"])


def test_a_public_address_without_keys_is_refused_before_a_model_is_loaded(tmp_path: Path, smollm2: Path) -> None:
    """One line and exit code 2, and the line says what to do."""
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(smollm2), "--host", "0.0.0.0", "--port", "0"]
    env = {**os.environ, "TOKENMILL_STATE": str(tmp_path / "state")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    assert "keys create" in done.stderr and "--insecure" in done.stderr
