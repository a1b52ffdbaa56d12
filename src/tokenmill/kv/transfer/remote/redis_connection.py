"""redis-py's connections, with limits for all that a call sends and receives, and with errors that are the system's.

The package's own limit is for each read alone: who sends a byte now and then would hold a thread for ever, and who
announces a value of any length would have it kept in memory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from ....core.units import KiB

_HELLO_BYTES = 64 * KiB
"""Most that answers have while a connection begins."""


class _Bounded:
    """Of a class of connections: those whose sockets are bounded."""

    _until_s = 0.0
    _socket: BoundedSocket

    def _connect(self) -> BoundedSocket:
        raw: socket.socket = super()._connect()  # type: ignore[misc]
        self._socket = BoundedSocket(raw, self._until_s, _HELLO_BYTES)
        return self._socket

    def open(self, until_s: float) -> None:
        """Raises OSError. Of what the server says to the login only the kind is told: it may repeat the password."""
        self._until_s = until_s
        with as_os_errors():
            try:
                self.connect()  # type: ignore[attr-defined]
            except (redis.ResponseError, redis.AuthenticationError) as error:
                kind = getattr(error, "status_code", None) or "an error"
                raise PermissionError(f"The server refuses the login: {kind}.") from None

    def bound(self, until_s: float, most_bytes: int) -> None:
        """Of the next call: when it ends, and how much its answers have at most."""
        self._socket.bound(until_s, most_bytes)

    def close(self) -> None:
        self.disconnect()  # type: ignore[attr-defined]


class TCPConnection(_Bounded, redis.Connection):
    pass


class TLSConnection(_Bounded, redis.SSLConnection):
    pass


class UnixConnection(_Bounded, redis.UnixDomainSocketConnection):
    port = 0
    """redis-py asks for it where connecting takes too long."""


RedisConnection = TCPConnection | TLSConnection | UnixConnection


def ask(connection: RedisConnection, commands: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    """Send them all: the answers, as they come; an error that the server gives to one command is such an answer. Raises
    OSError."""
    with as_os_errors():
        connection.send_packed_command(connection.pack_commands(commands))
    return (_answer(connection.read_response) for _ in commands)


def _answer(read: Callable[[], Any]) -> Any:
    with as_os_errors():
        try:
            return read()
        except redis.ResponseError as error:
            return error


def require(answer: Any) -> Any:
    """Raises OSError where it is an error."""
    if isinstance(answer, redis.ResponseError):
        raise OSError(_words(answer))
    return answer


def is_full(answer: Any) -> bool:
    return isinstance(answer, redis.OutOfMemoryError)


def is_wrong_type(answer: Any) -> bool:
    return isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE")


@contextmanager
def as_os_errors() -> Iterator[None]:
    try:
        yield
    except redis.TimeoutError as error:
        raise TimeoutError("The server takes too long.") from error
    except redis.AuthenticationError as error:
        raise PermissionError(_words(error)) from error
    except redis.ConnectionError as error:
        raise ConnectionError(_words(error)) from error
    except redis.RedisError as error:
        raise OSError(_words(error)) from error


def _words(error: redis.RedisError) -> str:
    kind = getattr(error, "status_code", None)
    text = str(error)[:200]
    return f"{kind} {text}" if kind else text


class BoundedSocket:
    """A socket whose calls end in time, however little the other end sends at once, and that takes no more than is due:
    a socket's own limit is for each read alone. As much of it as is used.

    until_s     of time.monotonic: what is sent or received later times out
    left_bytes  that may still be received
    """

    def __init__(self, raw: socket.socket, until_s: float, left_bytes: int) -> None:
        self._raw = raw
        self.until_s = until_s
        self.left_bytes = left_bytes

    def bound(self, until_s: float, left_bytes: int) -> None:
        self.until_s, self.left_bytes = until_s, left_bytes

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            self._limit()
            rest = rest[self._raw.send(rest) :]

    def recv_into(self, target: bytearray | memoryview) -> int:
        self._limit()
        return self._note(self._raw.recv_into(target))

    def recv(self, num_bytes: int) -> bytes:
        self._limit()
        data = self._raw.recv(num_bytes)
        self._note(len(data))
        return data

    def shutdown(self, how: int) -> None:
        self._raw.shutdown(how)

    def close(self) -> None:
        self._raw.close()

    def _limit(self) -> None:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("The other end takes too long.")
        self._raw.settimeout(left_s)

    def _note(self, num_bytes: int) -> int:
        self.left_bytes -= num_bytes
        if self.left_bytes < 0:
            raise ConnectionError("The other end sends more than was asked for.")
        return num_bytes
