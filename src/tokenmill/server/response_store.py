"""Responses that outlive their call, a day long, and conversations, while they are used: no larger than told.

A response is kept with the input of its own call and the id of the one that it continues; the conversation of a chain
is put together when it is asked for. What is kept belongs to who asked for it: `owner`. Jobs are done in the order in
which they come, so whoever has a response's last event finds the response.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from ..api.responses.history import MAX_CHAIN, Conversation, Record
from ..core.errors import Unavailable
from ..core.units import MiB
from ..state.database import Schema, cannot_use, set_mark, transaction
from ..state.file import FAILURES, StateFile
from ..state.kept import KEPT, Kind, Row, old_format

FLAG = "--responses-store"
KEPT_S = 24 * 3600
CONVERSATION_KEPT_S = 30 * 24 * 3600
"""Since the last that came to a conversation."""
MAX_BYTES = 256 * MiB

_KIND = "response"
_SWEEP_S = 600.0
_SERVER = Kind("response server")
LEASE_S = 15.0
"""A process that has not said for so long that it lives has ended."""
_CONVERSATION = "conversation"
_OTHERWISE = "Responses are not kept"


class _Body(msgspec.Struct, array_like=True):
    """Of a row: see Record."""

    previous: str
    body: bytes
    input: bytes
    events: bytes = b""
    server: str = ""
    conversation: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode
_decode_conversation = msgspec.msgpack.Decoder(Conversation).decode

T = TypeVar("T")


def _rows(database: sqlite3.Connection) -> Iterator[Row]:
    for name, owner, created_s, size_bytes, *parts in database.execute(
        "SELECT id, owner, created_s, size_bytes, previous, body, input FROM response"
    ):
        yield Row(_KIND, owner, name, created_s + KEPT_S, size_bytes, _encode(parts))


OLD = old_format("responses.db", Schema(FLAG, (0x746D5253, 1), "CREATE TABLE response (id TEXT PRIMARY KEY);"), _rows)


class ResponseStore:
    """`open` it before use, `close` it after; both wait for the thread. file: where responses are kept, or its path.
    wall_s: seconds since the epoch, also of other processes that use the file. process: a name of this one, by which
    `has_ended` tells others when it has: at once, where their lease would be waited for."""

    def __init__(
        self,
        file: StateFile | str,
        *,
        max_bytes: int = MAX_BYTES,
        kept_s: float = KEPT_S,
        wall_s: Callable[[], float] = time.time,
        process: str = "",
        has_ended: Callable[[str], bool] = lambda process: False,
    ) -> None:
        self._file = StateFile(file) if isinstance(file, str) else file
        self._max_bytes = max_bytes
        self._kind = Kind(_KIND, max_bytes)
        self._conversations = Kind(_CONVERSATION, max_bytes)
        self._kept_s = kept_s
        self._wall_s = wall_s
        self._process = process.encode()
        self._has_ended = has_ended
        self._failure = ""
        self._runs = False
        self.name = secrets.token_hex(8)

    @property
    def max_record_bytes(self) -> int:
        """A call with more input than this is not kept."""
        return self._max_bytes // 8

    def open(self) -> None:
        """Raises ConfigError where the file cannot be used."""
        try:
            self._file.open(OLD)
        except FAILURES as error:
            raise cannot_use(FLAG, self._file.path, error) from error
        self._file.put(self._drop_old)
        self._file.every(_SWEEP_S, self._drop_old)
        self._file.every(LEASE_S / 3, self._renew)

    def close(self) -> None:
        """What was put is in the file when this returns."""
        self._file.put(self._end_lease)
        self._file.close()

    def put(self, record: Record) -> None:
        """Keep a response; it need not be waited for. If it cannot be kept, the log says so."""
        now_s = self._wall_s()

        def write(database: sqlite3.Connection) -> None:
            if record.server and not self._runs:
                self._runs = True
                self._write_lease(database)
            kept = _Body(record.previous, record.body, record.input, record.events, record.server, record.conversation)
            body = _encode(kept)
            self._kind.put(database, record.owner, record.id, body, now_s + self._kept_s, record.size_bytes)
            self._kind.make_room(database, now_s)

        def job() -> None:
            self._failure = self._file.attempt(write, _OTHERWISE)
            self._file.shrink()

        self._file.put(job)

    async def why_not(self) -> str:
        """Why no response can be kept now; "": it can, as far as is known. After a failure it is tried anew."""
        if not self._failure:
            return ""

        def job() -> None:
            self._failure = self._file.attempt(lambda database: set_mark(database, KEPT.mark), _OTHERWISE)

        await self._file.do(job)
        return self._failure

    async def settle(self, longest_s: float) -> None:
        """Wait until what was put before is in the file, at most so long."""
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._do(lambda database: None)

    async def get(self, owner: str, identifier: str) -> Record | None:
        return await self._do(lambda database: self._read(database, owner, identifier))

    async def chain(self, owner: str, identifier: str, most_bytes: int) -> list[Record]:
        """A response and all that it continues, the oldest first; it ends early where one is not there any more or
        where there are more than MAX_CHAIN or `most_bytes`: the first one's `previous` is then not ""."""

        def collect(database: sqlite3.Connection) -> list[Record]:
            found: list[Record] = []
            wanted, size_bytes = identifier, 0
            while wanted and len(found) < MAX_CHAIN and size_bytes <= most_bytes:
                record = self._read(database, owner, wanted)
                if record is None:
                    break
                found.append(record)
                size_bytes += record.size_bytes
                wanted = record.previous
            return found[::-1]

        return await self._do(collect)

    async def delete(self, owner: str, identifier: str) -> bool:
        """Whether there was one to delete."""

        return await self._do(lambda database: self._delete(database, self._kind, owner, identifier))

    # ---- conversations ----

    async def add_conversation(self, owner: str, conversation: Conversation) -> None:
        def job(database: sqlite3.Connection) -> None:
            with transaction(database):
                self._put_conversation(database, owner, conversation)

        await self._do(job)

    async def conversation(self, owner: str, identifier: str) -> Conversation | None:
        return await self._do(lambda database: self._conversation(database, owner, identifier))

    async def change_conversation(
        self, owner: str, identifier: str, change: Callable[[Conversation], Conversation]
    ) -> Conversation | None:
        """What it is then; `change` may raise, and is called in the store's thread. None: there is none."""

        def job(database: sqlite3.Connection) -> Conversation | None:
            with transaction(database):
                found = self._conversation(database, owner, identifier)
                if found is None:
                    return None
                changed = change(found)
                self._put_conversation(database, owner, changed)
            return changed

        return await self._do(job)

    def extend_conversation(self, owner: str, identifier: str, items: Sequence[bytes]) -> None:
        """Put items behind those of a conversation, if it is there still. If that cannot be, the log says so."""

        def extend(database: sqlite3.Connection) -> None:
            found = self._conversation(database, owner, identifier)
            if found is not None:
                changed = msgspec.structs.replace(found, items=(*found.items, *items))
                self._put_conversation(database, owner, changed)

        def job() -> None:
            self._file.attempt(extend, "Conversations are not kept")

        self._file.put(job)

    async def delete_conversation(self, owner: str, identifier: str) -> bool:
        """Whether there was one to delete."""
        return await self._do(lambda database: self._delete(database, self._conversations, owner, identifier))

    async def _do(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """The result of a job, in its turn. Raises Unavailable."""
        try:
            return await self._file.do(lambda: job(self._file.database))
        except (*FAILURES, msgspec.MsgspecError) as error:
            raise Unavailable(f"The store of responses cannot be read: {error}.") from error

    # ---- in the thread ----

    def _delete(self, database: sqlite3.Connection, kind: Kind, owner: str, identifier: str) -> bool:
        is_there = kind.get(database, owner, identifier, self._wall_s()) is not None
        with transaction(database):
            kind.delete(database, owner, identifier)
        self._file.shrink()
        self._file.clear_journal()
        return is_there

    def _conversation(self, database: sqlite3.Connection, owner: str, identifier: str) -> Conversation | None:
        body = self._conversations.get(database, owner, identifier, self._wall_s())
        return None if body is None else _decode_conversation(body)

    def _put_conversation(self, database: sqlite3.Connection, owner: str, conversation: Conversation) -> None:
        now_s, body = self._wall_s(), _encode(conversation)
        self._conversations.put(database, owner, conversation.id, body, now_s + CONVERSATION_KEPT_S, len(body))
        self._conversations.make_room(database, now_s)

    def _read(self, database: sqlite3.Connection, owner: str, identifier: str) -> Record | None:
        now_s = self._wall_s()
        body = self._kind.get(database, owner, identifier, now_s)
        if body is None:
            return None
        record = Record(identifier, owner, *msgspec.structs.astuple(_decode(body)))
        return record if self._runs_still(database, record.server, now_s) else record.abandoned()

    def _runs_still(self, database: sqlite3.Connection, server: str, now_s: float) -> bool:
        """Whether the process lives that runs a response, by the name of its store; "": it has ended in order."""
        if server in ("", self.name):
            return True
        process = _SERVER.get(database, "", server, now_s)
        return process is not None and not self._has_ended(process.decode())

    def _write_lease(self, database: sqlite3.Connection) -> None:
        _SERVER.put(database, "", self.name, self._process, self._wall_s() + LEASE_S)

    def _renew(self) -> None:
        """Say that this process lives, if it has run anything that others may ask for."""
        if self._runs:
            self._file.attempt(self._write_lease, _OTHERWISE)

    def _end_lease(self) -> None:
        if self._runs:
            self._runs = False
            self._file.attempt(self._delete_lease, _OTHERWISE)

    def _delete_lease(self, database: sqlite3.Connection) -> None:
        _SERVER.delete(database, "", self.name)

    def _drop_old(self) -> None:
        def sweep(database: sqlite3.Connection) -> None:
            for kind in (self._kind, self._conversations, _SERVER):
                kind.make_room(database, self._wall_s())

        self._file.attempt(sweep, _OTHERWISE)
        self._file.shrink()
        self._file.clear_journal()
