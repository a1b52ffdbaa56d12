"""Reads KV events of a server of others over ZeroMQ (`kv_events`), in order and without gaps.

What was missed is asked for again (`replay`). What cannot be had again is made up for by CLEARED: whoever hears must
not believe what was told before. So it is when the server's life or the connection ends, and when it sends what cannot
be read; that costs one line of the log. A thread of its own waits for the socket; what it reads is heard on the event
loop, and as long as that is behind, nothing more is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ..core.kv_events import CLEARED, TokenEvent
from .kv_endpoints import import_zmq
from .kv_events import SEQ_BYTES, decode_batch, replayed

MAX_MESSAGE_BYTES = 64 << 20
MAX_WAITING = 10_000
"""Messages that wait to be read, and are dropped beyond."""
REPLAY_S = 5.0
RETRY_S = 30.0
"""A replay may take so long; after one that took longer the next is asked for so much later."""
MAX_REPLAYED = 100_000
_MAX_BEHIND = 16
_MONITOR = "inproc://monitor"

Hear = Callable[[tuple[TokenEvent, ...]], None]
_CLEAR = (TokenEvent(CLEARED),)
_log = logging.getLogger(__name__)


class KVSubscriber:
    """endpoint: of the PUB socket. replay: of the ROUTER socket; "": there is none. Raises ConfigError where pyzmq is
    not installed.

    num_gaps, num_bad   times that messages were missing; messages that could not be read
    """

    def __init__(self, endpoint: str, replay: str = "") -> None:
        self._zmq = import_zmq("--upstream-kv-events")
        self.endpoint = endpoint
        self.num_bad = 0
        self.num_gaps = 0
        self._replay_at = replay
        self._expected: int | None = None
        self._last_s = 0.0
        self._ask_after_s = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._behind = threading.Semaphore(_MAX_BEHIND)
        self._tell: Callable[[tuple[TokenEvent, ...]], None] = lambda events: None

    def open(self, hear: Hear) -> None:
        """Begin to read. `hear` is called on the running loop."""
        loop = asyncio.get_running_loop()

        def heard(events: tuple[TokenEvent, ...]) -> None:
            try:
                hear(events)
            finally:
                self._behind.release()

        def tell(events: tuple[TokenEvent, ...]) -> None:
            while not self._behind.acquire(timeout=0.1):
                if self._is_closing:
                    return
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(heard, events)

        assert self._thread is None
        self._tell = tell
        self._woken_fd, self._wake_fd = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kv-events-read", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is None:
            return
        self._is_closing = True
        os.write(self._wake_fd, b"\0")
        self._thread.join()
        self._thread = None
        os.close(self._woken_fd)
        os.close(self._wake_fd)

    # ---- in the thread ----

    def _run(self) -> None:
        zmq = self._zmq
        context = zmq.Context()
        try:
            reader = self._socket(context, zmq.SUB)
            reader.rcvhwm = MAX_WAITING
            reader.subscribe(b"")
            reader.monitor(_MONITOR, zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            monitor = context.socket(zmq.PAIR)
            monitor.connect(_MONITOR)
            reader.connect(self.endpoint)
            poller = zmq.Poller()
            for each in (reader, monitor, self._woken_fd):
                poller.register(each, zmq.POLLIN)
            while not self._is_closing:
                ready = dict(poller.poll())
                if monitor in ready:
                    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
                    self._begin(context) if event == zmq.EVENT_CONNECTED else self._lose()
                if reader in ready:
                    self._take(context, reader.recv_multipart())
        except zmq.ZMQError as error:
            if not self._is_closing:
                _log.error("KV events of %s are not read any more: %s.", self.endpoint, error.strerror)
                self._tell(_CLEAR)
        finally:
            context.destroy(linger=0)

    def _socket(self, context: Any, kind: int) -> Any:
        socket = context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        if "[" in self.endpoint:
            socket.ipv6 = True
        return socket

    def _begin(self, context: Any) -> None:
        """The server is there (again): it may have had another life, and more than was heard."""
        self._lose()
        if self._replay_at:
            self._ask(context, 0)

    def _lose(self) -> None:
        self._expected = None
        self._tell(_CLEAR)

    def _take(self, context: Any, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
            self._note_bad(f"a message of {len(frames)} parts")
            return
        seq, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._expected is not None and seq != self._expected:
            if seq < self._expected and self._is_old(payload):
                return  # it came by a replay too
            self.num_gaps += 1
            is_new_life = seq < self._expected
            if is_new_life:
                self._tell(_CLEAR)
            first, self._expected = (0 if is_new_life else self._expected), None if is_new_life else self._expected
            if self._replay_at:
                self._ask(context, first)
            if self._expected is not None and seq < self._expected:
                return  # this one has come by the replay
            if self._expected != seq and not is_new_life:
                self._tell(_CLEAR)
        self._hear(seq, payload)

    def _is_old(self, payload: bytes) -> bool:
        try:
            return decode_batch(payload)[0] <= self._last_s
        except ValueError:
            return False

    def _hear(self, seq: int, payload: bytes) -> None:
        self._expected = seq + 1
        try:
            self._last_s, events = decode_batch(payload)
        except ValueError as error:
            self._note_bad(str(error))
            self._tell(_CLEAR)
            return
        if events:
            self._tell(tuple(events))

    def _ask(self, context: Any, first: int) -> None:
        """Have the messages from this one on sent again, and take them."""
        zmq = self._zmq
        if time.monotonic() < self._ask_after_s:
            return
        asker = self._socket(context, zmq.DEALER)
        try:
            asker.connect(self._replay_at)
            asker.send_multipart((b"", first.to_bytes(SEQ_BYTES, "big")), zmq.NOBLOCK)
            until_s = time.monotonic() + REPLAY_S
            for _ in range(MAX_REPLAYED):
                left_ms = int(1000 * (until_s - time.monotonic()))
                if self._is_closing or not asker.poll(max(0, left_ms)):
                    self._ask_after_s = time.monotonic() + RETRY_S
                    return
                seq, payload = replayed(asker.recv_multipart())
                if seq < 0:
                    return
                if self._expected is not None and seq != self._expected:
                    self._tell(_CLEAR)
                self._hear(seq, payload)
        except (ValueError, zmq.ZMQError) as error:
            self._note_bad(f"{error} (of {self._replay_at})")
        finally:
            asker.close()

    def _note_bad(self, why: str) -> None:
        self.num_bad += 1
        if self.num_bad == 1:
            told = "What %s sends is no KV event of vLLM's: %s. No more is said of this."
            _log.warning(told, self.endpoint, why[:200])
