"""The journal's file: private, of one life, bounded, and never in the engine's way."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.net import journal
from tokenmill.net.journal import NUM_KEPT, journal_file


def write(path: Path, *entries: str, line_of: Callable[[str], str] = str) -> list[str]:
    with journal_file(str(path), "header", line_of) as add:
        for entry in entries:
            add(entry)
    return path.read_text().splitlines() if path.exists() else []


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_it_says_that_it_holds_prompts_and_only_its_owner_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the umask is."""
    before = os.umask(0)
    try:
        assert write(tmp_path / "j", "a", "b") == ["header", "a", "b"]
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600
    (line,) = said(caplog, logging.WARNING)
    assert "all prompts and answers" in line and str(tmp_path / "j") in line


def test_each_life_has_a_file_and_the_oldest_goes(tmp_path: Path) -> None:
    for life in range(NUM_KEPT + 3):
        write(tmp_path / "j", f"life {life}")
    found = {path.name: path.read_text().split("\n")[1] for path in tmp_path.iterdir()}
    last = NUM_KEPT + 2
    assert found == {"j": f"life {last}", **{f"j.{n}": f"life {last - n}" for n in range(1, NUM_KEPT + 1)}}


@pytest.mark.parametrize("kind", ["link", "link to a journal", "folder", "file", "pipe"])
def test_what_is_no_journal_keeps_its_name_and_its_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A model, a folder or a device that is named by mistake is neither renamed nor written to."""
    other, path = tmp_path / "other", tmp_path / "j"
    other.write_text("header, as it happens" if kind == "link to a journal" else "precious")
    if kind.startswith("link"):
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("precious")
    before = path.lstat()
    with journal_file(str(path), "header", str) as add:
        add("a")
    (line,) = said(caplog, logging.ERROR)
    assert "something that is no journal has this name" in line
    assert sorted(each.name for each in tmp_path.iterdir()) == ["j", "other"]
    after = path.lstat()
    assert (before.st_ino, before.st_mode, before.st_mtime_ns) == (after.st_ino, after.st_mode, after.st_mtime_ns)
    assert other.read_text() in ("precious", "header, as it happens")


def test_it_is_written_while_the_engine_runs(tmp_path: Path) -> None:
    """A killed engine leaves all but the last moment."""
    with journal_file(str(tmp_path / "j"), "header", str) as add:
        add("a")
        for _ in range(3000):
            if (tmp_path / "j").read_text() == "header\na\n":
                return
            time.sleep(0.01)
    raise AssertionError("not written in 30 s")


def test_it_ends_where_it_would_grow_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a line; what is there can be replayed."""
    monkeypatch.setattr(journal, "MAX_BYTES", 100)
    assert write(tmp_path / "j", *(f"entry {n}" for n in range(50))) == ["header", *(f"entry {n}" for n in range(11))]
    (line,) = said(caplog, logging.ERROR)
    assert "ends here: it has reached" in line


def test_it_ends_where_writing_is_too_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BEHIND", 5)
    monkeypatch.setattr(journal, "_REST_S", 0.5)
    assert write(tmp_path / "j", *"abcdefgh") == ["header"]
    (line,) = said(caplog, logging.ERROR)
    assert "slower than the engine" in line


def test_a_full_disk_ends_it_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And entries that come after that cost nothing."""
    number = 0

    def write_some(fd: int, data: bytes) -> int:
        nonlocal number
        number += 1
        if number > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    real = os.write
    monkeypatch.setattr(journal.os, "write", write_some)
    with journal_file(str(tmp_path / "j"), "header", str) as add:
        for _ in range(3000):
            add("entry")
            time.sleep(0.01)
            if said(caplog, logging.ERROR):
                break
    (line,) = said(caplog, logging.ERROR)
    assert "No space left" in line and "The engine goes on" in line


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert write(tmp_path / "no" / "folder" / "j", "a") == []
    (line,) = said(caplog, logging.ERROR)
    assert "No such file or directory" in line


def test_an_entry_that_has_no_text_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(entry: str) -> str:
        raise TypeError(f"{entry} has no text")

    assert write(tmp_path / "j", "a", line_of=fail) == ["header"]
    assert "has no text" in said(caplog, logging.ERROR)[0]
