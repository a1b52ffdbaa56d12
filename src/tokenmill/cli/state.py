"""What a server keeps for its user between runs, and where: a folder that nobody else can read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..control.tenants.access import Access
    from ..control.usage.accounting import Accounting
    from ..server.config import ServerConfig
    from ..server.repeats.store import AnswerStore
    from ..server.responses.store import ResponseStore
    from ..server.resume.store import ResumeStore
    from ..state.file import StateFile

OFF = "off"
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


def open_kept_stores(responses: str | None, answers: str | None) -> tuple[ResponseStore | None, AnswerStore | None]:
    """`open_response_store` and `open_answer_store`, of which each file is opened once."""
    files: dict[Path, StateFile] = {}
    store = open_response_store(responses, files)
    try:
        return store, open_answer_store(answers, files)
    except BaseException:
        if store is not None:
            store.close()
        raise


def open_response_store(chosen: str | None, files: dict[Path, StateFile]) -> ResponseStore | None:
    """The store in the file `chosen`, or in that which is shared by default; None: there is none, because it is off, or
    because no file is chosen and there is none and none can be made, of which the log tells. files: by their paths,
    which more goes to. Raises ConfigError for one that is chosen, or is there, and cannot be used or trusted."""
    from ..server.responses.store import FORMER, ResponseStore

    return _open_kept(ResponseStore, FORMER.name, chosen, files, "Responses of /v1/responses are not kept.")


def open_answer_store(chosen: str | None, files: dict[Path, StateFile]) -> AnswerStore | None:
    """The store of calls with an Idempotency-Key; chosen, files, None and errors as for responses."""
    from ..server.repeats.store import FORMER, AnswerStore

    return _open_kept(AnswerStore, FORMER.name, chosen, files, "Calls with an Idempotency-Key are refused.")


def _open_kept(
    kind: Callable[[StateFile], S], former: str, chosen: str | None, files: dict[Path, StateFile], otherwise: str
) -> S | None:
    from ..state.file import StateFile

    def opened(path: Path) -> S:
        path = path.absolute()
        if path not in files:
            files[path] = StateFile(str(path), takes_over=not chosen)
        store = kind(files[path])
        store.open()
        return store

    return _opened(chosen, KEPT_FILE, opened, otherwise, former)


def _opened(chosen: str | None, name: str, open_at: Callable[[Path], T], otherwise: str, former: str = "") -> T | None:
    """former: the file that the one of this name takes over."""
    if chosen == OFF:
        return None
    path = None
    try:
        path = state_path(chosen, name)
        return open_at(path)
    except (ConfigError, RuntimeError) as error:
        if chosen or (path and (os.path.lexists(path) or (former and os.path.lexists(path.with_name(former))))):
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

    path = "" if chosen == OFF else str(state_path(chosen, "tenants.db"))
    access = Access(api_keys, os.path.abspath(path) if path else "")
    try:
        access.open()
    except ConfigError as error:
        if chosen or os.path.lexists(path):  # there may be keys in it
            raise
        _log.warning("No tenants are kept, and no keys given out. %s", error.message)
        return Access(api_keys)
    return access


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
    """The account of usage in the folder `chosen`, or where it is by default; None and errors as for responses."""
    from ..control.usage.accounting import Accounting

    def opened(path: Path) -> Accounting:
        accounting = Accounting(path, kept_days=kept_days)
        accounting.open()
        return accounting

    return _opened(chosen, "usage", opened, "Usage is not counted.")
