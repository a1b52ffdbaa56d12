"""One server of others: its kept connections, what is open there, and its health.

It is down after a failed connection or some failed answers in a row, until a check succeeds. Checks of one that is down
come less and less often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from ...core.ports import Clock
from .connection import BadReply, UpstreamAddress, UpstreamConnection

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
MOST_FAILURES = 3
"""Answers that fail one after the other before no more are asked for."""


class Health:
    """is_up: it may be asked; why: what was wrong last; next_check_s: when to look at it again."""

    def __init__(self, check_s: float) -> None:
        self._check_s = check_s
        self._delay_s = 0.0
        self._num_failures = 0
        self.is_up = True
        self.why = ""
        self.next_check_s = 0.0

    def succeeded(self, now: float) -> None:
        """It answered, whatever it was asked."""
        self.is_up = True
        self.why = ""
        self._num_failures = 0
        self._delay_s = 0.0
        self.next_check_s = now + self._check_s

    def failed(self, now: float, why: str, *, is_unreachable: bool) -> None:
        """is_unreachable: no answer would have come to anything else either."""
        self.why = why
        self._num_failures += 1
        if not self.is_up and not is_unreachable:
            return  # of a call from before
        if is_unreachable or self._num_failures >= MOST_FAILURES:
            self.is_up = False
            self._delay_s = min(max(2 * self._delay_s, FIRST_DELAY_S), LONGEST_DELAY_S)
            self.next_check_s = now + self._delay_s


CONNECT_S = 5.0
CHECK_S = 5.0
CHECK_TIMEOUT_S = 5.0
MODELS_PATH = "/v1/models"
_MAX_CARDS_BYTES = 1 << 20
_MAX_KEPT = 64
_MAX_IDS = 1000
_log = logging.getLogger(__name__)


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


class Upstream:
    """name: of the model it serves. key: the bearer token it wants; "": none. timeout_s: longest silence of an answer.

    num_open   calls that it works on
    num_calls  it was ever given
    model_ids  what it calls its models, as far as it has said
    """

    def __init__(
        self, name: str, address: UpstreamAddress, clock: Clock, *, key: str = "", timeout_s: float = 300.0
    ) -> None:
        self.name = name
        self.address = address
        self.timeout_s = timeout_s
        self.health = Health(CHECK_S)
        self.num_open = 0
        self.num_calls = 0
        self.model_ids: tuple[str, ...] = ()
        self._clock = clock
        self._tls = address.tls()
        self._kept: list[UpstreamConnection] = []
        self._busy: set[UpstreamConnection] = set()
        self._headers = {"host": address.authority, "user-agent": "tokenmill", "accept-encoding": "identity"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._checking: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        """What it is to be asked for: the only model that it has, where it knows none of our name."""
        return self.model_ids[0] if len(self.model_ids) == 1 else self.name

    def open(self) -> None:
        """Begin to look at it."""
        if self._checking is None:
            self._checking = asyncio.create_task(self._keep_checking(), name="upstream-check")

    async def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
            self._checking = None
        while self._kept:
            self._kept.pop().close()

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> UpstreamConnection:
        """A connection on which the head of the answer has come; `give_back` takes it. Raises BadReply, which is noted
        as a failure."""
        while True:
            is_kept = bool(self._kept)
            try:
                connection = self._kept.pop() if is_kept else await self._connect()
            except BadReply as error:
                self.failed(str(error), is_unreachable=True)
                raise
            self._busy.add(connection)
            try:
                await connection.send(
                    method, self.address.base + path, {**self._headers, **headers}, body, self.timeout_s
                )
                await connection.head(self.timeout_s)
                return connection
            except BadReply as error:
                self._drop(connection)
                if error.is_kept:
                    continue  # it had been given up at the other end: the call was not seen there
                self.failed(str(error), is_unreachable=False)
                raise
            except BaseException:
                self._drop(connection)
                raise

    def give_back(self, connection: UpstreamConnection) -> None:
        """Whatever came of the call."""
        if connection.is_reusable and len(self._kept) < _MAX_KEPT:
            self._busy.discard(connection)
            self._kept.append(connection)
        else:
            self._drop(connection)

    def end_calls(self) -> None:
        """Those that it works on fail."""
        for connection in self._busy:
            connection.close()

    def facts(self) -> dict[str, Any]:
        """For /admin/models."""
        health = self.health
        return {
            "url": str(self.address),
            "state": "up" if health.is_up else "down",
            "why": health.why or None,
            "model": self.model,
            "num_open": self.num_open,
            "num_calls": self.num_calls,
        }

    def _drop(self, connection: UpstreamConnection) -> None:
        self._busy.discard(connection)
        connection.close()

    def failed(self, why: str, *, is_unreachable: bool) -> None:
        was_up = self.health.is_up
        self.health.failed(self._clock.now(), why, is_unreachable=is_unreachable)
        if was_up and not self.health.is_up:
            _log.warning("The upstream %s of %s is not asked any more: %s.", self.address, self.name, why)

    def succeeded(self) -> None:
        if not self.health.is_up:
            _log.warning("The upstream %s of %s is asked again.", self.address, self.name)
        self.health.succeeded(self._clock.now())

    async def check(self) -> None:
        """Ask which models it has. What comes of it is noted."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                self.model_ids = await self._ask_models()
        except (BadReply, TimeoutError) as error:
            self.failed(str(error) or f"{MODELS_PATH} took {CHECK_TIMEOUT_S:g} s", is_unreachable=True)
        else:
            self.succeeded()

    async def _connect(self) -> UpstreamConnection:
        return await UpstreamConnection.open(self.address, self._tls, CONNECT_S)

    async def _ask_models(self) -> tuple[str, ...]:
        connection = await self._connect()  # a new one: it must take them
        try:
            path = self.address.base + MODELS_PATH
            await connection.send("GET", path, self._headers, b"", CHECK_TIMEOUT_S)
            status = await connection.head(CHECK_TIMEOUT_S)
            data = bytearray()
            async for piece in connection.body(CHECK_TIMEOUT_S):
                data += piece
                if len(data) > _MAX_CARDS_BYTES:
                    raise BadReply(f"{MODELS_PATH} does not end")
        finally:
            connection.close()
        if status != 200:
            raise BadReply(f"{MODELS_PATH} answered {status}")
        try:
            found = msgspec.json.decode(bytes(data), type=_Cards)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise BadReply(f"{MODELS_PATH} answered no list of models") from None
        ids = tuple(card.id for card in found.data[:_MAX_IDS])
        return () if self.name in ids else ids

    async def _keep_checking(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(max(0.05, self.health.next_check_s - self._clock.now()))
