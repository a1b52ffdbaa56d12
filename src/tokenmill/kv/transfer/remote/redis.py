"""Values in Redis or Valkey: what it evicts at its `maxmemory` is gone, which is a miss.

Options: ttl (seconds that a value is kept after it was written), password_file, ca_file (of rediss://, beside the
system's), db (of unix://).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from ....core.errors import ConfigError
from ....core.units import KiB, MiB
from .backend import PARAM, Address, Buffer
from .calls import Connections

if TYPE_CHECKING:
    from .redis_connection import RedisConnection

CONNECT_S = 2.0
IDLE_S = 60.0
READ_BYTES = 256 * KiB
_PORT = 6379
_REPLY_BYTES = 512
"""An answer has at most so many, besides the value in it."""

_Result = TypeVar("_Result")


class RedisBackend:
    SCHEMES = ("redis", "rediss", "unix")
    OPTIONS = ("ttl", "password_file", "ca_file", "db")

    num_threads = 4
    look_names = 512
    look_s = 0.2
    batch_bytes = 2 * MiB

    def __init__(self, address: Address) -> None:
        url = address.url
        self.name = address.name
        self._ttl_s = address.number("ttl", 0)
        self._scheme = url.scheme
        self._options: dict[str, Any] = {
            "db": _database(address),
            "username": unquote(url.username or "") or None,
            "password": unquote(url.password or "") or address.secret("password_file") or None,
            "protocol": 2,
            "driver_info": None,
            "socket_read_size": READ_BYTES,
        }
        if url.scheme == "unix":
            self._options["path"] = unquote(url.path)
        else:
            self._options |= {"host": url.hostname or "127.0.0.1", "port": url.port or _PORT}
        if url.scheme == "rediss":
            self._options["ssl_ca_certs"] = _authority(address)
        self._client = _client()
        self._connections = Connections(self._connect, IDLE_S)

    def check(self, limit_s: float) -> None:
        self._ask(limit_s, [("PING",)])

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        return [bool(there) for there in self._ask(limit_s, [("EXISTS", name) for name in names])]

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        """Who else writes there may have put anything under a name: no more is asked for than is taken."""
        client = self._client
        asked = [("GETRANGE", name, 0, most_bytes) for name in names]

        def use(connection: RedisConnection) -> list[int]:
            empty = []
            for nth, value in enumerate(client.ask(connection, asked)):
                if client.is_wrong_type(value):
                    take(nth, memoryview(b""))
                elif client.require(value):
                    take(nth, memoryview(value))
                else:
                    empty.append(nth)
            return empty

        began_s = time.monotonic()
        empty = self._use(limit_s, len(names) * (most_bytes + _REPLY_BYTES), use)
        if empty:
            there = self.has([names[nth] for nth in empty], limit_s - (time.monotonic() - began_s))
            for nth, is_there in zip(empty, there, strict=True):
                if is_there:
                    take(nth, memoryview(b""))

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        client = self._client
        until = ("EX", self._ttl_s) if self._ttl_s else ()
        asked = [("SET", name, value, *until) for name, value in values]

        def use(connection: RedisConnection) -> list[bool]:
            return [
                not client.is_full(reply) and bool(client.require(reply)) for reply in client.ask(connection, asked)
            ]

        return self._use(limit_s, len(asked) * _REPLY_BYTES, use)

    def delete(self, names: Sequence[str], limit_s: float) -> None:
        self._ask(limit_s, [("UNLINK", name) for name in names])

    def close(self) -> None:
        self._connections.close()

    def _ask(self, limit_s: float, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Of commands that have short answers."""
        client = self._client

        def use(connection: RedisConnection) -> list[Any]:
            return [client.require(reply) for reply in client.ask(connection, commands)]

        return self._use(limit_s, len(commands) * _REPLY_BYTES, use)

    def _use(self, limit_s: float, most_bytes: int, call: Callable[[RedisConnection], _Result]) -> _Result:
        def use(connection: RedisConnection, until_s: float) -> _Result:
            connection.bound(until_s, most_bytes)
            return call(connection)

        return self._connections.use(limit_s, use)

    def _connect(self, until_s: float) -> RedisConnection:
        limit_s = min(CONNECT_S, max(0.001, until_s - time.monotonic()))
        kinds = {"redis": self._client.TCPConnection, "rediss": self._client.TLSConnection}
        kind = kinds.get(self._scheme, self._client.UnixConnection)
        connection: RedisConnection = kind(**self._options, socket_timeout=limit_s, socket_connect_timeout=limit_s)
        try:
            connection.open(until_s)
        except BaseException:
            connection.close()
            raise
        return connection


def _database(address: Address) -> int:
    """Raises ConfigError."""
    path = "" if address.url.scheme == "unix" else address.url.path.strip("/")
    if not path:
        return address.number("db", 0)
    if not path.isascii() or not path.isdigit():
        raise ConfigError("--kv-remote: after the host comes the number of a database.", param=PARAM)
    return int(path)


def _authority(address: Address) -> str | None:
    """Raises ConfigError."""
    path = address.options.get("ca_file")
    try:
        if path:
            ssl.create_default_context().load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("--kv-remote: ca_file cannot be read.", param=PARAM) from error
    return path


def _client() -> Any:
    try:
        from . import redis_connection
    except ImportError as error:
        raise ConfigError(
            "--kv-remote redis:// needs the package redis (8 or newer): pip install 'tokenmill[kv-redis]'.", param=PARAM
        ) from error
    return redis_connection
