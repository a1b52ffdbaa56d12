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
"""

from __future__ import annotations

import json
import socket
from typing import Any

BEAT_S = 0.5
SILENT_S = 2.5
"""A peer that is silent for so long is taken for gone."""

IDLE_S = 120.0
"""A connection that asks for nothing for so long is closed; who keeps one gives it up after half of that."""

MOST_BYTES = 8 << 20
_LENGTH = 4


class BadPeer(Exception):
    """The other end does not say what it should; the message says how."""


def send_frame(connection: socket.socket, message: dict[str, Any] | None) -> None:
    """Raises OSError."""
    body = b"" if message is None else json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(len(body).to_bytes(_LENGTH, "little") + body)


def receive_frame(connection: socket.socket) -> dict[str, Any] | None:
    """None: the peer lives. Raises BadPeer, EOFError where the peer has gone, and OSError."""
    size = int.from_bytes(receive_exactly(connection, _LENGTH), "little")
    if size > MOST_BYTES:
        raise BadPeer(f"A message of {size} bytes was announced; at most {MOST_BYTES} are taken.")
    if not size:
        return None
    try:
        message = json.loads(receive_exactly(connection, size))
    except (ValueError, RecursionError) as error:
        raise BadPeer("A message is not JSON.") from error
    if not isinstance(message, dict):
        raise BadPeer("A message is not an object.")
    return message


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
