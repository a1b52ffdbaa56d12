"""A server on a loopback port that answers calls of POST with given bytes, whatever they are."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

CARDS = b'{"object": "list", "data": [{"id": "theirs", "object": "model"}]}'


def reply(body: bytes, kind: str = "application/json", status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def chunks(*parts: bytes, kind: str = "text/event-stream", ends: bool = True) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + (b"0\r\n\r\n" if ends else b"")
    return f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body


def delta(text: str) -> bytes:
    return b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}\n\n' % text.encode()


DONE = b"data: [DONE]\n\n"
FINISH = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'


class Hostile:
    """A context manager.

    parts    what it answers to each POST, piece by piece; waits: until `go` is set behind the first
    endless  sent again and again behind them
    then     "close", "reset" or "hang"
    cards    what it answers to GET; None: 500
    calls    the bytes of each POST"""

    def __init__(
        self,
        *parts: bytes,
        endless: bytes = b"",
        then: str = "close",
        waits: bool = False,
        cards: bytes | None = CARDS,
    ) -> None:
        self.parts = parts
        self.cards = cards
        self.calls: list[bytes] = []
        self._endless = endless
        self._then = then
        self.waits = waits
        self.go = threading.Event()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Hostile:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.go.set()
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                peer, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.settimeout(5)
            call = self._read(peer)
            if call.startswith(b"GET"):
                peer.sendall(reply(b"{}", status="500 No") if self.cards is None else reply(self.cards))
                return
            self.calls.append(call)
            for part in self.parts:
                peer.sendall(part)
                if self.waits:
                    self.go.wait(20)
            while self._endless and not self._is_over.is_set():
                peer.sendall(self._endless)
            if self._then == "hang":
                self._is_over.wait(20)
            if self._then == "reset":
                time.sleep(0.05)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @staticmethod
    def _read(peer: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += peer.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        while len(body) < int(lengths[0]):
            body += peer.recv(65536)
        return head + b"\r\n\r\n" + body
