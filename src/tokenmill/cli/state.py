"""What a server keeps for its user between runs, and where: a folder that nobody else can read."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..server.responses.store import ResponseStore

OFF = "off"
_log = logging.getLogger(__name__)


def default_state_dir() -> Path:
    """TOKENMILL_STATE, else XDG_STATE_HOME/tokenmill, else ~/.local/state/tokenmill. It need not be there yet."""
    if chosen := os.environ.get("TOKENMILL_STATE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tokenmill"


def open_response_store(chosen: str | None) -> ResponseStore | None:
    """The store at the path `chosen`, or where it is by default; None: there is none, because it is off or because the
    default one cannot be used, of which the log tells. Raises ConfigError for a chosen one that cannot be used."""
    from ..server.responses.store import ResponseStore

    if chosen == OFF:
        return None
    try:
        store = ResponseStore(str(Path(chosen).expanduser() if chosen else default_state_dir() / "responses.db"))
        store.open()
    except (ConfigError, RuntimeError) as error:
        if chosen:
            raise
        _log.warning("Responses of /v1/responses are not kept. %s", error)
        return None
    return store
