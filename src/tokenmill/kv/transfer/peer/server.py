"""Serves what is on a board to other workers: a thread for each of their connections, beside the steps."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from .board import GONE, UNKNOWN_S, Board, Had, Refused
from .frames import BEAT_S, BadPeer, Connection
from .listener import Listener, Welcome
from .memory import BlockMemory


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
