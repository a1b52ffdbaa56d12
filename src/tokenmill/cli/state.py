"""What a server keeps for its user between runs, and where: a folder that nobody else can read."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import ConfigError
from ..node.process import has_ended, name_process

if TYPE_CHECKING:
    from ..control.tenants.access import Access
    from ..control.usage.accounting import Accounting
    from ..server.config import ServerConfig
    from ..server.idempotency.store import AnswerStore
    from ..server.response_store import ResponseStore
    from ..server.resume.store import ResumeStore
    from ..state.file import StateFile

OFF = "off"
CONTROL_FILE = "control.db"
"""Tenants and keys, counts of their limits and sums of usage, by default."""

KEPT_FILE = "kept.db"
"""What is kept for a time by default, texts among it."""

T = TypeVar("T")
S = TypeVar("S", "ResponseStore", "AnswerStore")
_log = logging.getLogger(__name__)


def default_state_dir() -> Path:
    """TOKENMILL_STATE, else XDG_STATE_HOME/tokenmill, else ~/.local/state/tokenmill. It need not be there yet."""
    if chosen := os.environ.get("TOKENMILL_STATE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tokenmill"


def state_path(chosen: str | None, name: str) -> Path:
    """What a flag names, or `name` in the user's state folder."""
    return Path(chosen).expanduser() if chosen else default_state_dir() / name


def open_kept_stores(
    responses: str | None, answers: str | None, files: dict[Path, StateFile]
) -> tuple[ResponseStore | None, AnswerStore | None]:
    """`open_response_store` and `open_answer_store`, of which each file is opened once."""
    store = open_response_store(responses, files)
    try:
        return store, open_answer_store(answers, files)
    except BaseException:
        if store is not None:
            store.close()
        raise


def file_records(files_dir: str, files: dict[Path, StateFile]) -> StateFile | None:
    """Where records of files and batches go, if that is the file of all that is kept; None: to one in their folder,
    which somebody named. files: as for responses."""
    from ..state.file import StateFile

    path = state_path(None, KEPT_FILE).absolute()
    if state_path(files_dir, "").absolute() != path.with_name("files"):
        return None
    return files.setdefault(path, StateFile(str(path), reads_old=True))


def open_response_store(chosen: str | None, files: dict[Path, StateFile]) -> ResponseStore | None:
    """The store in the file `chosen`, or in that which is shared by default; None: there is none, because it is off, or
    because no file is chosen and there is none and none can be made, of which the log tells. files: by their paths,
    which more goes to. Raises ConfigError for one that is chosen, or is there, and cannot be used or trusted."""
    from ..server.response_store import OLD, ResponseStore

    kind = partial(ResponseStore, process=name_process(), has_ended=has_ended)
    return _open_kept(kind, OLD.name, chosen, files, "Responses of /v1/responses are not kept.")


def open_answer_store(chosen: str | None, files: dict[Path, StateFile]) -> AnswerStore | None:
    """The store of calls with an Idempotency-Key; chosen, files, None and errors as for responses."""
    from ..server.idempotency.store import OLD, AnswerStore

    return _open_kept(AnswerStore, OLD.name, chosen, files, "Calls with an Idempotency-Key are refused.")


def _open_kept(
    kind: Callable[[StateFile], S], old: str, chosen: str | None, files: dict[Path, StateFile], otherwise: str
) -> S | None:
    from ..state.file import StateFile

    def opened(path: Path) -> S:
        path = path.absolute()
        if path not in files:
            files[path] = StateFile(str(path), reads_old=not chosen)
        store = kind(files[path])
        store.open()
        return store

    return _opened(chosen, KEPT_FILE, opened, otherwise, (old,))


def _opened(
    chosen: str | None, name: str, open_at: Callable[[Path], T], otherwise: str, others: Sequence[str]
) -> T | None:
    """others: what else in the folder may have been kept in."""
    if chosen == OFF:
        return None
    path = None
    try:
        path = state_path(chosen, name)
        return open_at(path)
    except (ConfigError, RuntimeError) as error:
        if chosen or (path and any(os.path.lexists(path.with_name(each)) for each in (name, *others))):
            raise
        _log.warning("%s %s", otherwise, error)
        return None


def open_resume_store(config: ServerConfig) -> ResumeStore | None:
    """The store of streams that outlive this process; None: there is none. Raises ConfigError."""
    from ..server.resume.store import ResumeStore

    if not config.resume_file:
        return None
    path = os.path.abspath(Path(config.resume_file).expanduser())
    store = ResumeStore(path, max_bytes=config.resume_bytes, kept_s=config.resume_kept_s)
    store.open()
    return store


def open_access(chosen: str | None, api_keys: tuple[str, ...]) -> Access:
    """Who may call by `api_keys` and by the store at the path `chosen`, or where it is by default. Raises ConfigError
    for a store that cannot be used; without a chosen one, where there is none yet and none can be made, the log tells
    so."""
    from ..control.tenants.access import Access

    if chosen == OFF:
        return Access(api_keys)
    from ..state.control import OLD_TENANTS

    try:
        access = Access(api_keys, tenants_file(chosen))
        access.open()
    except ConfigError as error:
        files = [default_state_dir() / name for name in (CONTROL_FILE, OLD_TENANTS.name)]
        if chosen or any(map(os.path.lexists, files)):  # there may be keys in it
            raise
        _log.warning("No tenants are kept, and no keys given out. %s", error.message)
        return Access(api_keys)
    return access


def tenants_file(chosen: str | None) -> str:
    """The control file of tenants, with what earlier versions kept of them. Raises ConfigError."""
    from ..state.control import CONTROL, OLD_TENANTS, migrate, migrate_limits
    from ..state.database import cannot_use

    path = os.path.abspath(state_path(chosen, CONTROL_FILE))
    is_default = path == os.path.abspath(state_path(None, CONTROL_FILE))
    try:
        migrate(path, OLD_TENANTS, is_default=is_default)
        migrate_limits(path, is_default=is_default)
    except (sqlite3.Error, OSError) as error:
        raise cannot_use(CONTROL.flag, path, error) from error
    return path


def usage_file(chosen: str | None) -> str:
    """The control file of sums of usage, as a Ledger takes it, with what earlier versions kept of them. Raises
    ConfigError."""
    from ..control.usage.ledger import FILE, cannot_open
    from ..state.control import OLD_USAGE, migrate

    folder = state_path(chosen, "usage")
    path = "" if chosen else os.path.abspath(state_path(None, CONTROL_FILE))
    try:
        migrate(path or os.path.abspath(folder / FILE), OLD_USAGE, is_default=not chosen)
    except (sqlite3.Error, OSError) as error:
        raise cannot_open(folder, path, error) from error
    return path


def require_keys(host: str, access: Access, *, is_guarded: bool) -> None:
    """Raises ConfigError where other machines could connect and nobody would ask who they are. is_guarded: something
    else does, or nobody need to."""
    from ..server.listen import is_loopback

    if not (is_guarded or access.asks or is_loopback(host)):
        raise ConfigError(
            f"--host {host or repr(host)} can be reached from other machines, and no API key is asked for: make one "
            "with `tokenmill keys create NAME`, give --api-key or --api-key-file, or say --insecure.",
            param="host",
        )


def open_accounting(chosen: str | None, kept_days: int) -> Accounting | None:
    """The account of usage: journals in the folder `chosen`, or where they are by default, and sums; None and errors as
    for responses."""
    from ..control.usage.accounting import Accounting

    def opened(path: Path) -> Accounting:
        accounting = Accounting(path, usage_file(chosen), kept_days=kept_days)
        accounting.open()
        return accounting

    return _opened(chosen, "usage", opened, "Usage is not counted.", (CONTROL_FILE,))
