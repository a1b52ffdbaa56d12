"""Files of earlier versions: read once into a file of now, or converted in place. Each is one transaction."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from .database import (
    Damaged,
    Schema,
    cannot_use,
    copied,
    mark_of,
    open_checked,
    run_script,
    schema_of,
    set_mark,
    tables_of,
    transaction,
)

BEFORE = ".before"
"""Ends the name of the copy of a file that was converted."""

_BUSY_S = 5.0


class OldFormat(NamedTuple):
    """A kind of file of an earlier version. name: by default, below the folder of the file of now. copy: puts what the
    first connection's file has into the second's, which may be the same. is_part: its tables are some of those of now,
    so that a file of this name is read also where it has been converted."""

    name: str
    schema: Schema
    copy: Callable[[sqlite3.Connection, sqlite3.Connection], None]
    is_part: bool = False


def import_once(database: sqlite3.Connection, schema: Schema, old: OldFormat, path: Path) -> None:
    """Put what is in the old file at `path`, which stays as it is, into an open one of `schema`. Done once, also
    where there is no old one. Raises ConfigError and sqlite3.Error."""
    if database.execute(schema.was_imported, (old.name,)).fetchone():
        return
    with transaction(database):
        if database.execute(schema.was_imported, (old.name,)).fetchone():
            return  # another process has just done it
        found = schema_of(str(path), (old.schema, schema), _BUSY_S)
        if os.path.lexists(path) and (found is old.schema or old.is_part):
            try:
                with closing(open_checked(str(path), found, busy_s=_BUSY_S)) as source:
                    _copy(old, source, database)
            except (sqlite3.Error, OSError) as error:
                raise cannot_use(old.schema.flag, path, error) from error
        database.execute(schema.note_imported, (old.name,))


def is_unread(path: Path, schema: Schema, old: OldFormat, busy_s: float) -> bool:
    """Whether there is an old file beside that at `path`, which will be read into this. Of a file that cannot be read
    nobody knows: False."""
    if not os.path.lexists(path.parent / old.name):
        return False
    if not os.path.lexists(path):
        return True
    with suppress(sqlite3.Error, OSError), closing(open_checked(str(path), schema, busy_s=busy_s)) as database:
        return database.execute(schema.was_imported, (old.name,)).fetchone() is None
    return False


def convert(path: str, schema: Schema, old: OldFormat, busy_s: float) -> None:
    """Make an old file, if it is one, one of `schema`; a copy of the old one is left beside. Raises sqlite3.Error and
    OSError."""

    def is_old() -> bool:
        return schema_of(path, (schema, old.schema), busy_s) is old.schema

    if not os.path.lexists(path) or not is_old():
        return
    try:
        opened = open_checked(path, old.schema, busy_s=busy_s)
    except sqlite3.Error:
        if is_old():
            raise
        return  # another process has just done it
    with closing(opened) as database:
        database.execute("PRAGMA secure_delete=ON")
        with transaction(database):
            if mark_of(database) != old.schema.mark:
                return
            before = f"{path}{BEFORE}"
            os.replace(copied(path, before), before)
            there = tables_of(database)
            run_script(database, schema.tables)
            _copy(old, database, database)
            for name in sorted(there - schema.table_names):
                database.execute(f"DROP TABLE {name}")
            set_mark(database, schema.mark)


def _copy(old: OldFormat, source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Raises sqlite3.Error: Damaged where a value is not what was written."""
    try:
        old.copy(source, target)
    except (AttributeError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise Damaged(str(error)) from error
