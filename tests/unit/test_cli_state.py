"""Where a server keeps what outlives it: a private folder by default, another by name, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.cli.state import default_state_dir, open_response_store
from tokenmill.core.errors import ConfigError


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
    assert open_response_store("off") is None
    assert not (tmp_path / "state").exists()
    for chosen, path in (
        (None, tmp_path / "state" / "responses.db"),
        (str(tmp_path / "mine.db"), tmp_path / "mine.db"),
    ):
        store = open_response_store(chosen)
        assert store is not None and path.is_file()
        store.close()


def test_a_chosen_file_that_fails_stops_the_start_and_the_default_one_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who named a file wants it; who named none wants a server."""
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(ConfigError, match="--responses-store"):
        open_response_store(str(blocked / "r.db"))
    monkeypatch.setenv("TOKENMILL_STATE", str(blocked))
    assert open_response_store(None) is None
    assert "not kept" in caplog.text
