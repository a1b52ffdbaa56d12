"""Who shares a folder of files with others leaves some of it to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.core.errors import InvalidRequest
from tokenmill.net.system import new_id
from tokenmill.server.files.store import FileRecord, FileStore, has_place


def taken(owner: str, others: int, most: int) -> int:
    """How many an owner can take, one after the other, where others have some."""
    own = 0
    while has_place(owner, own, others + own, most):
        own += 1
    return own


def test_each_owner_can_leave_half_of_what_is_free() -> None:
    """And who shares with nobody has all."""
    assert taken("", 0, 64) == 64 and taken("", 60, 64) == 4
    assert [taken("a", others, 64) for others in (0, 32, 48, 62, 63, 64)] == [32, 16, 8, 1, 0, 0]


def record(name: str, owner: str, size_bytes: int) -> FileRecord:
    return FileRecord(name, owner, "x", "batch", size_bytes, 1, 2**40)


def test_one_owners_files_leave_room_for_anothers(tmp_path: Path) -> None:
    """By their number and by their bytes; the refusal tells nothing of others."""
    store = FileStore(str(tmp_path), new_id, max_files=8, max_bytes=800)
    for number in range(4):
        with store.uploading("a") as grow:
            grow(50)
        store._files[str(number)] = record(str(number), "a", 50)
    with pytest.raises(InvalidRequest, match="You have 4 files"), store.uploading("a"):
        pass
    with store.uploading("b") as grow:
        grow(200)
        grow(100)
        with pytest.raises(InvalidRequest, match="Your files take as much as they may now"):
            grow(1)
    with store.uploading("") as grow:
        grow(600)
        with pytest.raises(InvalidRequest, match="take all"):
            grow(1)
