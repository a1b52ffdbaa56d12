"""`state check`, `state repair`, `state backup`: the files that a server keeps, whether or not they can be trusted.

Backed up is the control file: tenants with their keys, and usage. What is damaged is set aside. In its place comes what
of a control file is whole, and for the rest the last backup, to which what journals still hold is added. A file that a
server has open is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import TokenmillError, Unavailable
from .options import add_options
from .state import CONTROL_FILE, KEPT_FILE, OFF, file_records, state_path

if TYPE_CHECKING:
    from ..server.files.store import FileStore
    from ..state.database import Schema

_FLAGS = ("tenants", "usage_dir", "idempotency_store", "responses_store", "resume_file", "files_dir")
_BUSY_S = 5.0
GOOD, NONE, IN_USE, DAMAGED, UNKNOWN = "good", "none", "a server has it", "damaged", "cannot be read"


class _Kept(NamedTuple):
    """A file of SQLite, of one of `schemas`. has_keys: nothing else may come in its place but a file with the keys,
    since a server that finds none asks for no keys; journals: the folder of those whose sums are in it; is_old: an
    earlier version made it, and it has not been read yet."""

    what: str
    path: Path
    schemas: tuple[Schema, ...]
    has_keys: bool = False
    journals: Path | None = None
    is_old: bool = False

    @property
    def has_backup(self) -> bool:
        return self.has_keys or self.journals is not None

    @property
    def backup(self) -> Path:
        from ..state.database import BACKUP

        return self.path.with_name(self.path.name + BACKUP)


def add_arguments(*parsers: argparse.ArgumentParser) -> None:
    from ..server.config import ServerConfig

    for parser in parsers:
        add_options(parser, ServerConfig, _FLAGS)


def check(args: argparse.Namespace) -> int:
    """Exit code 1: something is damaged."""
    is_good = True
    for kept in _files(args):
        found, why = _look(kept, kept.path)
        is_good &= found in (GOOD, NONE, IN_USE)
        backup = f"; backup of {_when(kept.backup.stat().st_mtime)}" if kept.has_backup and kept.backup.exists() else ""
        _tell(kept.what, kept.path, f"{found}: {why}" if why else found, backup)
    with _folder(args) as store:
        if store is not None:
            faults = store.faults()
            is_good &= not faults
            _tell("files and batches", store.folder, f"{DAMAGED}: {'; '.join(faults.values())}" if faults else GOOD)
    return 0 if is_good else 1


def backup(args: argparse.Namespace) -> int:
    """Exit code 1: something that should have been is not backed up; its last backup stays."""
    from ..state.database import copied

    is_good = True
    for kept in (each for each in _files(args) if each.has_backup):
        found, why = _look(kept, kept.path)
        if found == NONE:
            continue
        if found != GOOD:
            is_good = False
            _tell(kept.what, kept.path, f"{found}: {why}", "; not backed up")
            continue
        try:
            os.replace(copied(str(kept.path), str(kept.backup)), kept.backup)
        except (sqlite3.Error, OSError) as error:
            is_good = False
            _tell(kept.what, kept.path, found, f"; it cannot be backed up now: {error}")
            continue
        _tell(kept.what, kept.path, f"backed up to {kept.backup}")
    return 0 if is_good else 1


def repair(args: argparse.Namespace) -> int:
    """Exit code 1: something is still damaged."""
    is_good = True
    for kept in _files(args):
        found, why = _look(kept, kept.path)
        if found in (GOOD, NONE, IN_USE):
            _tell(kept.what, kept.path, found)
            continue
        if found == UNKNOWN or _is_open(kept.path):
            is_good = False
            then = "" if found == UNKNOWN else ": stop the servers that use it, then repair it"
            _tell(kept.what, kept.path, f"{found}: {why}", f"; left as it is{then}")
            continue
        try:
            done = _restore(kept)
        except (sqlite3.Error, OSError) as error:
            done = ""
            _tell(kept.what, kept.path, f"{found}: {why}", f"; it cannot be repaired now: {error}")
        else:
            without = (
                "left as it is: there is no good backup. Without the file a server asks for no keys; remove it if "
                "that is meant, and make new keys with `tokenmill keys create`"
            )
            _tell(kept.what, kept.path, f"{found}: {why}", f"; {done or without}")
        is_good &= bool(done)
    with _folder(args) as store:
        if store is not None:
            for identifier, why in store.set_faults_aside().items():
                _tell("files and batches", store.folder, f"{identifier} was damaged: {why}", "; now below damaged/")
    return 0 if is_good else 1


def _restore(kept: _Kept) -> str:
    """Put what can be had in the place of a damaged file, and say what was done; "": nothing, for there are no keys to
    be had. Raises sqlite3.Error and OSError."""
    from ..state.database import copied, set_aside

    path, backup = str(kept.path), ""
    backup_s = kept.backup.stat().st_mtime if kept.backup.exists() else 0.0  # before a look at it writes to it
    if kept.has_backup and _look(kept, kept.backup)[0] == GOOD:
        backup = str(kept.backup)
    if kept.has_backup and not kept.is_old:
        new, origins = _recover(kept, backup)
    else:
        new, origins = copied(backup, path) if backup else "", {"keys": backup, "usage": backup}
    if kept.has_keys and not origins.get("keys"):
        if new:
            os.unlink(new)
        return ""
    aside = set_aside(path, new or None)

    def came(group: str) -> str:
        origin = origins.get(group)
        return (
            "as it was"
            if origin == path
            else f"restored from the backup of {_when(backup_s)}"
            if origin
            else "begun anew"
        )

    done = [f"now {aside}"]
    if not kept.has_backup:
        done.append("begun anew")
    if kept.has_keys:
        missing = "Keys and tenants made since are gone, and keys revoked since are good again: revoke them anew"
        done.append(f"keys: {came('keys')}" + (f". {missing}" if origins["keys"] == backup else ""))
    if kept.journals is not None:
        is_whole = kept.is_old or origins.get("usage") == path
        done.append(f"usage: {came('usage')}" + ("" if is_whole else _usage_missing(kept.journals, path, aside)))
    return "; ".join(done)


def _recover(kept: _Kept, backup: str) -> tuple[str, dict[str, str]]:
    from ..state.control import recover

    new, origins = recover(str(kept.path), backup)
    try:
        _read_keys(Path(new))
    except Unavailable:  # no page showed that
        os.unlink(new)
        return recover(str(kept.path), backup, spoiled=("keys",))
    except TokenmillError:  # they are of a later version
        pass
    return new, origins


def _files(args: argparse.Namespace) -> Iterator[_Kept]:
    yield from _control_files(args)
    yield from _kept_files(args)


def _control_files(args: argparse.Namespace) -> Iterator[_Kept]:
    """One for each file, whatever is in it; those of earlier versions, as long as none of now has read them."""
    from ..control.usage.ledger import FILE
    from ..state.control import CONTROL, OLD_TENANTS, OLD_USAGE
    from ..state.migration import is_unread

    shared, folder = state_path(None, CONTROL_FILE), state_path(args.usage_dir, "usage")
    schemas = (CONTROL, OLD_TENANTS.schema, OLD_USAGE.schema)
    found: dict[Path, _Kept] = {}
    for what, chosen, path, old in (
        ("tenants and keys", args.tenants, state_path(args.tenants, CONTROL_FILE), OLD_TENANTS),
        ("usage", args.usage_dir, folder / FILE if args.usage_dir else shared, OLD_USAGE),
    ):
        if chosen == OFF:
            continue
        journals = folder if old is OLD_USAGE else None
        if not chosen and is_unread(path, CONTROL, old, _BUSY_S):
            path = path.parent / old.name
            found[path] = _Kept(what, path, schemas, journals is None, journals, is_old=True)
        elif (other := found.get(path)) is not None:
            found[path] = other._replace(what=f"{other.what}, {what}", journals=journals)
        else:
            found[path] = _Kept(what, path, schemas, journals is None, journals)
    yield from found.values()


def _kept_files(args: argparse.Namespace) -> Iterator[_Kept]:
    """One for each file, whatever is kept in it; those of earlier versions, as long as none of now has read them."""
    from ..server.idempotency.store import OLD as ANSWERS
    from ..server.response_store import OLD as RESPONSES
    from ..server.resume.store import OLD_SCHEMA as STREAMS
    from ..state.kept import KEPT
    from ..state.migration import is_unread

    found: dict[Path, list[str]] = {}
    if args.files_dir != OFF:
        folder = state_path(args.files_dir, "files")
        records = file_records(str(folder), {})
        if os.path.lexists(path := Path(records.path) if records else folder / KEPT_FILE):
            found[path] = ["files and batches"]
    for what, chosen, old in (
        ("answers of calls with a key", args.idempotency_store, ANSWERS),
        ("responses", args.responses_store, RESPONSES),
    ):
        path = state_path(chosen, KEPT_FILE).absolute()
        if not chosen and is_unread(path, KEPT, old, _BUSY_S):
            path = path.with_name(old.name)
        if chosen != OFF:
            found.setdefault(path, []).append(what)
    for path, whats in found.items():
        yield _Kept(", ".join(whats), path, (KEPT, ANSWERS.schema, RESPONSES.schema))
    if args.resume_file:
        yield _Kept("streams", Path(args.resume_file).expanduser(), (KEPT, STREAMS))


@contextlib.contextmanager
def _folder(args: argparse.Namespace) -> Iterator[FileStore | None]:
    """The folder of files, taken; None: there is none, or a server has it."""
    from ..net.system import new_id
    from ..server.files.store import FileStore

    folder = state_path(args.files_dir, "files")
    if args.files_dir == OFF or not folder.is_dir():
        yield None
        return
    store = FileStore(str(folder), new_id, file_records(str(folder), {}))
    if not store.take():
        _tell("files and batches", folder, UNKNOWN, f": {store.why_not}")
        yield None
        return
    try:
        try:
            store.load(makes=False)
        except (sqlite3.Error, OSError) as error:
            _tell("files and batches", folder, UNKNOWN, f": {error}")
            yield None
        else:
            yield store
    finally:
        store.close()


def _look(kept: _Kept, path: Path) -> tuple[str, str]:
    """(whether a file of the kind can be trusted, why not)"""
    from ..state.database import Damaged, open_checked, schema_of

    if not os.path.lexists(path):
        return NONE, ""
    try:
        schema = schema_of(str(path), kept.schemas, _BUSY_S)
        open_checked(str(path), schema, busy_s=_BUSY_S).close()
        if kept.has_keys and schema is kept.schemas[0]:
            _read_keys(path)
    except (Damaged, Unavailable) as error:
        return DAMAGED, str(error)
    except (sqlite3.Error, OSError, TokenmillError) as error:
        is_busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
        return (IN_USE, "") if is_busy else (UNKNOWN, str(error))
    return GOOD, ""


def _is_open(path: Path) -> bool:
    """Whether another process has a connection to a file: SQLite holds a lock on it as long, in WAL mode."""
    with open(path, "rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _read_keys(path: Path) -> None:
    from ..control.tenants.access import read_known
    from ..control.tenants.store import TenantStore

    store = TenantStore(str(path))
    try:
        read_known(store, 0.0)
    finally:
        store.close()


def _usage_missing(folder: Path, path: str, aside: str) -> str:
    """Journals that are still there are added up from where the backup had come to; those that had been added up to
    their ends are gone."""
    from ..control.usage.ledger import Ledger

    ledger = Ledger(folder, path)
    try:
        since_s = ledger.last_minute_s()
        num_bytes = ledger.fold() if folder.is_dir() else 0
    finally:
        ledger.close()
    written = (os.stat(aside + ending).st_mtime for ending in ("", "-wal") if os.path.exists(aside + ending))
    since = f"from {_when(since_s)}" if since_s else "from the beginning"
    return (
        f". {num_bytes} bytes of journals that are still there are added up; of those that were gone, what was used "
        f"{since} to {_when(max(written))} is missing"
    )


def _when(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _tell(what: str, path: Path, found: str, more: str = "") -> None:
    print(f"{what} ({path}): {found}{more}")
