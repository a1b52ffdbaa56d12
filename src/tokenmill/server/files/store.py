"""The folder of files and batches: what is in it is complete, and is there again after a crash.

    lock                held by the one server that uses the folder
    parts/ID            what is being uploaded
    contents/ID         the bytes of a file, or of one that a batch is still writing
    damaged/ID          what was set aside, which nothing deletes

Records are rows of a kept file: of the user's, for the folder that is used by default, else of a `kept.db` in the
folder. A file exists while its record does. A record is on the disk when it counts; contents come before the record
that names them and go after it. What no record names is removed when the folder is opened. Earlier versions had a JSON
file for each record, in files/ and batches/: these are read once, and stay. Folders have mode 0700, files 0600.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from ...api.json_encoder import encode_json
from ...core.errors import InvalidRequest, NotFound, Unavailable
from ...core.units import GiB, MiB, format_bytes
from ...state.database import Damaged, cannot_use, is_damage, transaction
from ...state.file import StateFile
from ...state.kept import KEPT, Kind, Row, insert
from .batch import Batch

MAX_FILE_BYTES = 200 * MiB
MAX_BYTES = 4 * GiB
MAX_FILES = 10_000
MAX_BATCHES = 10_000
FLAG = "--files-dir"
KEPT_S = 30 * 24 * 3600
"""A file is deleted so long after it was made, unless it was to go earlier."""

HIDDEN = "message_batch"
"""The purpose of files that no list shows: those of message batches, which are no files to their owners."""

_FILES, _BATCHES = Kind("file"), Kind("batch")
_OLD = "files"
"""By which the kept file knows that it has read the JSON files."""

_log = logging.getLogger(__name__)


class Received(NamedTuple):
    """What a new file has come to. kept_s: how long it is kept."""

    filename: str
    size_bytes: int
    kept_s: int


class FileRecord(msgspec.Struct, frozen=True):
    """A file. owner: whose it is; times in seconds since the epoch."""

    id: str
    owner: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: int
    expires_at: int


class FileStore:
    """`open` it before use. Only the event loop calls; what touches the disk for long runs in threads.

    new_id  as entropy.new_id
    kept    the file of records; None: one in the folder
    wall_s  seconds since the epoch
    """

    def __init__(
        self,
        folder: str,
        new_id: Callable[[str], str],
        kept: StateFile | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        max_files: int = MAX_FILES,
        max_file_bytes: int = MAX_FILE_BYTES,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self.new_id = new_id
        self.max_file_bytes = max_file_bytes
        self._max_bytes = max_bytes
        self._max_files = max_files
        self.wall_s = wall_s
        self._files: dict[str, FileRecord] = {}
        self._lock: IO[bytes] | None = None
        self._kept = kept or StateFile(str(self.folder / "kept.db"))
        self._is_loaded = False
        self._is_new = False  # before this process
        self._reads_json = False
        self.why_not = "The folder of files is not open."
        self._num_reserved_bytes = 0
        self._num_reserved = 0

    # ---- the folder ----

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self) -> bool:
        """`take` it and read what is in it. Raises ConfigError for a damaged one, and OSError."""
        if not self.take():
            return False
        try:
            self.load()
            if faults := self.faults():
                raise cannot_use(FLAG, self.folder, Damaged(next(iter(faults.values()))))
            if self._reads_json:
                self._kept.ask(self._import)
                self._reads_json = False
            rows = self._rows()
        except sqlite3.Error as error:
            if is_damage(error):
                raise cannot_use(FLAG, self.folder, Damaged(f"{self._kept.path}: {error}")) from error
            raise _disk_error(error) from error
        records = [msgspec.json.decode(row.body, type=FileRecord) for row in rows if row.kind == _FILES.name]
        self._files = {record.id: record for record in sorted(records, key=lambda each: (each.created_at, each.id))}
        return True

    def load(self, *, makes: bool = True) -> None:
        """Open the file of records. makes: where there is none. Raises sqlite3.Error and OSError."""
        if not makes and not os.path.lexists(self._kept.path):
            self._is_new = self._reads_json = True
            return
        self._kept.open()
        self._is_loaded = True

        def look() -> None:
            seen = self._kept.database.execute(KEPT.was_imported, (_OLD,)).fetchone()
            self._is_new = self._reads_json = seen is None

        self._kept.ask(look)

    def take(self) -> bool:
        """Take the folder; tells whether that went well. Otherwise `why_not` says why."""
        try:
            for part in ("", "parts", "contents"):
                (self.folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.fdopen(os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600), "rb")
        except OSError as error:
            self.why_not = f"The folder for files, {self.folder}, cannot be used: {error.strerror}."
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            self.why_not = (
                f"Another server of yours has the folder for files, {self.folder}; "
                "all else works, and --files-dir gives this one a folder of its own."
            )
            return False
        self._lock = lock
        return True

    def faults(self) -> dict[str, str]:
        """What is damaged, by the path of its record below the folder, and why."""
        found = {}
        for row in self._rows():
            name = _name(row)
            try:
                record = msgspec.json.decode(row.body, type=FileRecord if row.kind == _FILES.name else Batch)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                found[name] = f"{name} cannot be read: {error}"
                continue
            if isinstance(record, FileRecord) and (why := self._content_fault(record)):
                found[name] = why
        return found

    def set_faults_aside(self) -> dict[str, str]:
        """Move records that are damaged, and contents that no other record names, to a folder that nothing deletes."""
        found = self.faults()
        if not found:
            return found
        aside = self._aside()
        damaged = [row for row in self._rows() if _name(row) in found]
        for row in damaged:
            (aside / Path(_name(row)).name).write_bytes(row.body)
            if self._reads_json:
                (self.folder / _name(row)).unlink()

        def delete() -> None:
            with transaction(self._kept.database, flushed=True):
                for row in damaged:
                    Kind(row.kind).delete(self._kept.database, row.owner, row.key)

        if not self._reads_json:
            self._kept.ask(delete)
        named = {str(row.key) for row in self._rows() if row.kind == _FILES.name}
        named.update(name for batch in self.batches() for name in (batch.output_id, batch.error_id))
        self._remove_contents(named, aside)
        return found

    def _aside(self) -> Path:
        aside = self.folder / "damaged"
        aside.mkdir(mode=0o700, exist_ok=True)
        return aside

    def _remove_contents(self, named: set[str], aside: Path | None) -> None:
        """But for those named. aside: where they go; None: they are deleted."""
        for content in (self.folder / "contents").iterdir():
            if content.name in named:
                continue
            if aside is None:
                content.unlink()
            else:
                os.replace(content, aside / content.name)
                _log.warning("No record names %s; it is now in %s.", content, aside)

    def _content_fault(self, record: FileRecord) -> str:
        """What is wrong with the bytes of a file; "": all are there that were written."""
        try:
            size_bytes = self.content(record.id).stat().st_size
        except OSError as error:
            return f"the content of {record.id} cannot be read: {error.strerror}"
        if size_bytes < record.size_bytes:
            return f"{record.id} has {size_bytes} of its {record.size_bytes} bytes"
        return ""

    def is_taken(self) -> bool:
        """Whether another server has the folder."""
        if self._lock is not None:
            return False
        try:
            with open(self.folder / "lock", "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def clean(self, written: set[str]) -> None:
        """Remove contents that no record names. written: those that batches are still writing. Beside a new file of
        records they are set aside: the old one may have been lost."""
        for part in (self.folder / "parts").iterdir():
            part.unlink()
        self._remove_contents(self._files.keys() | written, self._aside() if self._is_new else None)

    def close(self, why: str = "The folder of files is not open.") -> None:
        """why: what `require_open` says from now on."""
        if self._is_loaded:
            self._kept.close()
            self._is_loaded = False
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        self.why_not = why

    def require_open(self) -> None:
        """Raises Unavailable."""
        if self._lock is None:
            raise Unavailable(self.why_not)

    # ---- files ----

    def files(self, owner: str, purpose: str | None = None) -> list[FileRecord]:
        """The owner's, the oldest first."""
        now = self.wall_s()
        return [
            each
            for each in self._files.values()
            if each.owner == owner
            and each.expires_at > now
            and each.purpose != HIDDEN
            and (purpose is None or each.purpose == purpose)
        ]

    def file(self, owner: str, identifier: str) -> FileRecord:
        """Raises NotFound, for files of others too."""
        found = self._files.get(identifier)
        if found is None or found.owner != owner or found.expires_at <= self.wall_s():
            raise NotFound(f"There is no file {identifier[:100]!r}.", param="file_id")
        return found

    def content(self, identifier: str) -> Path:
        """Where the bytes of a file are."""
        return self.folder / "contents" / identifier

    def part(self, identifier: str) -> Path:
        return self.folder / "parts" / identifier

    @contextlib.contextmanager
    def uploading(self, owner: str) -> Iterator[Callable[[int], None]]:
        """One file more, as long as the block lasts; what it gives is told how many bytes more it has. Raises
        InvalidRequest."""
        sizes = [each.size_bytes for each in self._files.values() if each.owner == owner]
        if not has_place(owner, len(sizes), len(self._files) + self._num_reserved, self._max_files):
            raise InvalidRequest(f"You have {len(sizes)} files here, as many as you may now; delete some.")
        own_bytes, size = sum(sizes), 0

        def grow(num_bytes: int) -> None:
            nonlocal size
            if size + num_bytes > self.max_file_bytes:
                raise InvalidRequest(f"A file may have at most {format_bytes(self.max_file_bytes)}.", param="file")
            self.require_room(num_bytes)
            if not has_place(owner, own_bytes + size, self.num_bytes, self._max_bytes, num_bytes):
                raise InvalidRequest("Your files take as much as they may now; delete some.", param="file")
            size += num_bytes
            self._num_reserved_bytes += num_bytes

        self._num_reserved += 1
        try:
            yield grow
        finally:
            self._num_reserved -= 1
            self._num_reserved_bytes -= size

    async def receive(
        self,
        owner: str,
        write: Callable[[Path, Callable[[int], None]], Awaitable[Received]],
        *,
        purpose: str = "batch",
        what: str = "file",
    ) -> FileRecord:
        """A new file of what `write` puts at the path that it is given, and tells of as `uploading` has it. what: that
        cannot be kept where it fails. Raises InvalidRequest and Unavailable."""
        identifier = self.new_id("file")
        part = self.part(identifier)
        try:
            with self.uploading(owner) as grow:
                received = await write(part, grow)
                now = int(self.wall_s())
                record = FileRecord(
                    id=identifier,
                    owner=owner,
                    filename=received.filename,
                    purpose=purpose,
                    size_bytes=received.size_bytes,
                    created_at=now,
                    expires_at=now + received.kept_s,
                )
                await self.add(record, part)
        except OSError as error:
            raise Unavailable(f"The {what} cannot be kept: {error.strerror}.") from error
        finally:
            part.unlink(missing_ok=True)
        return record

    def require_room(self, num_bytes: int) -> None:
        """Raises InvalidRequest."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"The files here take all of the {format_bytes(self._max_bytes)} that they may; delete some."
            )

    @property
    def num_bytes(self) -> int:
        return sum(each.size_bytes for each in self._files.values()) + self._num_reserved_bytes

    def reserve(self, num_bytes: int) -> None:
        """So many bytes more are, or less a negative number, in contents that batches write."""
        self._num_reserved_bytes += num_bytes

    async def add(self, record: FileRecord, part: Path | None = None) -> None:
        """Make a file of what lies in `part`, or where its content is already. May be done again after a crash."""
        content = self.content(record.id)

        def keep() -> None:
            if part is not None:
                _flush(part)
                os.replace(part, content)
            else:
                _flush(content)
            _flush_folder(content.parent)

        await asyncio.to_thread(keep)
        await self._write(lambda database: insert(database, [_file_row(record)]))
        self._files[record.id] = record

    async def delete(self, record: FileRecord) -> None:
        self._files.pop(record.id, None)
        await self._write(lambda database: _FILES.delete(database, record.owner, record.id))
        await asyncio.to_thread(self.content(record.id).unlink, missing_ok=True)

    async def drop_expired(self, used: set[str]) -> None:
        """Delete files whose time is over. used: ids of those that are read yet; they go later."""
        now = self.wall_s()
        for record in [each for each in self._files.values() if each.expires_at <= now and each.id not in used]:
            await self.delete(record)

    # ---- records ----

    def batches(self) -> list[Batch]:
        return [msgspec.json.decode(row.body, type=Batch) for row in self._rows() if row.kind == _BATCHES.name]

    async def write_batch(self, batch: Batch) -> None:
        await self._write(lambda database: insert(database, [_batch_row(batch)]))

    def remove_batch(self, batch: Batch) -> None:
        def remove(database: sqlite3.Connection) -> None:
            _BATCHES.delete(database, batch.owner, batch.id)

        def job() -> None:
            self._kept.attempt(remove, "Batches that ended long ago are not deleted")

        self._kept.put(job)

    async def _write(self, change: Callable[[sqlite3.Connection], object]) -> None:
        """It is on the disk when this returns. Raises OSError."""

        def job() -> None:
            with transaction(self._kept.database, flushed=True):
                change(self._kept.database)

        try:
            await self._kept.do(job)
        except sqlite3.Error as error:
            raise _disk_error(error) from error

    def _rows(self) -> list[Row]:
        """Those of the JSON files as long as these have not been read, in the order of kinds and ids."""
        found: list[Row] = []
        if self._reads_json:
            for kind, folder in ((_FILES, "files"), (_BATCHES, "batches")):
                for path in sorted((self.folder / folder).glob("*.json")):
                    found.append(Row(kind.name, "", path.stem, 0.0, 0, path.read_bytes()))
            return found

        def read() -> None:
            for kind in (_FILES, _BATCHES):
                for owner, key, body in kind.rows(self._kept.database):
                    found.append(Row(kind.name, owner, key, 0.0, 0, body))

        self._kept.ask(read)
        return found

    def _import(self) -> None:
        rows = [
            _file_row(msgspec.json.decode(row.body, type=FileRecord))
            if row.kind == _FILES.name
            else _batch_row(msgspec.json.decode(row.body, type=Batch))
            for row in self._rows()
        ]
        with transaction(self._kept.database, flushed=True):
            insert(self._kept.database, rows)
            self._kept.database.execute(KEPT.note_imported, (_OLD,))


def _file_row(record: FileRecord) -> Row:
    return Row(_FILES.name, record.owner, record.id, record.expires_at, 0, encode_json(record))


def _batch_row(batch: Batch) -> Row:
    return Row(_BATCHES.name, batch.owner, batch.id, batch.created_at + 2 * KEPT_S, 0, encode_json(batch))


def _name(row: Row) -> str:
    return f"{'files' if row.kind == _FILES.name else 'batches'}/{row.key!s}.json"


def _disk_error(error: sqlite3.Error) -> OSError:
    return OSError(errno.EIO, str(error))


def has_place(owner: str, own: int, taken: int, most: int, more: int = 1) -> bool:
    """Whether an owner of `own`, where `taken` are taken of `most`, may have more. Each leaves as much free as it has,
    so that nobody who shares the server takes all; "" shares it with nobody."""
    return taken + more <= most - (own + more if owner else 0)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_flush_folder = _flush
