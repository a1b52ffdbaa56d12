"""Where a server keeps what outlives it: a private folder by default, another by name, or nowhere."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tokenmill.cli.main import main
from tokenmill.cli.state import default_state_dir, open_access, open_accounting, open_answer_store, open_response_store
from tokenmill.control.tenants.store import TenantStore
from tokenmill.core.errors import ConfigError
from tokenmill.server.resume.store import ResumeStore
from tokenmill.state import database


def test_the_state_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path / "own"))
    assert default_state_dir() == tmp_path / "own"
    monkeypatch.delenv("TOKENMILL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "tokenmill"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / ".local" / "state" / "tokenmill"


def test_responses_are_kept_unless_that_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path / "state"))
    assert open_response_store("off", {}) is None
    assert not (tmp_path / "state").exists()
    for chosen, path in (
        (None, tmp_path / "state" / "kept.db"),
        (str(tmp_path / "mine.db"), tmp_path / "mine.db"),
    ):
        store = open_response_store(chosen, {})
        assert store is not None and path.is_file()
        store.close()


def test_a_chosen_file_that_fails_stops_the_start_and_the_default_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who named a file wants it; who named none wants a server."""
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(ConfigError, match="--responses-store"):
        open_response_store(str(blocked / "r.db"), {})
    monkeypatch.setenv("TOKENMILL_STATE", str(blocked))
    assert open_response_store(None, {}) is None
    assert "not kept" in caplog.text


def _refuse(*_: object) -> str:
    raise sqlite3.OperationalError("database or disk is full")


def test_what_no_page_shows_is_found_by_reading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that is none in a whole file of tenants is damage, which a backup mends; one of a later version is not."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    path = tmp_path / "control.db"
    store = TenantStore(str(path))
    store.create_key("a", "t")
    store.close()
    assert main(["state", "backup"]) == 0 and main(["state", "check"]) == 0

    def change(sql: str) -> None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(sql)

    change("UPDATE key SET hint = CAST(x'ff' AS TEXT)")
    with pytest.raises(ConfigError, match=r"is damaged.*tokenmill state repair --tenants"):
        open_access(None, ())
    assert main(["state", "check"]) == 1
    with monkeypatch.context() as patched:  # as a full disk does
        patched.setattr(database, "set_aside", _refuse)
        assert main(["state", "repair"]) == 1 and main(["state", "check"]) == 1, "it stays, and lets nobody in"
    assert main(["state", "repair"]) == 0 and main(["state", "check"]) == 0
    change("UPDATE tenant SET settings = '{\"of_a_later_version\":1}'")
    capsys.readouterr()
    assert main(["state", "check"]) == 1 and main(["state", "repair"]) == 1
    assert "of_a_later_version" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"cannot be used.*of_a_later_version"):
        open_access(None, ())


def test_a_file_that_is_there_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where nobody named it: what it held was a promise."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    (tmp_path / "usage").mkdir()
    for name, flag, opened in (
        ("kept.db", "--idempotency-store", lambda: open_answer_store(None, {})),
        ("kept.db", "--responses-store", lambda: open_response_store(None, {})),
        ("answers.db", "--idempotency-store", lambda: open_answer_store(None, {})),
        ("responses.db", "--responses-store", lambda: open_response_store(None, {})),
        ("usage/usage.db", "--usage-dir", lambda: open_accounting(None, 0)),
        ("tenants.db", "--tenants", lambda: open_access(None, ())),
        ("control.db", "--tenants", lambda: open_access(None, ())),
        ("control.db", "--tenants", lambda: open_accounting(None, 0)),
    ):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=f"{flag} .* is damaged: it has 0 bytes.*remove it"):
            opened()
        (tmp_path / name).unlink()
    assert not caplog.records


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """Another program's database, and what is no database: refused by the option's name, and not changed."""
    foreign, text = tmp_path / "usage" / "usage.db", tmp_path / "text" / "usage.db"
    foreign.parent.mkdir()
    text.parent.mkdir()
    with contextlib.closing(sqlite3.connect(foreign)) as other:
        other.execute("CREATE TABLE notes (words TEXT)")
    text.write_text("This is no database, but a text that is long enough to be taken for one." * 10)
    for path in (foreign, text):
        before = path.read_bytes()
        for param, opened in (
            ("responses_store", lambda path: open_response_store(str(path), {})),
            ("idempotency_store", lambda path: open_answer_store(str(path), {})),
            ("tenants", lambda path: open_access(str(path), ())),
            ("usage_dir", lambda path: open_accounting(str(path.parent), 0)),
            ("resume_file", lambda path: ResumeStore(str(path), max_bytes=1, kept_s=1.0).open()),
        ):
            with pytest.raises(ConfigError) as caught:
                opened(path)
            assert caught.value.param == param and path.read_bytes() == before
