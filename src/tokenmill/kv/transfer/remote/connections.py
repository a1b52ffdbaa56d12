"""Connections to one store that are kept for the next call. Threads share them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar


class Closing(Protocol):
    """A connection."""

    def close(self) -> None: ...


_Connection = TypeVar("_Connection", bound=Closing)
_Result = TypeVar("_Result")


class Connections(Generic[_Connection]):
    """connect  makes one until so many seconds of time.monotonic; raises OSError, EOFError
    idle_s      for so long one is kept that nobody uses
    """

    def __init__(self, connect: Callable[[float], _Connection], idle_s: float) -> None:
        self._connect = connect
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[tuple[float, _Connection]] = []
        self._is_closed = False

    def use(self, limit_s: float, call: Callable[[_Connection, float], _Result]) -> _Result:
        """`call(connection, until_s)` with one that nobody else uses meanwhile; where one that was kept has been closed
        by the other end, once more with a fresh one. Raises what it raises, and OSError."""
        until_s = time.monotonic() + limit_s
        kept = self._take()
        if kept is not None:
            with suppress(ConnectionError, EOFError):
                return self._use_once(kept, until_s, call)
        return self._use_once(self._connect(until_s), until_s, call)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _take(self) -> _Connection | None:
        """The one that was used last; those that nobody has used for long are closed."""
        with self._lock:
            oldest_s = time.monotonic() - self._idle_s
            stale = [connection for since_s, connection in self._idle if since_s < oldest_s]
            self._idle = [kept for kept in self._idle if kept[0] >= oldest_s]
            found = self._idle.pop()[1] if self._idle else None
        for connection in stale:
            connection.close()
        return found

    def _use_once(
        self, connection: _Connection, until_s: float, call: Callable[[_Connection, float], _Result]
    ) -> _Result:
        try:
            result = call(connection, until_s)
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._is_closed:
                self._idle.append((time.monotonic(), connection))
                return result
        connection.close()
        return result
