"""`tokenmill usage`: what a server's folder says, as a table and as JSON, and one line for what cannot be."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tokenmill.cli.main import main
from tokenmill.control.usage.journal import Account, Journal


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With two tenants, the journal of the one still open as a running server has it."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    folder = tmp_path / "usage"
    folder.mkdir()
    for number, tenant in enumerate(("alice", "bob"), 1):
        journal = Journal(folder, time.time)
        journal.open()
        for model in ("small", "large"):
            account = journal.number_of(Account(tenant, f"key_{tenant}", model))
            journal.append([(account, number, 10 * number, number, 5 * number, "")])
        if tenant == "alice":
            journal.close()
    return folder


def test_it_shows_who_used_what(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["from", "tenant", "model", "calls", "prompt", "cached", "output"]
    assert [row.split()[1:] for row in rows] == [
        ["alice", "large", "1", "10", "1", "5"],
        ["alice", "small", "1", "10", "1", "5"],
        ["bob", "large", "2", "20", "2", "10"],
        ["bob", "small", "2", "20", "2", "10"],
    ]
    assert main(["usage", "--by", "key", "--tenant", "bob", "--json", "--bucket", "1h", "--since", "2h"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["api_key_id"] == "key_bob" and told["output_tokens"] == 20 and told["start_time"] % 3600 == 0


def test_what_cannot_be_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for args, said in (
        (["--usage-dir", str(tmp_path / "none")], "there is no folder"),
        (["--usage-dir", "off"], "name a folder"),
        (["--since", "1h", "--until", "2h"], "--since must be before --until"),
    ):
        assert main(["usage", *args]) == 2
        line = capsys.readouterr().err
        assert said in line and line.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["usage", "--since", "tomorrow"])
    assert "2026-01-31" in capsys.readouterr().err
