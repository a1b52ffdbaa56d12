"""Serves what is on a board to other workers: a thread for each of their connections, beside the steps."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .board import GONE, UNKNOWN_S, BlockMemory, Board, Had, Refused
from .frames import BEAT_S, IDLE_S, SILENT_S, BadPeer, Connection

log = logging.getLogger(__name__)
MOST_CONNECTIONS = 256
PAUSE_S = 0.2
"""Before connections are taken again where there were no descriptors or threads for one."""
Welcome = Callable[[socket.socket], Connection]
"""Authenticates whoever has connected. Raises OSError or EOFError where it is not welcome."""


class PeerServer:
    """`address`: as KVSource has it. Nothing runs before `start`."""

    def __init__(
        self,
        board: Board,
        incarnation: str,
        memories: Sequence[BlockMemory],
        welcome: Welcome = Connection,
    ) -> None:
        self._board = board
        self._incarnation = incarnation
        self._memories = memories
        self._listener = Listener(welcome, self._serve)

    @property
    def address(self) -> str:
        return self._listener.address

    def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises OSError where the address cannot be had."""
        self._listener.start(host, port)

    def close(self) -> None:
        """Connections end; their threads soon do."""
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        while True:
            message = connection.receive()
            if message is not None:
                self._answer(connection, message)

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        try:
            if message["incarnation"] != self._incarnation:
                raise Refused("It is another life of that worker.")
            ticket, reader = str(message["ticket"]), str(message["reader"])
            asked = message["ask"]
            if asked == "pull":
                self._pull(connection, ticket, reader, message)
            elif asked == "fetch":
                self._fetch(connection, ticket, reader, message)
            elif asked == "done":
                sums = {(int(group), int(index)): int(value) for group, index, value in message["sums"]}
                generation, num_tokens = int(message["generation"]), int(message["num_tokens"])
                self._board.check(ticket, reader, Had(generation, sums, num_tokens, bool(message["is_last"])))
                connection.send({})
            else:
                raise BadPeer(f"It asks for {asked!r}.")
        except Refused as error:
            connection.send({"error": str(error)})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadPeer("A message lacks what it should have.") from error

    def _pull(self, connection: Connection, ticket: str, reader: str, message: dict[str, Any]) -> None:
        start, most, is_final = int(message["start"]), int(message["count"]), bool(message["is_final"])
        until_s = time.monotonic() + UNKNOWN_S
        while (part := self._board.take(ticket, reader, start, most, is_final, BEAT_S)) is None:
            if time.monotonic() > until_s and not self._board.knows(ticket):
                raise Refused(GONE)
            connection.send(None)
        reply = {
            "blocks": part.blocks,
            "num_tokens": part.num_tokens,
            "num_there": part.num_there,
            "is_last": part.is_last,
            "generation": part.generation,
            "pid": os.getpid(),
            "pools": [(memory.address, memory.block_bytes) for memory in self._memories],
        }
        connection.send(reply)

    def _fetch(self, connection: Connection, ticket: str, reader: str, message: dict[str, Any]) -> None:
        wanted = [(int(group), int(index)) for group, index in message["blocks"]]
        blocks = self._board.blocks_of(ticket, reader, wanted)
        connection.send({})
        for group, block in blocks:
            connection.raw.sendall(self._memories[group].block(block))


class Listener:
    """Takes connections for KV, lets in who proves itself, and serves each on a thread of its own.

    Nothing runs before `start`.

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
