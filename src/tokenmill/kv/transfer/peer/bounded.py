"""Sockets whose calls end in time, however little the other end sends at once, and that take no more than is due.

A socket's own limit is for each read alone.
"""

from __future__ import annotations

import socket
import time


class BoundedSocket:
    """As much of a socket as is used of it.

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
