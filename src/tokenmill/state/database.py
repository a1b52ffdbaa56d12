"""SQLite files of a server: their user's alone, in WAL mode, opened by several processes at once.

One rule for all of them: a file that is not there is made, whole or not at all; one that is there is trusted after its
pages and tables have been checked, or refused with what can be done. A file of 0 bytes is damaged: none is made so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ..core.errors import ConfigError

BACKUP = ".backup"
"""What the last backup of a file is called besides its name."""

_AGAIN_S = 0.005
_ROOM = 0.95
"""What is left of the bytes after making room, so that not every write has to."""

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Schema(NamedTuple):
    """A kind of file. flag: of `serve`, which names it; mark: (application id, version) by which it is known as one's
    own; tables: SQL that makes those that are not there; settings: pragmas, "name=value", of which those of the journal
    are in force with all that follow."""

    flag: str
    mark: tuple[int, int]
    tables: str
    settings: Sequence[str] = ()


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


def open_database(
    path: str, schema: Schema, *, busy_s: float, isolation_level: Literal["IMMEDIATE"] | None = None
) -> sqlite3.Connection:
    """The file at `path`, which is made (mode 0600) with its folder where it is not there.

    busy_s           how long a statement waits for other connections
    isolation_level  "IMMEDIATE": changes begin a transaction; None: the code begins all of them

    Raises sqlite3.Error and OSError: Damaged, and also for a file with another mark.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        os.makedirs(folder, mode=0o700)
    # A file that is there is not opened and closed here: that would end the locks of this process's connections to it.
    if not os.path.lexists(path):
        _make(path, schema, busy_s)
    database = open_checked(path, schema, busy_s=busy_s, isolation_level=isolation_level)
    try:
        os.chmod(path, 0o600)
        _prepare(database, schema, busy_s)
    except BaseException:
        database.close()
        raise
    return database


def open_checked(
    path: str, schema: Schema, *, busy_s: float, isolation_level: Literal["IMMEDIATE"] | None = None
) -> sqlite3.Connection:
    """A file that is there, as it is. Raises as `open_database`."""
    if os.path.getsize(path) == 0:
        raise Damaged("it has 0 bytes")
    database = sqlite3.connect(path, timeout=busy_s, isolation_level=isolation_level)
    try:
        _check(database, schema)
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


def make_room(database: sqlite3.Connection, table: str, key: str, size: str, most: int) -> None:
    """Where the rows of `table` are larger than `most` bytes together, the oldest go, of the owner that has the most.
    key, size: columns; others are owner and created_s. The caller commits."""
    (held,) = database.execute(f"SELECT COALESCE(SUM({size}), 0) FROM {table}").fetchone()
    if held <= most:
        return
    while held > most * _ROOM:
        (owner,) = database.execute(
            f"SELECT owner FROM {table} GROUP BY owner ORDER BY SUM({size}) DESC, owner LIMIT 1"
        ).fetchone()
        oldest, freed = database.execute(
            f"SELECT {key}, {size} FROM {table} WHERE owner = ? ORDER BY created_s, {key} LIMIT 1", (owner,)
        ).fetchone()
        database.execute(f"DELETE FROM {table} WHERE {key} = ?", (oldest,))
        held -= freed


def _make(path: str, schema: Schema, busy_s: float) -> None:
    """Under another name first, so that nobody ever finds it without its tables."""
    beside = f"{path}.{secrets.token_hex(4)}.new"
    os.close(os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(beside, timeout=busy_s, isolation_level=None)) as database:
            _prepare(database, schema, busy_s)
        with contextlib.suppress(FileExistsError):  # another process has just made it
            _link(beside, path)
    finally:
        os.unlink(beside)


def _prepare(database: sqlite3.Connection, schema: Schema, busy_s: float) -> None:
    for setting in schema.settings:
        if setting == "journal_mode=WAL":
            _use_wal(database, busy_s)
        else:
            database.execute(f"PRAGMA {setting}")
    application, version = schema.mark
    marks = f"PRAGMA application_id={application}; PRAGMA user_version={version};"
    database.executescript(f"BEGIN IMMEDIATE; {schema.tables} {marks} COMMIT;")


def _check(database: sqlite3.Connection, schema: Schema) -> None:
    there = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if there and (application, version) != schema.mark:
        raise sqlite3.DatabaseError("it belongs to another program, or to another version of this one")
    with contextlib.closing(sqlite3.connect(":memory:")) as model:
        model.executescript(schema.tables)
        wanted = {name for (name,) in model.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := wanted - there:
        raise Damaged(f"it has no table {min(missing)}")
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
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
