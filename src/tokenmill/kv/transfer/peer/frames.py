"""Messages between two workers: a length of 4 bytes, lowest first, then JSON; an empty one says that the sender lives.

    the one that pulls                                     the one that offers
    pull   ticket, incarnation, reader, start, count  ->
                                                      <-   nothing, every BEAT_S, while there is nothing
                                                      <-   blocks [(group, index, block)], num_tokens, num_there,
                                                           is_last, generation; pid and addresses of its pools
    fetch  ticket, reader, blocks [(group, index)]    ->                  (unless it reads the other's memory)
                                                      <-   their bytes, one after the other
    done   ticket, reader, generation, sums           ->
                                                      <-   nothing, or an error: they are not to be used

`sums` are CRC-32 of the blocks as they came; the one that offers compares them with those of its own, made while it
holds the blocks, and says whether these are still offered. Frames are bounded, and so is every count in them.

Where the two have proved themselves to each other (`client.PeerAuth`), a tag follows each length and each message
(`core.mac`). A wrong tag ends the connection. Blocks have none, as they have a sum.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from ....core.mac import MAC, TAG_BYTES, TAMPERED

BEAT_S = 0.5
SILENT_S = 2.5
"""A peer that is silent for so long is taken for gone."""

IDLE_S = 120.0
"""A connection that asks for nothing for so long is closed; who keeps one gives it up after half of that."""

MOST_BYTES = 8 << 20
_LENGTH = 4


class BadPeer(Exception):
    """The other end does not say what it should; the message says how."""


class Connection:
    """A connected socket, with frames and blocks on it.

    raw        the socket
    sending    tags of what this end sends; None: no tags, as no byte leaves this machine
    receiving  those of what comes
    """

    def __init__(self, raw: socket.socket, sending: MAC | None = None, receiving: MAC | None = None) -> None:
        self.raw = raw
        self._sending = sending
        self._receiving = receiving

    def send(self, message: dict[str, Any] | None) -> None:
        """Raises OSError."""
        body = b"" if message is None else json.dumps(message, separators=(",", ":")).encode()
        length = len(body).to_bytes(_LENGTH, "little")
        if self._sending is None:
            self.raw.sendall(length + body)
        else:
            self.raw.sendall(length + self._sending.tag(length) + body + self._sending.tag(body))

    def receive(self) -> dict[str, Any] | None:
        """None: the peer lives. Raises BadPeer, EOFError where the peer has gone, and OSError."""
        size = int.from_bytes(self._receive_piece(_LENGTH), "little")
        if size > MOST_BYTES:
            raise BadPeer(f"A message of {size} bytes was announced; at most {MOST_BYTES} are taken.")
        body = self._receive_piece(size)
        if not size:
            return None
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadPeer("A message is not JSON.") from error
        if not isinstance(message, dict):
            raise BadPeer("A message is not an object.")
        return message

    def close(self) -> None:
        self.raw.close()

    def _receive_piece(self, num_bytes: int) -> bytearray:
        piece = receive_exactly(self.raw, num_bytes)
        if self._receiving is not None and not self._receiving.accepts(receive_exactly(self.raw, TAG_BYTES), piece):
            raise BadPeer(TAMPERED)
        return piece


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytearray:
    """Raises EOFError where the peer has gone, and OSError."""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data))
    return data


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill `target`. Raises as `receive_exactly`."""
    while target:
        got = connection.recv_into(target)
        if not got:
            raise EOFError("the peer has gone")
        target = target[got:]
