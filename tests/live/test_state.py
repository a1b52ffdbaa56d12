"""State that cannot be trusted, or cannot be written any more: a server says so, with file and remedy, and refuses what
it cannot promise; nobody gets in without a key, nothing is billed twice, and what was backed up comes back."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, wait_until

from tokenmill.cli.main import main
from tokenmill.control.tenants.store import TenantStore

DAMAGES = {
    "0 bytes": lambda data: b"",
    "garbage": lambda data: b"\xff\xfe no database\n" * 3000,
    "truncated": lambda data: data[: len(data) // 3],
}
FILES = {
    "control.db": "--tenants",
    "kept.db": "--responses-store",
    "resume.db": "--resume-file",
}


def call(server: Server, path: str, body: Any, key: str = "", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        sent = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {}) | headers
        method = "GET" if body is None else "POST"
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def complete(server: Server, key: str = "", **headers: str) -> tuple[int, str]:
    return call(server, "/v1/completions", {"prompt": "The sea", "max_tokens": 3, "ignore_eos": True}, key, **headers)


def billed(server: Server, key: str) -> int:
    pages = json.loads(call(server, "/v1/usage?bucket_width=1d&limit=2", None, key)[1])
    return sum(each["output_tokens"] for bucket in pages["data"] for each in bucket["results"])


def refused_start(state: Path, *flags: str) -> str:
    """What a server says that does not start."""
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", "smollm2", "--port", "0", *flags]
    env = {**os.environ, "TOKENMILL_STATE": str(state)}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2, (found.stdout, found.stderr)
    return found.stderr


def spoil(path: Path, table: str) -> None:
    """Write over the first page of a table, in the file itself."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (number,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = database.execute("PRAGMA page_size").fetchone()
    with open(path, "rb+") as file:
        file.seek((number - 1) * size)
        file.write(b"\xa5" * size)


def stop(server: Server) -> None:
    server.process.terminate()
    wait_until(lambda: server.process.poll() is not None, "the server's end")


@pytest.fixture(scope="module")
def used(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(a state folder with something in each file, backed up; a key): not to be changed."""
    state = tmp_path_factory.mktemp("state")
    store = TenantStore(str(state / "control.db"))
    key = store.create_key("ops", "ops", is_admin=True)[1]
    store.close()
    with Server("--resume-file", str(state / "resume.db"), env={"TOKENMILL_STATE": str(state)}) as server:
        assert complete(server)[0] == 401
        assert complete(server, key, **{"idempotency-key": "first"})[0] == 200
        assert call(server, "/v1/responses", {"input": "hi", "max_output_tokens": 16}, key)[0] == 200
        stream = {"prompt": "The sea", "max_tokens": 3, "stream": True}
        assert call(server, "/v1/completions", stream, key)[0] == 200
        boundary = "x1"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        parts = [("purpose", "", "batch"), ("file", '; filename="a.jsonl"', "{}\n")]
        body = "".join(
            f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
            for name, more, value in parts
        )
        kind = {"content-type": f"multipart/form-data; boundary={boundary}", "authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/files", f"{body}--{boundary}--\r\n", kind)
        assert connection.getresponse().status == 200
        connection.close()
        stop(server)
    return state, key


@pytest.fixture
def state(used: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be damaged; commands work on it."""
    subprocess.run(["cp", "-a", str(used[0]), str(tmp_path / "state")], check=True)
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.mark.slow
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_no_server_starts_on_a_damaged_file(state: Path, file: str, damage: str) -> None:
    """Whatever became of it: exit code 2, the file and the command that helps; a file that was removed is none."""
    flags = ("--resume-file", str(state / "resume.db"))
    (state / file).write_bytes(DAMAGES[damage]((state / file).read_bytes()))
    said = refused_start(state, *flags)
    assert f"{FILES[file]} {state / file} is damaged" in said and "tokenmill state repair" in said, said
    assert "Traceback" not in said and main(["state", "check", *flags]) == 1


@pytest.mark.slow
def test_no_server_starts_on_damaged_files_and_batches(state: Path) -> None:
    (content,) = (state / "files" / "contents").iterdir()
    content.write_bytes(b"{")
    assert "--files-dir" in (said := refused_start(state)) and "1 of its 3 bytes" in said
    assert main(["state", "check"]) == 1
    assert main(["state", "repair"]) == 0 and main(["state", "check"]) == 0
    assert (state / "files" / "damaged" / f"{content.name}.json").exists() and not content.exists()


@pytest.mark.slow
def test_what_was_backed_up_comes_back(state: Path, used: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and usage from the backup, usage since then from journals that are left; it is said what is missing. Without
    a backup the keys' file stays, for a server without it would be open to all."""
    key = used[1]
    good = (state / "control.db").read_bytes()
    (state / "control.db").write_bytes(b"")
    assert main(["state", "repair"]) == 1
    assert "there is no good backup" in capsys.readouterr().out and (state / "control.db").read_bytes() == b""
    (state / "control.db").write_bytes(good)
    assert main(["state", "backup"]) == 0
    with Server(env={"TOKENMILL_STATE": str(state)}) as server:
        before = billed(server, key)
        assert complete(server, key)[0] == 200
        assert main(["state", "backup"]) == 0
        assert complete(server, key)[0] == 200
        assert billed(server, key) == before + 6
        os.kill(server.process.pid, 9)  # leaves its journal
        wait_until(lambda: server.process.poll() is not None, "the server's end")
    for name in FILES:
        (state / name).write_bytes(b"\xff garbage" * 999)
    assert main(["state", "backup"]) == 1, "a backup is not replaced by what is damaged"
    flags = ("--resume-file", str(state / "resume.db"))
    capsys.readouterr()
    assert main(["state", "repair", *flags]) == 0
    said = capsys.readouterr().out
    assert "revoke them anew" in said and "is missing" in said and said.count("restored from the backup") == 2, said
    assert len({each.name.removesuffix("-wal") for each in state.glob("*.damaged-*")}) == 3
    assert main(["state", "check", *flags]) == 0
    with Server(*flags, env={"TOKENMILL_STATE": str(state)}) as server:
        assert complete(server)[0] == 401
        assert billed(server, key) == before + 6


@pytest.mark.slow
def test_a_file_that_a_server_has_open_is_not_repaired(state: Path, used: tuple[Path, str]) -> None:
    """It would go on with the old one. The server itself goes on with the keys that it knows."""
    with Server(env={"TOKENMILL_STATE": str(state)}) as server:
        (state / "control.db").write_bytes(b"")
        assert main(["state", "repair"]) == 1 and (state / "control.db").read_bytes() == b""
        wait_until(lambda: "Keys and tenants stay as they were" in server.output, "a word about it")
        assert complete(server)[0] == 401 and complete(server, used[1])[0] == 200


@pytest.mark.slow
def test_keys_stay_as_they_are_where_only_sums_are_damaged(state: Path, used: tuple[Path, str]) -> None:
    """A running server goes on; the next one does not start; after the repair the same keys are good, without a
    backup."""
    path = state / "control.db"
    with Server(env={"TOKENMILL_STATE": str(state)}) as server:
        spoil(path, "usage")
        assert complete(server)[0] == 401 and complete(server, used[1])[0] == 200
        assert main(["keys", "create", "new", "--tenants", str(path)]) == 2
        stop(server)
    assert "is damaged" in refused_start(state) and main(["state", "repair"]) == 0
    assert not path.with_name("control.db.backup").exists()
    with Server(env={"TOKENMILL_STATE": str(state)}) as server:
        assert complete(server)[0] == 401 and complete(server, used[1])[0] == 200


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=768k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("no disk can be made here: " + made.stderr.decode().strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_on_a_full_disk_nothing_is_promised(smollm2: Path, tmp_path: Path) -> None:
    """A call whose repeat could not be answered is refused before it is computed; so is a response to be kept;
    what needs no disk is served. With room again all of it works."""
    with small_disk(tmp_path / "disk") as disk:
        flags = ("--idempotency-store", str(disk / "a.db"), "--responses-store", str(disk / "r.db"))
        with Server(*flags) as server:
            kept = {"idempotency-key": "before"}
            first = complete(server, **kept)
            assert first[0] == 200 and complete(server, **kept) == first
            with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
                while filler.write(b"x" * 512):
                    pass
            before = billed(server, "")
            for _ in range(2):
                status, said = complete(server, **{"idempotency-key": "during"})
                assert status == 503 and "Idempotency-Key" in said, (status, said)
            assert (found := complete(server, **kept)) == first, ("what is kept is still answered", found)
            assert billed(server, "") == before
            wanted = {"input": "hi", "max_output_tokens": 16, "store": True}
            statuses = [call(server, "/v1/responses", wanted)[0] for _ in range(3)]
            assert statuses[-1] == 503, statuses
            assert (
                json.loads(call(server, "/v1/responses", {"input": "hi", "max_output_tokens": 16})[1])["store"] is False
            )
            assert complete(server)[0] == 200
            (disk / "filler").unlink()
            again = complete(server, **{"idempotency-key": "during"})
            assert again[0] == 200 and complete(server, **{"idempotency-key": "during"}) == again
            assert call(server, "/v1/responses", wanted)[0] == 200
