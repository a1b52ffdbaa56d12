"""The control file: tenants and their keys, counts of their limits, sums of usage. Small, backed up, without texts.

    tenant, key, secret, keys_version      who may call: flushed to the disk with each change
    bucket, lease, used                    what tenants have used of their limits, and when keys were last used
    usage, folded, once                    sums of usage: what the journals told so far
    imported                               which files of earlier versions have been read

A commit does not wait for the disk unless its connection asks for that, so a call that is counted waits for no flush.
`keys_version` counts the changes of tenants and keys: whoever has them in memory reads them again only for another
number. What is damaged in one group does not spoil the others: `recover` takes each from where it is whole.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from itertools import product
from pathlib import Path

from ..core.errors import ConfigError
from .database import Schema, new_beside, open_checked, open_database, schema_of, tables_of, transaction
from .migration import OldFormat, convert, import_once

_BUSY_S = 5.0

_TENANTS = """
CREATE TABLE IF NOT EXISTS tenant (
    id TEXT PRIMARY KEY, created_s REAL NOT NULL, deleted_s REAL NOT NULL DEFAULT 0, settings TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS key (
    id TEXT PRIMARY KEY, digest BLOB NOT NULL UNIQUE, tenant TEXT NOT NULL, name TEXT NOT NULL, hint TEXT NOT NULL,
    is_admin INTEGER NOT NULL, created_s REAL NOT NULL, expires_s REAL NOT NULL, revoked_s REAL NOT NULL DEFAULT 0,
    replaced_by TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS secret (value BLOB NOT NULL);
INSERT INTO secret SELECT randomblob(32) WHERE NOT EXISTS (SELECT 1 FROM secret);
"""
_LIMITS = """
CREATE TABLE IF NOT EXISTS bucket (
    tenant TEXT NOT NULL, kind TEXT NOT NULL, level REAL NOT NULL, at_s REAL NOT NULL, PRIMARY KEY (tenant, kind)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease (
    tenant TEXT NOT NULL, holder TEXT NOT NULL, num_calls INTEGER NOT NULL, expires_s REAL NOT NULL,
    PRIMARY KEY (tenant, holder)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS used (key TEXT PRIMARY KEY, at_s REAL NOT NULL) WITHOUT ROWID;
"""
_USAGE = """
CREATE TABLE IF NOT EXISTS usage (
    width_s INTEGER NOT NULL, bucket_s INTEGER NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    calls INTEGER NOT NULL, prompt INTEGER NOT NULL, cached INTEGER NOT NULL, output INTEGER NOT NULL,
    PRIMARY KEY (bucket_s, tenant, key, model, width_s)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS folded (name TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS once (
    name TEXT PRIMARY KEY, wall_s REAL NOT NULL, calls INTEGER NOT NULL, prompt INTEGER NOT NULL,
    cached INTEGER NOT NULL, output INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS once_age ON once (wall_s);
"""
_VERSION = """
CREATE TABLE IF NOT EXISTS keys_version (number INTEGER NOT NULL);
INSERT INTO keys_version SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM keys_version);
CREATE TABLE IF NOT EXISTS imported (name TEXT PRIMARY KEY) WITHOUT ROWID;
""" + "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} "
    "BEGIN UPDATE keys_version SET number = number + 1; END;\n"
    for table, event in product(("tenant", "key"), ("insert", "update", "delete"))
)
CONTROL = Schema(
    "--tenants",
    (0x746D4354, 1),
    _TENANTS + _LIMITS + _USAGE + _VERSION,
    ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=NORMAL"),
    was_imported="SELECT 1 FROM imported WHERE name = ?",
    note_imported="INSERT INTO imported VALUES (?)",
)
KEYS = ("tenant", "key", "secret", "keys_version")
USAGE = ("usage", "folded", "once")
_GROUPS = {"keys": KEYS, "usage": USAGE, "limits": ("bucket", "lease", "used"), "imported": ("imported",)}


def migrate(path: str, old: OldFormat, *, is_default: bool) -> None:
    """Make a control file of the file at `path` if it is an old one; the default one reads what earlier versions kept
    beside it, once. Raises ConfigError, sqlite3.Error and OSError."""
    convert(path, CONTROL, old, _BUSY_S)
    if is_default:
        _import(path, old, Path(path).parent / old.name)


def migrate_limits(path: str, *, is_default: bool) -> None:
    """Read when keys were last used, which an earlier version kept in a file beside that of the keys, once. Without it
    they are good. Raises sqlite3.Error and OSError."""
    stem, ending = os.path.splitext(path)
    with suppress(ConfigError):
        _import(path, OLD_LIMITS, Path(path).parent / OLD_LIMITS.name if is_default else Path(f"{stem}.use{ending}"))


def _import(path: str, old: OldFormat, source: Path) -> None:
    with closing(open_database(path, CONTROL, busy_s=_BUSY_S)) as database:
        import_once(database, CONTROL, old, source)


def _copy_tables(source: sqlite3.Connection, target: sqlite3.Connection, names: Sequence[str]) -> None:
    """In place of what the target has; those that the source does not have stay."""
    there = tables_of(source)
    for name in (each for each in names if each in there):
        rows = source.execute(f"SELECT * FROM {name}").fetchall()
        target.execute(f"DELETE FROM {name}")
        if rows:
            target.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def _fill_tables(source: sqlite3.Connection, target: sqlite3.Connection, names: Sequence[str]) -> None:
    """Where the target has nothing in the first of them: what it has is newer, also if it does not say so."""
    if source is not target and target.execute(f"SELECT 1 FROM {names[0]} LIMIT 1").fetchone() is None:
        _copy_tables(source, target, names)


OLD_TENANTS = OldFormat(
    "tenants.db",
    Schema("--tenants", (0x746D5454, 1), _TENANTS),
    lambda source, target: _fill_tables(source, target, KEYS),
    is_part=True,
)
OLD_LIMITS = OldFormat(
    "tenants.use.db",
    Schema("--tenants", (0, 0), _LIMITS),
    lambda source, target: _fill_tables(source, target, ("used",)),
    is_part=True,
)
OLD_USAGE = OldFormat(
    "usage/usage.db",
    Schema("--usage-dir", (0x746D5547, 1), _USAGE),
    lambda source, target: _fill_tables(source, target, USAGE),
    is_part=True,
)


def recover(path: str, backup: str, *, spoiled: Collection[str] = ()) -> tuple[str, dict[str, str]]:
    """A new file, to take the place of the damaged one at `path`, and by group of tables the file that it was taken
    from: the damaged one where it is whole there, else the backup, if that is not "". A group that neither has is not
    named, and empty. spoiled: groups whose pages are whole and rows are not. Raises sqlite3.Error and OSError."""
    beside = new_beside(path)
    found: dict[str, str] = {}
    try:
        os.unlink(beside)  # it is made anew, with its tables
        with closing(open_database(beside, CONTROL, busy_s=_BUSY_S)) as target:
            for group, names in _GROUPS.items():
                for origin in ([] if group in spoiled else [path]) + ([backup] if backup else []):
                    if _taken(origin, target, names):
                        found[group] = origin
                        break
            target.execute("PRAGMA journal_mode=DELETE")
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(beside)
        raise
    return beside, found


def _taken(origin: str, target: sqlite3.Connection, names: Sequence[str]) -> bool:
    """Whether all of these tables are whole in a file, and copied."""
    schema = schema_of(origin, (CONTROL, OLD_TENANTS.schema, OLD_USAGE.schema), _BUSY_S)
    wanted = [name for name in names if name in schema.table_names]
    try:
        with closing(open_checked(origin, schema, busy_s=_BUSY_S, tables=wanted)) as source, transaction(target):
            _copy_tables(source, target, wanted)
    except (sqlite3.Error, OSError, UnicodeDecodeError):
        return False
    return bool(wanted)
