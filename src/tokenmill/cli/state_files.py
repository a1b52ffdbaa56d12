"""`state check`, `state repair`, `state backup`: the files that a server keeps, whether or not they can be trusted.

Backed up are tenants with their keys, and usage: small, and without texts. What is damaged is set aside; then the last
backup comes in its place, and what journals still hold is added. A file that a server has open is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import TokenmillError, Unavailable
from .options import add_options
from .state import KEPT_FILE, OFF, state_path

if TYPE_CHECKING:
    from ..server.files.store import FileStore
    from ..state.database import Schema

_FLAGS = ("tenants", "usage_dir", "idempotency_store", "responses_store", "resume_file", "files_dir")
_BUSY_S = 5.0
GOOD, NONE, IN_USE, DAMAGED, UNKNOWN = "good", "none", "a server has it", "damaged", "cannot be read"


class _Kept(NamedTuple):
    """A file of SQLite, of one of `schemas`. has_backup: it gets one; must_have_backup: nothing else may come in its
    place, since a server that finds none asks for no keys; restored: says what is missing in what was restored, `aside`
    being the old one; read: reads what is in it, and raises TokenmillError."""

    what: str
    path: Path
    schemas: tuple[Schema, ...]
    has_backup: bool = False
    must_have_backup: bool = False
    restored: Callable[[Path, str], str] = lambda path, aside: ""
    read: Callable[[Path], object] = lambda path: None

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
    from ..state.database import copied, set_aside

    is_good = True
    for kept in _files(args):
        found, why = _look(kept, kept.path)
        if found in (GOOD, NONE, IN_USE):
            _tell(kept.what, kept.path, found)
            continue
        backup_s = kept.backup.stat().st_mtime if kept.backup.exists() else 0.0  # before a look at it writes to it
        has_backup = _look(kept, kept.backup)[0] == GOOD
        if found == UNKNOWN or _is_open(kept.path):
            is_good = False
            then = "" if found == UNKNOWN else ": stop the servers that use it, then repair it"
            _tell(kept.what, kept.path, f"{found}: {why}", f"; left as it is{then}")
        elif kept.must_have_backup and not has_backup:
            is_good = False
            _tell(
                kept.what, kept.path, f"{found}: {why}",
                "; left as it is: there is no good backup. Without the file a server asks for no keys; remove it if "
                "that is meant, and make new keys with `tokenmill keys create`",
            )  # fmt: skip
        else:
            try:
                aside = set_aside(str(kept.path), copied(str(kept.backup), str(kept.path)) if has_backup else None)
            except (sqlite3.Error, OSError) as error:
                is_good = False
                _tell(kept.what, kept.path, f"{found}: {why}", f"; it cannot be repaired now: {error}")
                continue
            done = f"; restored from the backup of {_when(backup_s)}" if has_backup else "; begun anew"
            _tell(kept.what, kept.path, f"{found}: {why}", f"; now {aside}{done}{kept.restored(kept.path, aside)}")
    with _folder(args) as store:
        if store is not None:
            for identifier, why in store.set_faults_aside().items():
                _tell("files and batches", store.folder, f"{identifier} was damaged: {why}", "; now below damaged/")
    return 0 if is_good else 1


def _files(args: argparse.Namespace) -> Iterator[_Kept]:
    from ..control.tenants.quota_file import SCHEMA as QUOTAS
    from ..control.tenants.quota_file import quota_path
    from ..control.tenants.store import SCHEMA as TENANTS
    from ..control.usage.ledger import FILE
    from ..control.usage.ledger import SCHEMA as USAGE

    if args.tenants != OFF:
        path = state_path(args.tenants, "tenants.db")
        yield _Kept("tenants and keys", path, (TENANTS,), True, True, _keys_missing, _read_keys)
        yield _Kept("limits of tenants", Path(quota_path(str(path))), (QUOTAS,))
    if args.usage_dir != OFF:
        yield _Kept("usage", state_path(args.usage_dir, "usage") / FILE, (USAGE,), True, False, _usage_missing)
    yield from _kept_files(args)


def _kept_files(args: argparse.Namespace) -> Iterator[_Kept]:
    """One for each file, whatever is kept in it; those of before, as long as none of now has taken them over."""
    from ..server.repeats.store import FORMER as ANSWERS
    from ..server.responses.store import FORMER as RESPONSES
    from ..server.resume.store import FORMER_SCHEMA as STREAMS
    from ..state.kept import KEPT

    found: dict[Path, list[str]] = {}
    for what, chosen, former in (
        ("answers of calls with a key", args.idempotency_store, ANSWERS),
        ("responses", args.responses_store, RESPONSES),
    ):
        path = state_path(chosen, KEPT_FILE)
        if not chosen and not os.path.lexists(path) and os.path.lexists(path.with_name(former.name)):
            path = path.with_name(former.name)
        if chosen != OFF:
            found.setdefault(path, []).append(what)
    for path, whats in found.items():
        yield _Kept(" and ".join(whats), path, (KEPT, ANSWERS.schema, RESPONSES.schema))
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
    store = FileStore(str(folder), new_id)
    if not store.take():
        _tell("files and batches", folder, UNKNOWN, f": {store.why_not}")
        yield None
        return
    try:
        yield store
    finally:
        store.close()


def _look(kept: _Kept, path: Path) -> tuple[str, str]:
    """(whether a file of the kind can be trusted, why not)"""
    from ..state.database import Damaged, open_checked, schema_of

    if not os.path.lexists(path):
        return NONE, ""
    try:
        open_checked(str(path), schema_of(str(path), kept.schemas, _BUSY_S), busy_s=_BUSY_S).close()
        kept.read(path)
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


def _keys_missing(path: Path, aside: str) -> str:
    return ". Keys and tenants made since are gone, and keys revoked since are good again: revoke them anew"


def _usage_missing(path: Path, aside: str) -> str:
    """Journals that are still there are added up from where the backup had come to; those that had been added up to
    their ends are gone."""
    from ..control.usage.ledger import Ledger

    ledger = Ledger(path.parent)
    try:
        since_s = ledger.last_minute_s()
        num_bytes = ledger.fold()
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
