"""The resume file: streamed calls under way with the outputs that came of them, and the answers of those that ended.

One thread writes. What a step gave to all streams is one transaction; nobody waits for it, because a lost end is
computed again to the same bits. One process has the file at a time. Of a call there is enough to carry it out again,
with the same request and the same names.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from ...core.errors import Unavailable
from ...core.events import Output
from ...core.request import Request
from ...state.database import Schema, cannot_use, transaction
from ...state.file import FAILURES, StateFile
from ...state.kept import KEPT, Kind, Row, insert, old_format

Headers = tuple[tuple[bytes, bytes], ...]


class KeptCall(NamedTuple):
    """id           of its answer, which is the same in every life
    created      of its answer, in seconds since the epoch
    fingerprint  of what answers it: another one would not give the same tokens
    request      of the one choice that it has
    waits        its client has asked that it goes on while nobody is connected
    owner, client, tenant's key, request_id, told_id: as in the state of the call (`http.Gate`)
    path, query, headers, body: of the call; headers that hold secrets are left out
    """

    id: str
    created: int
    fingerprint: str
    request: Request
    waits: bool
    owner: str
    client: str
    key: str
    request_id: str
    told_id: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


class KeptAnswer(NamedTuple):
    """A whole answer. body: for status 200 events, each with its number."""

    status: int
    headers: Headers
    body: bytes


class Unfinished(NamedTuple):
    """A call that an earlier process left. key: of its row; outputs: what had come of it."""

    key: int
    call: KeptCall
    outputs: list[Output]


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(KeptCall).decode
decode_output = msgspec.msgpack.Decoder(Output).decode
decode_loaded = msgspec.msgpack.Decoder(dict[str, Any]).decode
decode_answer = msgspec.msgpack.Decoder(KeptAnswer).decode


ADAPTER, MODEL = "adapter", "model"
"""Kinds of what is loaded while the server runs."""

FLAG = "--resume-file"
OLD_SCHEMA = Schema(FLAG, (0x746D5246, 1), "CREATE TABLE call (key INTEGER PRIMARY KEY);")
_SWEEP_S = 60.0
_BUSY_S = 2.0
_OWNED = KEPT._replace(settings=("locking_mode=EXCLUSIVE", *KEPT.settings))
_OTHERWISE = "Streams cannot be resumed"
_CALLS = Kind("call")
_OUTPUTS = Kind("output")
"""Of which the owner is the call, and the key counts from 1."""

_LOADED = Kind("loaded")
"""Of which the owner is the kind, and the key the name."""

_KEPT_S = Kind("kept_s")
"""How long was kept what is there: one row, with a number as text."""

_STREAM, _REQUEST_ID = "stream", "request id"
"""Answers by their ids, and these by the X-Request-Id and the number of the call, `_named`."""

_log = logging.getLogger(__name__)


class ResumeStore:
    """`open` it before use, `close` it after. path: of the file, whose folder is made. max_bytes: of all answers.
    kept_s: how long answers are kept, and how old a call may be that is taken up again."""

    def __init__(self, path: str, *, max_bytes: int, kept_s: float, wall_s: Callable[[], float] = time.time) -> None:
        self._file = StateFile(path, _OWNED, busy_s=_BUSY_S)
        self._streams = Kind(_STREAM, max_bytes)
        self._names = Kind(_REQUEST_ID, max_bytes)
        self._kept_s = kept_s
        self._wall_s = wall_s
        self._last_key = 0
        self._loaded: list[tuple[str, str, dict[str, Any]]] = []
        self._num_outputs: dict[int, int] = {}  # in the file, of calls whose outputs go there

    def open(self) -> None:
        """Raises ConfigError where the file cannot be used, or another process uses it."""
        old = old_format("", OLD_SCHEMA, self._rows)
        try:
            self._file.open(old)
            self._file.ask(self._begin)
        except (*FAILURES, msgspec.MsgspecError) as error:
            self._file.close()
            is_held = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            why = OSError("another server has it. Each needs a file of its own") if is_held else error
            raise cannot_use(FLAG, self._file.path, why) from error
        self._file.every(_SWEEP_S, self._sweep)

    def close(self) -> None:
        """What was put is in the file when this returns."""
        self._file.put(self._file.shrink)
        self._file.close()

    def loaded(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """What earlier processes had kept of this kind, by name."""
        return [(name, what) for found, name, what in self._loaded if found == kind]

    async def keep_loaded(self, kind: str, name: str, what: dict[str, Any] | None) -> None:
        """Have the next process load it again; None: not any more."""

        def write(database: sqlite3.Connection) -> None:
            if what is None:
                _LOADED.delete(database, kind, name)
            else:
                _LOADED.put(database, kind, name, encode(what), 0.0)

        await self._file.do(lambda: self._write(write))

    def new_key(self) -> int:
        self._last_key += 1
        return self._last_key

    async def begin(self, key: int, call: KeptCall) -> bool:
        """Whether the call is in the file; where that cannot be written the log tells, once."""
        until_s = self._wall_s() + self._kept_s

        def job() -> bool:
            if self._write(lambda database: _CALLS.put(database, "", key, encode(call), until_s)):
                self._num_outputs[key] = 0
                return True
            return False

        return await self._file.do(job)

    def add(self, outputs: Sequence[tuple[int, Output]]) -> None:
        """Outputs of calls, by their keys, as one transaction. Where it fails, these calls get no more: what is in the
        file of a call is always its beginning."""

        def job() -> None:
            known = [(key, output) for key, output in outputs if key in self._num_outputs]

            def write(database: sqlite3.Connection) -> None:
                rows = []
                for key, output in known:
                    self._num_outputs[key] += 1
                    rows.append(Row(_OUTPUTS.name, str(key), self._num_outputs[key], 0.0, 0, encode(output)))
                insert(database, rows)

            if not self._write(write):
                for key, _ in known:
                    self._num_outputs.pop(key, None)

        self._file.put(job)

    async def end(self, key: int, call: KeptCall, answer: KeptAnswer) -> None:
        """Keep the answer in place of the call."""
        now_s = self._wall_s()
        until_s = now_s + self._kept_s
        size_bytes = len(answer.body) + sum(len(name) + len(value) for name, value in answer.headers)

        def write(database: sqlite3.Connection) -> None:
            self._delete(database, key)
            self._streams.put(database, call.owner, call.id, encode(answer), until_s, size_bytes)
            if call.told_id:
                name, target = _named(call.told_id, key), call.id.encode()
                self._names.put(database, call.owner, name, target, until_s, len(name) + len(target))
            self._make_room(database, now_s)

        await self._file.do(lambda: self._write(write))

    def drop(self, key: int) -> None:
        """Nothing of the call is wanted any more."""
        self._file.put(lambda: self._drop(key))

    async def find(self, owner: str, name: str) -> KeptAnswer | None:
        """The answer with this id, or, of those that are there, of the call begun last that had this X-Request-Id.
        Raises Unavailable."""

        def read() -> KeptAnswer | None:
            database, now_s = self._file.database, self._wall_s()
            body = self._streams.get(database, owner, name, now_s)
            identifiers = self._names.latest(database, owner, f"{name}\n") if body is None else iter(())
            while body is None and (identifier := next(identifiers, None)) is not None:
                body = self._streams.get(database, owner, identifier.decode(), now_s)
            return None if body is None else decode_answer(body)

        try:
            return await self._file.do(read)
        except (*FAILURES, msgspec.MsgspecError) as error:
            raise Unavailable(f"The resume file cannot be read: {error}.") from error

    async def unfinished(self) -> list[Unfinished]:
        """The calls that an earlier process left, in their order; those that are too old or cannot be read are
        dropped. Raises Unavailable."""
        try:
            return await self._file.do(self._read_unfinished)
        except (*FAILURES, msgspec.MsgspecError) as error:
            raise Unavailable(f"The resume file cannot be read: {error}.") from error

    # ---- in the thread ----

    def _begin(self) -> None:
        database = self._file.database
        self._age_anew(database)
        named = (str(key).rpartition("\n")[2] for _, key, _ in self._names.rows(database))
        self._last_key = max(map(int, chain((key for _, key, _ in _CALLS.rows(database)), named)), default=0)
        self._loaded = [(kind, str(name), decode_loaded(what)) for kind, name, what in _LOADED.rows(database)]

    def _age_anew(self, database: sqlite3.Connection) -> None:
        """What an earlier process kept is kept as long as this one keeps things."""
        found = _KEPT_S.get(database, "", "", 0.0)
        was_s = self._kept_s if found is None else float(found)
        if found is not None and was_s == self._kept_s:
            return
        with transaction(database):
            for kind in (_CALLS, self._streams, self._names):
                kind.postpone(database, self._kept_s - was_s)
            _KEPT_S.put(database, "", "", str(self._kept_s).encode(), 0.0)

    def _read_unfinished(self) -> list[Unfinished]:
        database, now_s = self._file.database, self._wall_s()
        found = []
        with transaction(database):
            for _, key, _ in _CALLS.rows(database):
                assert isinstance(key, int)
                body = _CALLS.get(database, "", key, now_s)
                if body is None:  # it is too old
                    self._delete(database, key)
                    continue
                try:
                    call = decode_call(body)
                    outputs = [decode_output(output) for _, _, output in _OUTPUTS.rows(database, str(key))]
                except msgspec.MsgspecError as error:
                    _log.warning("A call in %s cannot be read and is dropped: %s.", self._file.path, error)
                    self._delete(database, key)
                    continue
                self._num_outputs[key] = len(outputs)
                found.append(Unfinished(key, call, outputs))
        return found

    def _drop(self, key: int) -> None:
        self._write(lambda database: self._delete(database, key))

    def _delete(self, database: sqlite3.Connection, key: int) -> None:
        self._num_outputs.pop(key, None)
        _CALLS.delete(database, "", key)
        _OUTPUTS.delete_all(database, str(key))

    def _sweep(self) -> None:
        self._write(lambda database: self._make_room(database, self._wall_s()))

    def _make_room(self, database: sqlite3.Connection, now_s: float) -> None:
        self._streams.make_room(database, now_s)
        self._names.make_room(database, now_s)

    def _write(self, write: Callable[[sqlite3.Connection], None]) -> bool:
        return not self._file.attempt(write, _OTHERWISE)

    def _rows(self, database: sqlite3.Connection) -> Iterator[Row]:
        """What a file of an earlier version has."""
        for key, created_s, call in database.execute("SELECT key, created_s, call FROM call"):
            yield Row(_CALLS.name, "", key, created_s + self._kept_s, 0, call)
        for key, number, output in database.execute("SELECT call, number, output FROM output"):
            yield Row(_OUTPUTS.name, str(key), number, 0.0, 0, output)
        for kind, name, what in database.execute("SELECT kind, name, what FROM loaded"):
            yield Row(_LOADED.name, kind, name, 0.0, 0, what)
        for key, owner, identifier, name, created_s, size_bytes, status, headers, body in database.execute(
            "SELECT key, owner, id, name, created_s, size, status, headers, body FROM answer ORDER BY key"
        ):
            until_s, target = created_s + self._kept_s, identifier.encode()
            answer = (status, msgspec.msgpack.decode(headers), body)
            yield Row(_STREAM, owner, identifier, until_s, size_bytes, encode(answer))
            if name:
                yield Row(_REQUEST_ID, owner, _named(name, key), until_s, len(name) + len(target), target)


def _named(request_id: str, key: int) -> str:
    """Sorted by the number of the call; no header has a line break."""
    return f"{request_id}\n{key:020}"
