"""Publishes KV events over ZeroMQ, in vLLM's form (`kv_events`).

    PUB     [topic, number (8 bytes, big-endian), payload]
    ROUTER  asked with [b"", first number]: [b"", topic, number, payload] for each that is kept; then number -1

Messages have numbers without gaps. One that is dropped, since too many wait or a reader is slow, leaves a gap, which a
reader notices. A thread of its own writes and sends, so that an engine never waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import Any

from ..core.errors import ConfigError
from ..core.kv_events import TokenEvent
from .kv_endpoints import KVEventsConfig, import_zmq, listens, nth_endpoint
from .kv_events import END_SEQ, SEQ_BYTES, encode_batch

_MAX_ASKED = 64
_log = logging.getLogger(__name__)


class KVPublisher:
    """rank: of the engine among those of one front end. Raises ConfigError where an address cannot be had.

    endpoint, replay_endpoint   as they came to be
    num_dropped                 messages that were not sent, since too many waited
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        zmq = self._zmq = import_zmq("--kv-events-config")
        self._config = config
        self._rank = rank
        self._topic = config.topic.encode()
        self._waiting: deque[tuple[int, float, tuple[TokenEvent, ...]]] = deque()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=max(1, config.buffer_steps))
        self._num = 0
        self.num_dropped = 0
        self._is_closing = False
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            self._pub, self.endpoint = self._open(zmq.PUB, config.endpoint)
            self._router, self.replay_endpoint = None, ""
            if config.replay_endpoint:
                self._router, self.replay_endpoint = self._open(zmq.ROUTER, config.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._woken_fd, self._wake_fd = os.pipe()
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(self._woken_fd, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: tuple[TokenEvent, ...]) -> None:
        """From one thread at a time; never waits."""
        seq, self._num = self._num, self._num + 1
        if len(self._waiting) >= self._config.max_queue_size:
            if not self.num_dropped:
                _log.warning("KV events come faster than they can be sent; some are dropped, which readers notice.")
            self.num_dropped += 1
            return
        self._waiting.append((seq, time.time(), events))
        self._wake()

    def close(self) -> None:
        """What waits is sent first, to readers that take it at once."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        self._context.destroy(linger=100)
        os.close(self._woken_fd)
        os.close(self._wake_fd)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # else it is awake
            os.write(self._wake_fd, b"\0")

    def _open(self, kind: int, endpoint: str) -> tuple[Any, str]:
        zmq, where = self._zmq, nth_endpoint(endpoint, self._rank)
        socket = self._context.socket(kind)
        socket.set_hwm(self._config.hwm)
        socket.linger = 0
        if "[" in where:
            socket.ipv6 = True
        try:
            if listens(where):
                socket.bind(where)
                where = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            else:
                socket.connect(where)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--kv-events-config: {where} cannot be had: {error.strerror}.", param="kv_events_config"
            ) from error
        return socket, where

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._woken_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if self._woken_fd in ready:
                os.read(self._woken_fd, 4096)
            self._send()
            if self._router in ready:
                try:
                    self._replay()
                except zmq.ZMQError as error:
                    _log.warning("A reader of KV events cannot be answered: %s.", error.strerror)
        self._send()

    def _send(self) -> None:
        while self._waiting:
            seq, time_s, events = self._waiting.popleft()
            number, payload = seq.to_bytes(SEQ_BYTES, "big"), encode_batch(time_s, events, self._rank)
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))

    def _replay(self) -> None:
        assert self._router is not None
        for _ in range(_MAX_ASKED):
            try:
                frames = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            reader, first = frames[0], frames[-1]
            if len(frames) != 3 or len(first) != SEQ_BYTES:
                continue
            for number, payload in self._kept:
                if number >= first:
                    self._router.send_multipart((reader, b"", self._topic, number, payload))
            self._router.send_multipart((reader, b"", b"", END_SEQ, b""))
