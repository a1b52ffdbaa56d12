"""The folder of files and batches: what is in it is complete, and is there again after a crash.

    lock                held by the one server that uses the folder
    parts/ID            what is being uploaded
    contents/ID         the bytes of a file, or of one that a batch is still writing
    files/ID.json       a file's record; the file exists while this does
    batches/ID.json     a batch's record

A record is replaced as a whole: written beside, flushed to the disk, renamed. Contents come before the record that
names them and go after it. What no record names is removed when the folder is opened. Folders have mode 0700, files
0600.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from ...api.json_encoder import encode_json
from ...core.errors import InvalidRequest, NotFound, Unavailable
from ...core.units import GiB, MiB, format_bytes
from ...state.database import Damaged, cannot_use
from .batch import Batch

MAX_FILE_BYTES = 200 * MiB
MAX_BYTES = 4 * GiB
MAX_FILES = 10_000
MAX_BATCHES = 10_000
FLAG = "--files-dir"
KEPT_S = 30 * 24 * 3600
"""A file is deleted so long after it was made, unless it was to go earlier."""

T = TypeVar("T", bound=msgspec.Struct)


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
    wall_s  seconds since the epoch
    """

    def __init__(
        self,
        folder: str,
        new_id: Callable[[str], str],
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
        self.why_not = "The folder of files is not open."
        self._num_reserved_bytes = 0
        self._num_reserved = 0

    # ---- the folder ----

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self) -> bool:
        """`take` it and read what is in it. Raises ConfigError for a damaged one."""
        if not self.take():
            return False
        if faults := self.faults():
            raise cannot_use(FLAG, self.folder, Damaged(next(iter(faults.values()))))
        records = self._records("files", FileRecord)
        self._files = {record.id: record for record in sorted(records, key=lambda each: (each.created_at, each.id))}
        return True

    def take(self) -> bool:
        """Take the folder; tells whether that went well. Otherwise `why_not` says why."""
        try:
            for part in ("", "parts", "contents", "files", "batches"):
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
                f"Another server uses the folder for files, {self.folder}; give this one another with --files-dir."
            )
            return False
        self._lock = lock
        return True

    def faults(self) -> dict[str, str]:
        """What is damaged, by the path of its record below the folder, and why."""
        found = {}
        for kind, form in (("files", FileRecord), ("batches", Batch)):
            for path in sorted((self.folder / kind).glob("*.json")):
                name = f"{kind}/{path.name}"
                try:
                    record = msgspec.json.decode(path.read_bytes(), type=form)
                except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
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
        aside = self.folder / "damaged"
        aside.mkdir(mode=0o700, exist_ok=True)
        for name in found:
            os.replace(self.folder / name, aside / Path(name).name)
        named = {record.id for record in self._records("files", FileRecord)}
        named.update(name for batch in self.batches(Batch) for name in (batch.output_id, batch.error_id))
        for content in (self.folder / "contents").iterdir():
            if content.name not in named:
                os.replace(content, aside / content.name)
        return found

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
        """Remove contents that no record names. written: those that batches are still writing."""
        for part in (self.folder / "parts").iterdir():
            part.unlink()
        for content in (self.folder / "contents").iterdir():
            if content.name not in self._files and content.name not in written:
                content.unlink()
        for kind in ("files", "batches"):
            for rest in (self.folder / kind).glob("*.new"):
                rest.unlink()

    def close(self, why: str = "The folder of files is not open.") -> None:
        """why: what `require_open` says from now on."""
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
            if each.owner == owner and each.expires_at > now and (purpose is None or each.purpose == purpose)
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
            self._write("files", record.id, record)

        await asyncio.to_thread(keep)
        self._files[record.id] = record

    async def delete(self, record: FileRecord) -> None:
        self._files.pop(record.id, None)
        await asyncio.to_thread(self._remove, record.id)

    def _remove(self, identifier: str) -> None:
        (self.folder / "files" / f"{identifier}.json").unlink(missing_ok=True)
        self.content(identifier).unlink(missing_ok=True)

    async def drop_expired(self, used: set[str]) -> None:
        """Delete files whose time is over. used: ids of those that are read yet; they go later."""
        now = self.wall_s()
        for record in [each for each in self._files.values() if each.expires_at <= now and each.id not in used]:
            await self.delete(record)

    # ---- records ----

    def batches(self, kind: type[T]) -> list[T]:
        return list(self._records("batches", kind))

    async def write_batch(self, identifier: str, record: msgspec.Struct) -> None:
        await asyncio.to_thread(self._write, "batches", identifier, record)

    def remove_batch(self, identifier: str) -> None:
        (self.folder / "batches" / f"{identifier}.json").unlink(missing_ok=True)

    def _records(self, folder: str, kind: type[T]) -> Iterator[T]:
        for path in sorted((self.folder / folder).glob("*.json")):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=kind)
            except (msgspec.MsgspecError, OSError) as error:
                raise cannot_use(FLAG, self.folder, Damaged(f"{path.name} cannot be read: {error}")) from error

    def _write(self, folder: str, identifier: str, record: msgspec.Struct) -> None:
        path = self.folder / folder / f"{identifier}.json"
        beside = path.with_suffix(".new")
        with open(os.open(beside, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(encode_json(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        _flush_folder(path.parent)


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
