"""Answers of calls with an Idempotency-Key, recorded as they are sent, and kept for a day and no larger than told.

A key is its owner's, and is kept as a digest. Of the call itself there is a digest only.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import msgspec
from starlette.types import Message, Send

from ...core.errors import Overloaded, Unavailable
from ...core.units import MiB
from ...state.database import Schema, cannot_use, transaction
from ...state.file import FAILURES, StateFile
from ...state.kept import Kind, Row, old_format

_AT_ONCE = 1 << 16


class Taped(NamedTuple):
    """A whole answer. digest: of the call that it answers."""

    digest: bytes
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


class Tape:
    """Records what goes through `through(send)`. Complete answers of status 200 and of at most max_bytes go to `keep`,
    before their last bytes are sent. Whoever knows that an answer is not what the call is for calls `spoil`: a stream
    that ends with an error has status 200 too; and so does who has done with the tape.

    held    a context in which so many bytes count as held; raises Overloaded: then the answer is not kept
    digest  of the call, as soon as it is known
    is_kept whether the answer went to `keep`
    """

    def __init__(
        self,
        max_bytes: int,
        held: Callable[[int], AbstractContextManager[None]],
        keep: Callable[[Taped], None],
    ) -> None:
        self._max_bytes = max_bytes
        self._held = held
        self._num_held = 0
        self._holding = ExitStack()
        self._keep = keep
        self._status = 0
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._parts: list[bytes] = []
        self._size = 0
        self._is_spoiled = False
        self.is_kept = False
        self.digest = b""

    def spoil(self) -> None:
        self._is_spoiled = True
        self._parts.clear()
        self._holding.close()

    def through(self, send: Send) -> Send:
        async def record(message: Message) -> None:
            if not self._is_spoiled:
                self._note(message)
            await send(message)

        return record

    def _note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple(message.get("headers", ()))
            if self._status != 200:
                self.spoil()
        elif message["type"] == "http.response.body":
            part = bytes(message.get("body", b""))
            self._size += len(part)
            if self._size > self._max_bytes or not self._hold():
                self.spoil()
                return
            self._parts.append(part)
            if not message.get("more_body", False) and self.digest:
                body = b"".join(self._parts)
                self.spoil()
                self.is_kept = True
                self._keep(Taped(self.digest, self._status, self._headers, body))

    def _hold(self) -> bool:
        """Have what came counted, in large pieces; whether there is room."""
        more = self._size - self._num_held
        if more > 0:
            more = -(-more // _AT_ONCE) * _AT_ONCE
            try:
                self._holding.enter_context(self._held(more))
            except Overloaded:
                return False
            self._num_held += more
        return True


FLAG = "--idempotency-store"
KEPT_S = 24 * 3600
MAX_BYTES = 256 * MiB
_KIND = "answer"
_SWEEP_S = 600.0
_OTHERWISE = "Answers are not kept"
_BEGUN, _LOST = 0, -1
"""In place of a status: the call is under way, or ended with its process; it was carried out, its answer not kept."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Taped).decode
_HAS_BEGUN, _IS_LOST = (_encode(Taped(b"", status, (), b"")) for status in (_BEGUN, _LOST))


def _rows(database: sqlite3.Connection) -> Iterator[Row]:
    for key, owner, created_s, size, *answer in database.execute(
        "SELECT key, owner, created_s, size, digest, status, headers, body FROM answer"
    ):
        digest, status, headers, body = answer
        taped = (digest, status, msgspec.msgpack.decode(headers), body)
        yield Row(_KIND, owner, key, created_s + KEPT_S, size, _encode(taped))


OLD = old_format("answers.db", Schema(FLAG, (0x746D494B, 1), "CREATE TABLE answer (key BLOB PRIMARY KEY);"), _rows)


class AnswerStore:
    """`open` it before use, `close` it after. file: where answers are kept, or its path."""

    def __init__(
        self,
        file: StateFile | str,
        *,
        max_bytes: int = MAX_BYTES,
        kept_s: float = KEPT_S,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._file = StateFile(file) if isinstance(file, str) else file
        self._max_bytes = max_bytes
        self._kind = Kind(_KIND, max_bytes)
        self._kept_s = kept_s
        self._wall_s = wall_s
        self._lost: set[bytes] = set()  # calls of which not even that could be written

    @property
    def max_answer_bytes(self) -> int:
        """A longer answer is not kept."""
        return self._max_bytes // 8

    def open(self) -> None:
        """Raises ConfigError where the file cannot be used."""
        try:
            self._file.open(OLD)
        except FAILURES as error:
            raise cannot_use(FLAG, self._file.path, error) from error
        self._file.every(_SWEEP_S, self._sweep)

    def close(self) -> None:
        """What was put is in the file when this returns."""
        self._file.close()

    def put(self, owner: str, key: str, answer: Taped) -> None:
        """Whoever asks after this gets it; it need not be waited for."""
        name, now_s = _name(owner, key), self._wall_s()
        size_bytes = len(answer.body) + sum(len(name) + len(value) for name, value in answer.headers)

        def write(database: sqlite3.Connection) -> None:
            self._kind.put(database, owner, name, _encode(answer), now_s + self._kept_s, size_bytes)
            self._kind.make_room(database, now_s)

        def job() -> None:
            if self._file.attempt(write, _OTHERWISE):
                self._lose(owner, name)
            else:
                self._file.shrink()

        self._file.put(job)

    async def claim(self, owner: str, key: str) -> Taped | None:
        """The kept answer. None: there is none, and it is in the file that the call has begun: where nothing can be
        written no answer would be kept, and a repeat be computed and billed again. Raises Unavailable, also for a call
        whose answer could not be kept."""
        name = _name(owner, key)

        def read() -> Taped | None:
            database, now_s = self._file.database, self._wall_s()
            body = self._kind.get(database, owner, name, now_s)
            answer = None if body is None else _decode(body)
            if name in self._lost or (answer is not None and answer.status == _LOST):
                raise Unavailable(
                    "The call with this Idempotency-Key was carried out, but its answer could not be kept; it is not "
                    "carried out again. Send a new key if it shall be."
                )
            if answer is None or answer.status == _BEGUN:
                with transaction(database):
                    self._kind.put(database, owner, name, _HAS_BEGUN, now_s + self._kept_s)
                return None
            return answer

        try:
            return await self._file.do(read)
        except (*FAILURES, msgspec.MsgspecError) as error:
            raise Unavailable(
                f"The store of answers cannot be used: {error}. Calls with an Idempotency-Key are refused while "
                "their answers cannot be kept."
            ) from error

    def release(self, owner: str, key: str) -> None:
        """A call that was claimed has failed: its repeat is carried out."""
        name = _name(owner, key)

        def write(database: sqlite3.Connection) -> None:
            if self._kind.get(database, owner, name, self._wall_s()) == _HAS_BEGUN:
                self._kind.delete(database, owner, name)

        self._file.put(lambda: self._attempt(write))

    # ---- in the thread ----

    def _attempt(self, write: Callable[[sqlite3.Connection], None]) -> None:
        self._file.attempt(write, _OTHERWISE)

    def _sweep(self) -> None:
        self._attempt(lambda database: self._kind.make_room(database, self._wall_s()))
        self._file.shrink()

    def _lose(self, owner: str, name: bytes) -> None:
        """An answer could not be kept. To say so takes a few bytes, which may find room where it did not."""
        try:
            with transaction(self._file.database):
                self._kind.change(self._file.database, owner, name, _IS_LOST)
        except FAILURES:
            self._lost.add(name)


def _name(owner: str, key: str) -> bytes:
    return hashlib.sha256(f"{len(owner)} {owner} {key}".encode()).digest()
