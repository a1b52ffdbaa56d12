"""SQLite files of a server: their user's alone, in WAL mode, opened by several processes at once.

One rule for all of them: a file that is not there is made, whole or not at all; one that is there is trusted after its
pages and tables have been checked, or refused with what can be done. A file of 0 bytes is damaged: none is made so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.errors import ConfigError

BACKUP = ".backup"
"""What the last backup of a file is called besides its name."""

_AGAIN_S = 0.005
_UNFINISHED_S = 3600.0
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Schema(NamedTuple):
    """A kind of file. flag: of `serve`, which names it; mark: (application id, version) by which it is known as one's
    own; tables: SQL that makes those that are not there; settings: pragmas, "name=value", of which those of the journal
    are in force with all that follow; migrations: SQL that makes a file of version 1 one of version 2, and so on up to
    the mark's; was_imported, note_imported: ask for and note the name of a file of an earlier version that was read."""

    flag: str
    mark: tuple[int, int]
    tables: str
    settings: Sequence[str] = ()
    migrations: Sequence[str] = ()
    was_imported: str = ""
    note_imported: str = ""

    @property
    def table_names(self) -> set[str]:
        with contextlib.closing(sqlite3.connect(":memory:")) as model:
            model.executescript(self.tables)
            return tables_of(model)


class Damaged(sqlite3.DatabaseError):
    """The file is not what was written."""


def cannot_use(flag: str, path: object, error: Exception) -> ConfigError:
    """Why a server does not start with what `flag` names, and what can be done."""
    param = flag.removeprefix("--").replace("-", "_")
    if isinstance(error, Damaged):
        return ConfigError(
            f"{flag} {path} is damaged: {error}. `tokenmill state repair {flag} {path}` sets it aside and restores the "
            "last backup; to begin without what was in it, remove it.",
            param=param,
        )
    return ConfigError(f"{flag} {path} cannot be used: {error}. Name another one.", param=param)


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, *, flushed: bool = False) -> Iterator[None]:
    """What is written in the block is written as a whole, or not at all. flushed: it is on the disk after the block,
    also where the file's commits do not wait for that. Raises sqlite3.Error."""
    if flushed:
        (usual,) = database.execute("PRAGMA synchronous").fetchone()
        database.execute("PRAGMA synchronous=FULL")
    try:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # where the disk fails there too
                database.execute("ROLLBACK")
            raise
    finally:
        if flushed:
            database.execute(f"PRAGMA synchronous={usual}")


def open_database(path: str, schema: Schema, *, busy_s: float) -> sqlite3.Connection:
    """The file at `path`, which is made (mode 0600) with its folder where it is not there. busy_s: how long a statement
    waits for other connections. Whoever changes the file begins the `transaction`. Raises sqlite3.Error and OSError:
    Damaged, and also for a file with another mark.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        os.makedirs(folder, mode=0o700)
    _remove_unfinished(folder, os.path.basename(path))
    # A file that is there is not opened and closed here: that would end the locks of this process's connections to it.
    if not os.path.lexists(path):
        _make(path, schema, busy_s)
    database = open_checked(path, schema, busy_s=busy_s)
    try:
        os.chmod(path, 0o600)
        _prepare(database, schema, busy_s)
    except BaseException:
        database.close()
        raise
    return database


def open_in_memory(schema: Schema) -> sqlite3.Connection:
    """What is gone with the connection."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    run_script(database, schema.tables)
    return database


def open_checked(path: str, schema: Schema, *, busy_s: float, tables: Sequence[str] = ()) -> sqlite3.Connection:
    """A file that is there, as it is. tables: those whose pages are checked; none: all. Raises as `open_database`."""
    if os.path.getsize(path) == 0:
        raise Damaged("it has 0 bytes")
    database = sqlite3.connect(path, timeout=busy_s, isolation_level=None)
    try:
        _check(database, schema, tables)
    except UnicodeDecodeError as error:  # of a name or a text where there is none
        database.close()
        raise Damaged("it is no SQLite file") from error
    except sqlite3.Error as error:
        database.close()
        is_wrong = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_ERROR  # what is asked for is not
        raise (Damaged(str(error)) if is_wrong or is_damage(error) else error) from None
    except BaseException:
        database.close()
        raise
    return database


def schema_of(path: str, schemas: Sequence[Schema], busy_s: float) -> Schema:
    """That of which a file has the mark; the first where it has that of none, or none that can be read."""
    with contextlib.suppress(sqlite3.Error, UnicodeDecodeError):
        there = f"{Path(path).absolute().as_uri()}?mode=rw"  # what is not there is not made
        with contextlib.closing(sqlite3.connect(there, timeout=busy_s, uri=True)) as database:
            mark = mark_of(database)
        return next((each for each in schemas if each.mark == mark), schemas[0])
    return schemas[0]


def is_replaced(path: str, inode: int) -> bool:
    """Whether there is another file at `path` than the one of this inode."""
    with contextlib.suppress(OSError):
        return os.stat(path).st_ino != inode
    return False


def is_damage(error: Exception) -> bool:
    """Whether SQLite has found a file that is not what was written."""
    return isinstance(error, Damaged) or (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGE


def set_aside(path: str, replacement: str | None = None) -> str:
    """Move a file, and its journal, out of the way, and `replacement` into its place: where it is now. Between those
    there is a file of 0 bytes, which everybody finds and nobody trusts: not the old file without its journal, and not
    the new one with that. What ends there is damaged, and can be set aside again."""
    aside = f"{path}.damaged-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    with contextlib.suppress(FileNotFoundError):
        _link(path, aside)
        empty = f"{aside}.new"
        os.close(os.open(empty, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.replace(empty, path)
        os.rename(f"{path}-wal", f"{aside}-wal")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}-shm")
    if replacement is not None:
        os.replace(replacement, path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return aside


def _link(path: str, name: str) -> None:
    """A second name, which nothing has. Raises OSError, FileExistsError among them."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise OSError(error.errno, "its file system has no hard links, without which no file is safe here") from error


def copied(source: str, target: str) -> str:
    """One whole file, for this user alone, beside `target`, to take its place: its path."""
    beside = new_beside(target)
    try:
        with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(beside)) as new:
            old.backup(new)
            new.execute("PRAGMA journal_mode=DELETE")
    except BaseException:
        os.unlink(beside)
        raise
    return beside


def new_beside(path: str) -> str:
    """An empty file that is this caller's alone, to take the place of `path` when it is whole: its path."""
    beside = f"{path}.{secrets.token_hex(4)}.new"
    os.close(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    return beside


def _remove_unfinished(folder: str, name: str) -> None:
    """What was to take the place of a file, or of a copy of it, when its process was killed: nothing that is made takes
    as long as these have not been written to."""
    beside = re.compile(rf"{re.escape(name)}(\.[a-z]+)?\.[0-9a-f]{{8}}\.new(-wal|-shm|-journal)?")
    with contextlib.suppress(OSError):  # another process removes it too, or it stays
        for each in filter(beside.fullmatch, os.listdir(folder)):
            path = os.path.join(folder, each)
            if os.lstat(path).st_mtime < time.time() - _UNFINISHED_S:
                os.unlink(path)


def _make(path: str, schema: Schema, busy_s: float) -> None:
    """Under another name first, so that nobody ever finds it without its tables."""
    beside = new_beside(path)
    try:
        with contextlib.closing(sqlite3.connect(beside, timeout=busy_s, isolation_level=None)) as database:
            _prepare(database, schema, busy_s)
        with contextlib.suppress(FileExistsError):  # another process has just made it
            _link(beside, path)
    finally:
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside + ending)


def _prepare(database: sqlite3.Connection, schema: Schema, busy_s: float) -> None:
    for setting in schema.settings:
        if setting == "journal_mode=WAL":
            _use_wal(database, busy_s)
        else:
            database.execute(f"PRAGMA {setting}")
    with transaction(database):
        version = mark_of(database)[1]
        if 0 < version < schema.mark[1]:
            for migration in schema.migrations[version - 1 :]:
                run_script(database, migration)
        run_script(database, schema.tables)
        set_mark(database, schema.mark)


def mark_of(database: sqlite3.Connection) -> tuple[int, int]:
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    return application, version


def set_mark(database: sqlite3.Connection, mark: tuple[int, int]) -> None:
    database.execute(f"PRAGMA application_id={mark[0]}")
    database.execute(f"PRAGMA user_version={mark[1]}")


def tables_of(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def run_script(database: sqlite3.Connection, script: str) -> None:
    """Statements inside a transaction, which `executescript` would end."""
    statement = ""
    for part in script.split(";")[:-1]:
        statement += f"{part};"
        if sqlite3.complete_statement(statement):  # not inside a trigger
            database.execute(statement)
            statement = ""


def _check(database: sqlite3.Connection, schema: Schema, tables: Sequence[str]) -> None:
    there = tables_of(database)
    mark = mark_of(database)
    is_older = mark[0] == schema.mark[0] and 0 < mark[1] < schema.mark[1]
    if there and mark != schema.mark and not is_older:
        raise sqlite3.DatabaseError("it belongs to another program, or to another version of this one")
    if (missing := schema.table_names - there) and not is_older:
        raise Damaged(f"it has no table {min(missing)}")
    for what in tables or (1,):
        (found,) = database.execute(f"PRAGMA quick_check({what})").fetchone()
        if found != "ok":
            raise Damaged(found)


def _use_wal(database: sqlite3.Connection, busy_s: float) -> None:
    """Of two connections that turn a new file to WAL at once one is refused without having waited, whatever its
    timeout is: SQLite calls no busy handler for a read transaction that is to become a write transaction."""
    until_s = time.monotonic() + busy_s
    while True:
        try:
            database.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until_s:
                raise
        time.sleep(_AGAIN_S)
