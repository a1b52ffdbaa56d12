"""A KV backend: values in an SQLite file, for the servers of one machine, as `--kv-remote sqlite:///var/kv.db`. The
entry point has the name of the address' scheme. Names and values come sealed: a backend never sees a prompt."""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import unquote

from tokenmill.core.errors import ConfigError
from tokenmill.kv.transfer.remote.backend import Address, Buffer
from tokenmill.plugins.groups import Plugin

TABLE = "CREATE TABLE IF NOT EXISTS kv (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID"


class SQLiteBackend:
    """Called on several threads: each has a connection. What SQLite raises is an OSError, as the interface asks for."""

    OPTIONS = ()

    num_threads = 4
    batch_bytes = 2 * 1024 * 1024
    look_names = 512
    look_s = 0.2

    def __init__(self, address: Address) -> None:
        self.name = address.name
        self._path = unquote(address.url.path)
        if not self._path.strip("/"):
            raise ConfigError("--kv-remote: sqlite:// takes the path of a file, as in sqlite:///var/kv.db.")
        self._lock = threading.Lock()
        self._connections: dict[int, sqlite3.Connection] = {}

    def check(self, limit_s: float) -> None:
        with self._connection(limit_s) as connection:
            connection.execute(TABLE)

    def has(self, names: Sequence[str], limit_s: float) -> list[bool]:
        with self._connection(limit_s) as connection:
            ask = "SELECT 1 FROM kv WHERE name = ?"
            return [connection.execute(ask, (name,)).fetchone() is not None for name in names]

    def get(
        self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
    ) -> None:
        with self._connection(limit_s) as connection:
            for nth, name in enumerate(names):
                ask = "SELECT substr(value, 1, ?) FROM kv WHERE name = ?"
                found = connection.execute(ask, (most_bytes + 1, name)).fetchone()
                if found is not None:
                    take(nth, memoryview(found[0] if len(found[0]) <= most_bytes else b""))

    def put(self, values: Sequence[tuple[str, Buffer]], limit_s: float) -> list[bool]:
        with self._connection(limit_s) as connection:
            connection.executemany("INSERT OR REPLACE INTO kv VALUES (?, ?)", values)
        return [True] * len(values)

    def delete(self, names: Sequence[str], limit_s: float) -> None:
        with self._connection(limit_s) as connection:
            connection.executemany("DELETE FROM kv WHERE name = ?", [(name,) for name in names])

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    @contextmanager
    def _connection(self, limit_s: float) -> Iterator[sqlite3.Connection]:
        """This thread's, within a transaction; a lock of another is waited for as long as the call may take."""
        try:
            with self._lock:
                number = threading.get_ident()
                if number not in self._connections:
                    self._connections[number] = sqlite3.connect(self._path, check_same_thread=False)
                connection = self._connections[number]
            connection.execute(f"PRAGMA busy_timeout = {int(limit_s * 1000)}")
            with connection:
                yield connection
        except sqlite3.Error as error:
            raise OSError(f"SQLite: {error}") from error


plugin = Plugin(interface=1, provides=SQLiteBackend)
