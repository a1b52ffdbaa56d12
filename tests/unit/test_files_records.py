"""Records of files and batches in the kept file: read once from where earlier versions had them, and never lost."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from test_batch_runner import batch, record

from tokenmill.cli.main import main
from tokenmill.cli.state import file_records
from tokenmill.core.errors import ConfigError
from tokenmill.net.system import new_id
from tokenmill.server.files.store import FileStore


def earlier(folder: Path) -> None:
    """A folder as earlier versions left it: a file, and a batch that has not ended."""
    for part in ("contents", "files", "batches"):
        (folder / part).mkdir(parents=True)
    (folder / "contents" / "file-in").write_bytes(b"x")
    (folder / "contents" / "out").write_bytes(b"x")
    (folder / "files" / "file-in.json").write_bytes(msgspec.json.encode(record()))
    (folder / "batches" / "batch_b.json").write_bytes(msgspec.json.encode(batch()))


def opened(folder: Path) -> FileStore:
    store = FileStore(str(folder), new_id)
    assert store.open()
    store.clean({"out"})
    return store


def look(folder: Path) -> tuple[list[str], list[str]]:
    """(ids of files, of batches) that a server finds."""
    store = opened(folder)
    try:
        return [each.id for each in store.files("")], [each.id for each in store.batches()]
    finally:
        store.close()


def test_json_files_of_earlier_versions_are_read_once(tmp_path: Path) -> None:
    """They stay as they were; what is deleted or changed since is so for good."""
    earlier(tmp_path)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert look(tmp_path) == (["file-in"], ["batch_b"])

    async def change() -> None:
        store = opened(tmp_path)
        await store.delete(store.file("", "file-in"))
        await store.write_batch(batch(status="completed"))
        store.close()

    asyncio.run(change())
    store = opened(tmp_path)
    assert store.files("") == [] and [each.status for each in store.batches()] == ["completed"]
    assert not store.content("file-in").exists() and store.content("out").exists()
    store.remove_batch(batch())
    store.close()
    assert look(tmp_path) == ([], []) and {each: each.read_bytes() for each in whole} == whole


def test_what_a_crash_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """Contents that no record names: beside a file of records that has been in use they were never files. Where that is
    new the old one was lost, and they are set aside."""
    earlier(tmp_path)
    look(tmp_path)
    rest = tmp_path / "contents" / "rest"
    rest.write_bytes(b"x")
    look(tmp_path)
    assert not rest.exists() and not (tmp_path / "damaged" / "rest").exists()
    for path in (*tmp_path.glob("kept.db*"), *tmp_path.rglob("*.json")):
        path.unlink()
    assert look(tmp_path) == ([], [])
    assert (tmp_path / "damaged" / "file-in").read_bytes() == b"x" and (tmp_path / "contents" / "out").exists()


@pytest.mark.parametrize("where", ["json", "row", "content"])
def test_a_damaged_record_is_set_aside_and_the_others_stay(tmp_path: Path, where: str) -> None:
    """Nobody starts before that, wherever the damage is."""
    earlier(tmp_path)
    if where == "json":
        (tmp_path / "batches" / "batch_b.json").write_bytes(b"{")
    else:
        look(tmp_path)
    if where == "row":
        with closing(sqlite3.connect(tmp_path / "kept.db")) as database, database:
            database.execute("UPDATE kept SET body = x'7b' WHERE kind = 'batch'")
    if where == "content":
        (tmp_path / "contents" / "file-in").write_bytes(b"")
    flags = ("--files-dir", str(tmp_path), "--tenants", "off", "--usage-dir", "off")
    store = FileStore(str(tmp_path), new_id)
    with pytest.raises(ConfigError, match="tokenmill state repair --files-dir"):
        store.open()
    store.close()
    assert main(["state", "check", *flags]) == 1
    assert main(["state", "repair", *flags]) == 0 and main(["state", "check", *flags]) == 0
    lost = "file-in" if where == "content" else "batch_b"
    assert (tmp_path / "damaged" / f"{lost}.json").exists()
    assert look(tmp_path) == (([], ["batch_b"]) if where == "content" else (["file-in"], []))


def test_the_repair_that_a_server_names_is_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the folder that is used by default, whose records are elsewhere: what is whole stays."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    folder = tmp_path / "files"
    earlier(folder)

    def opened() -> FileStore:
        store = FileStore(str(folder), new_id, file_records(str(folder), {}))
        store.open()
        return store

    async def add() -> None:
        store = opened()
        store.content("later").write_bytes(b"x")
        await store.add(msgspec.structs.replace(record(), id="later"))
        store.close()

    asyncio.run(add())
    (folder / "contents" / "file-in").write_bytes(b"")
    assert main(["state", "repair", "--files-dir", str(folder)]) == 0 and main(["state", "check"]) == 0
    store = opened()
    assert [each.id for each in store.files("")] == ["later"] and store.content("later").exists()
    store.close()


def test_what_cannot_be_written_is_told_as_a_disk_says_it(tmp_path: Path) -> None:
    """Nothing of it counts; with room again all goes on."""

    async def test() -> None:
        store = opened(tmp_path)

        def limit(pages: int) -> None:
            store._kept.ask(lambda: store._kept.database.execute(f"PRAGMA max_page_count={pages}").fetchall())

        limit(1)
        large = msgspec.structs.replace(record(), filename="x" * 100_000)
        store.content("file-in").write_bytes(b"x")
        with pytest.raises(OSError, match="full"):
            await store.add(large)
        assert store.files("") == []
        limit(1 << 20)
        await store.add(large)
        store.close()

    asyncio.run(test())
    assert look(tmp_path) == (["file-in"], [])


def test_the_default_folder_shares_the_file_of_all_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that somebody named has its own, so that it can be moved as a whole."""
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    kept = file_records(str(tmp_path / "files"), {})
    assert kept is not None and kept.path == str(tmp_path / "kept.db")
    assert file_records(str(tmp_path / "other"), {}) is None
    store = FileStore(str(tmp_path / "files"), new_id, kept)
    assert store.open()
    asyncio.run(store.write_batch(batch()))
    store.close()
    assert (tmp_path / "kept.db").exists() and not (tmp_path / "files" / "kept.db").exists()
