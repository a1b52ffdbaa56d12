"""Files of earlier versions, as they were written then, are read as what they were."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from test_resume_store import ANSWER, CALL, OUTPUTS

from tokenmill.api.responses.history import Record
from tokenmill.cli.state import open_kept_stores
from tokenmill.core.errors import ConfigError, Unavailable
from tokenmill.server.idempotency.store import AnswerStore, Taped
from tokenmill.server.response_store import ResponseStore
from tokenmill.server.resume.store import ADAPTER, ResumeStore

ANSWERS = """
CREATE TABLE answer (
    key BLOB PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, digest BLOB NOT NULL, status INTEGER NOT NULL,
    headers BLOB NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX answer_age ON answer (created_s, size);
CREATE INDEX answer_owner ON answer (owner, created_s, size);
PRAGMA application_id=0x746D494B; PRAGMA user_version=1;
"""
RESPONSES = """
CREATE TABLE response (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s REAL NOT NULL, previous TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX response_age ON response (created_s, size_bytes);
CREATE INDEX response_owner ON response (owner, created_s, size_bytes);
PRAGMA application_id=0x746D5253; PRAGMA user_version=1;
"""
STREAMS = """
CREATE TABLE call (key INTEGER PRIMARY KEY, created_s REAL NOT NULL, call BLOB NOT NULL);
CREATE TABLE output (
    call INTEGER NOT NULL REFERENCES call (key) ON DELETE CASCADE, number INTEGER NOT NULL, output BLOB NOT NULL,
    PRIMARY KEY (call, number)
) WITHOUT ROWID;
CREATE TABLE answer (
    key INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, created_s REAL NOT NULL,
    status INTEGER NOT NULL, headers BLOB NOT NULL, body BLOB NOT NULL, size INTEGER NOT NULL
);
CREATE TABLE loaded (
    kind TEXT NOT NULL, name TEXT NOT NULL, what BLOB NOT NULL, PRIMARY KEY (kind, name)
) WITHOUT ROWID;
PRAGMA application_id=0x746D5246; PRAGMA user_version=1;
"""
NOW_S = 1e9
encode = msgspec.msgpack.encode


def write(path: Path, schema: str, *rows: tuple[str, tuple[object, ...]]) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.executescript(schema)
        for table, values in rows:
            database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
        database.commit()


def written(folder: Path, created_s: float) -> None:
    def row(key: str, status: int, body: bytes) -> tuple[str, tuple[object, ...]]:
        name = hashlib.sha256(f"2 me {key}".encode()).digest()
        headers = encode(((b"a", b"b"),) if body else ())
        return "answer", (name, "me", created_s, b"digest" if body else b"", status, headers, body, len(body))

    write(folder / "answers.db", ANSWERS, row("done", 200, b"body"), row("begun", 0, b""), row("lost", -1, b""))
    response = ("response", ("resp_1", "me", created_s, "resp_0", 9, b'{"a":1}', b"[]"))
    write(folder / "responses.db", RESPONSES, response)


async def check(answers: AnswerStore, responses: ResponseStore) -> None:
    assert await answers.claim("me", "done") == Taped(b"digest", 200, ((b"a", b"b"),), b"body")
    assert await answers.claim("me", "begun") is None
    with pytest.raises(Unavailable, match="was carried out"):
        await answers.claim("me", "lost")
    assert await responses.get("me", "resp_1") == Record("resp_1", "me", "resp_0", b'{"a":1}', b"[]")
    assert await responses.get("you", "resp_1") is None


def test_answers_and_responses_of_before_are_found_in_the_file_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    written(tmp_path, time.time() - 3600)
    responses, answers = open_kept_stores(None, None, {})
    assert answers is not None and responses is not None
    asyncio.run(check(answers, responses))
    answers.close()
    responses.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["answers.db", "kept.db", "responses.db"]


def test_a_file_that_a_flag_names_is_not_taken_over_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the form of now, whatever its name is; what the other kind had is taken over."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    written(tmp_path, time.time() - 3600)
    for _ in range(2):
        stores = open_kept_stores(str(tmp_path / "responses.db"), None, {})
        responses, answers = stores
        assert answers is not None and responses is not None
        asyncio.run(check(answers, responses))
        answers.close()
        responses.close()
    unnamed, _ = open_kept_stores(None, "off", {})
    assert unnamed is not None
    unnamed.close()


def test_what_is_off_stops_no_start_and_is_taken_over_when_it_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    written(tmp_path, time.time() - 3600)
    whole = (tmp_path / "responses.db").read_bytes()
    (tmp_path / "responses.db").write_bytes(b"damaged" + whole[7:])
    off, answers = open_kept_stores("off", None, {})
    assert off is None and answers is not None
    answers.close()
    with pytest.raises(ConfigError, match=r"--responses-store .*responses.db is damaged"):
        open_kept_stores(None, "off", {})
    (tmp_path / "responses.db").write_bytes(whole)
    responses, answers = open_kept_stores(None, None, {})
    assert answers is not None and responses is not None
    asyncio.run(check(answers, responses))
    answers.close()
    responses.close()


def test_answers_and_responses_of_before_are_found_in_files_of_their_own(tmp_path: Path) -> None:
    written(tmp_path, NOW_S - 3600)
    answers = AnswerStore(str(tmp_path / "answers.db"), wall_s=lambda: NOW_S)
    responses = ResponseStore(str(tmp_path / "responses.db"), wall_s=lambda: NOW_S)
    for store in (answers, responses):
        store.open()
    asyncio.run(check(answers, responses))
    for store in (answers, responses):
        store.close()


def test_streams_of_before_go_on(tmp_path: Path) -> None:
    """Those under way with their outputs, those that ended, what was loaded; by their age of then."""
    path = tmp_path / "resume.db"
    write(
        path,
        STREAMS,
        ("call", (3, NOW_S - 10, encode(CALL))),
        ("call", (4, NOW_S - 70, encode(CALL))),
        ("output", (3, 1, encode(OUTPUTS[0]))),
        ("output", (3, 2, encode(OUTPUTS[1]))),
        ("output", (4, 1, encode(OUTPUTS[0]))),
        ("answer", (1, "me", "cmpl-0", "given", NOW_S - 20, 200, encode(ANSWER.headers), b"older", 5)),
        ("answer", (2, "me", "cmpl-1", "given", NOW_S - 10, 200, encode(ANSWER.headers), ANSWER.body, 40)),
        ("loaded", ("adapter", "own", encode({"path": "x"}))),
    )
    store = ResumeStore(str(path), max_bytes=1000, kept_s=60, wall_s=lambda: NOW_S)
    store.open()
    assert store.loaded(ADAPTER) == [("own", {"path": "x"})] and store.new_key() == 5

    async def look() -> None:
        assert [(each.key, each.call, each.outputs) for each in await store.unfinished()] == [(3, CALL, OUTPUTS[:2])]
        assert await store.find("me", "given") == ANSWER == await store.find("me", "cmpl-1")
        older = await store.find("me", "cmpl-0")
        assert older is not None and older.body == b"older" and await store.find("you", "cmpl-0") is None

    asyncio.run(look())
    store.close()
