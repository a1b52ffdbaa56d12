"""Takes connections for KV, lets in who proves itself, and serves each on a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from .frames import IDLE_S, SILENT_S, BadPeer, Connection

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
PAUSE_S = 0.2
"""Before connections are taken again where there were no descriptors or threads for one."""

Welcome = Callable[[socket.socket], Connection]
"""Authenticates whoever has connected. Raises OSError or EOFError where it is not welcome."""


class Listener:
    """Nothing runs before `start`.

    serve    a connection, on its thread, until it raises OSError, EOFError or BadPeer
    address  HOST:PORT, once it listens
    """

    def __init__(self, welcome: Welcome, serve: Callable[[Connection], None]) -> None:
        self._welcome = welcome
        self._serve_one = serve
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = threading.Event()
        self.address = ""

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises OSError where the address cannot be had."""
        is_ipv6 = ":" in host
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"
        threading.Thread(target=self._accept, args=(self._listener,), name="kv-peers", daemon=True).start()

    def close(self) -> None:
        """Connections end; their threads soon do."""
        self._is_closed.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = listener.accept()
                self._begin(connection)
            except (OSError, RuntimeError) as error:
                if not self._is_closed.wait(PAUSE_S):
                    log.warning("A connection for KV could not be taken: %s.", error)

    def _begin(self, connection: socket.socket) -> None:
        """Raises RuntimeError where no thread can be had."""
        if not self._keep(connection):
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="kv-peer", daemon=True).start()
        except RuntimeError:
            self._end(connection)
            raise

    def _keep(self, connection: socket.socket, instead_of: socket.socket | None = None) -> bool:
        """Have it closed with the server; False where that has been, or there are too many."""
        with self._lock:
            if instead_of is not None:
                self._connections.discard(instead_of)
            if self._is_closed.is_set() or len(self._connections) >= MOST_CONNECTIONS:
                return False
            self._connections.add(connection)
            return True

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, raw: socket.socket) -> None:
        ends = [raw]
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.settimeout(4 * SILENT_S)
            connection = self._welcome(raw)
            ends.append(connection.raw)
            connection.raw.settimeout(IDLE_S)
            if self._keep(connection.raw, raw):
                self._serve_one(connection)
        except BadPeer as error:
            log.warning("A connection for KV was closed: %s", error)
        except (OSError, EOFError):
            pass
        finally:
            for end in ends:
                self._end(end)
