"""Outputs of ended sequences in a file, so that what is drafted from survives a restart.

A row of the file's table (state/kept.py) is an output: its owner is the tenant's digest, so that all of a tenant can be
deleted; its key, a time and the rest of the scope; its body, the digest of the tokenizer, a checksum, and the tokens.
No scope can be read from a digest. Several processes may use one file: each reads what all have kept when it starts,
and the outputs of other tokenizers stay until their room is needed.

Where room is needed, the tenant that has most gives its oldest. Nothing here is worth an answer: a file that cannot be
read or written means fewer drafts, and a line in the log.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ..core.errors import ConfigError
from ..ops.drafts import OUTPUT_BYTES, SEQUENCE_TOKEN_BYTES
from ..state.database import Damaged, open_database, set_aside
from ..state.file import FAILURES, StateFile
from ..state.kept import KEPT, Kind

MAX_BYTES = 4 * OUTPUT_BYTES // SEQUENCE_TOKEN_BYTES
"""Of tokens in a file: as many as are remembered in memory."""

KEPT_S = 30 * 86400.0

_OUTPUTS = KEPT._replace(mark=(0x746D4F54, 1))
"""A file of its own: one that cannot be read is begun anew, which no other state may be."""

_KIND = Kind("output", MAX_BYTES)
_HEAD = struct.Struct("<32sI")
_SWEEP_S = 60.0
_BUSY_S = 5.0
_OTHERWISE = "Earlier answers will not be remembered after a restart"

log = logging.getLogger(__name__)

Output = tuple[str, list[int]]
"""Of which scope (`core.speculation.draft_scope`), and its tokens."""


def prepare_outputs(path: str) -> None:
    """Make the file where it is not there, and set a damaged one aside. Raises ConfigError where it cannot be used, or
    is something else."""
    try:
        try:
            open_database(path, _OUTPUTS, busy_s=_BUSY_S).close()
        except Damaged as error:
            log.error("%s is damaged: %s. It is now %s, and begun anew.", path, error, set_aside(path))
            open_database(path, _OUTPUTS, busy_s=_BUSY_S).close()
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"suffix_decoding_store of speculative_config, {path}, cannot be used: {error}. Name another file.",
            param="speculative_config",
        ) from error


class KeptOutputs:
    """Those of one tokenizer, whose digest is given in hex. `open` it before use, `close` it after; a thread of its own
    writes."""

    def __init__(self, path: str, tokenizer: str, wall_s: Callable[[], float] = time.time) -> None:
        self._file = StateFile(path, _OUTPUTS, busy_s=_BUSY_S)
        self._tokenizer = bytes.fromhex(tokenizer)
        self._wall_s = wall_s
        self._last_ns = 0
        self._is_open = False
        self._forgotten: set[str] = set()

    def open(self, most: int) -> list[Output]:
        """The latest outputs that are there, so many at most, the oldest first. Where the file cannot be read there are
        none, and none are kept."""
        found: list[Output] = []
        try:
            self._file.open()
            self._is_open = True
            self._file.ask(lambda: found.extend(self._read_all()))
        except (*FAILURES, ConfigError) as error:
            log.error("%s: %s cannot be read: %s.", _OTHERWISE, self._file.path, error)
            self.close()
            return []
        self._file.every(_SWEEP_S, self._sweep)
        return found[-most:]

    def add(self, scope: str, tokens: Sequence[int]) -> None:
        """Written soon. What was added is in the file when `close` returns."""
        if not self._is_open:
            return
        now_s = self._wall_s()
        self._last_ns = max(self._last_ns + 1, int(now_s * 1e9))
        owner, _, rest = scope.partition(".")
        if owner in self._forgotten:
            return
        key = self._last_ns.to_bytes(8, "big") + rest.encode()

        def write(database: sqlite3.Connection) -> None:
            body = self._body_of(key, tokens)
            _KIND.put(database, owner, key, body, now_s + KEPT_S, len(body))

        self._file.put(lambda: self._write(write))

    def forget(self, owners: Sequence[str]) -> None:
        """Of tenants with these digests nothing is kept, and what is in the file goes soon."""
        self._forgotten.update(owners)
        if self._is_open:
            self._file.put(lambda: self._delete(owners))

    def close(self) -> None:
        """May be called again."""
        if self._is_open:
            self._is_open = False
            self._file.put(self._sweep)
            self._file.close()

    def _body_of(self, key: bytes, tokens: Sequence[int]) -> bytes:
        packed = np.asarray(tokens, "<i4").tobytes()
        return _HEAD.pack(self._tokenizer, zlib.crc32(key + packed)) + packed

    def _read(self, key: bytes, owner: str, body: bytes) -> Output | None:
        """None: it is of another tokenizer, or not as it was written."""
        if len(body) <= _HEAD.size or len(body) % 4:
            return None
        tokens = np.frombuffer(body, "<i4", offset=_HEAD.size).tolist()
        if self._body_of(key, tokens) != body:
            return None
        return f"{owner}.{key[8:].decode()}" if owner else "", tokens

    # ---- in the thread ----

    def _read_all(self) -> list[Output]:
        self._sweep()
        rows = [
            (key, owner, body)
            for owner, key, body in _KIND.rows(self._file.database)
            if isinstance(key, bytes) and isinstance(body, bytes)
        ]
        return [output for row in sorted(rows) if (output := self._read(*row)) is not None]

    def _delete(self, owners: Sequence[str]) -> None:
        def delete(database: sqlite3.Connection) -> None:
            for owner in owners:
                _KIND.delete_all(database, owner)

        self._file.attempt(delete, "Answers of deleted tenants are still kept")
        self._give_back()

    def _sweep(self) -> None:
        self._write(lambda database: _KIND.make_room(database, self._wall_s()))
        self._give_back()

    def _give_back(self) -> None:
        self._file.shrink()
        self._file.clear_journal()

    def _write(self, write: Callable[[sqlite3.Connection], None]) -> None:
        self._file.attempt(write, _OTHERWISE)
