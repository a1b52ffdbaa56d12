"""The native backend's queue of work: a thread that stays in native code from one call to the next.

A call that was submitted while another runs begins without Python, which the event loop keeps busy meanwhile. Each end
is a byte in a pipe that the loop watches; it is written once the next call has begun, because the loop, once awake,
takes the interpreter and perhaps the processor (docs/develop/log.md has the times). What is not a call comes back to
Python on that thread, in its place in the order. See native/src/queue.h.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..work_queue import REST_S, Ticket
from .library import CallStruct
from .program import NativeCall


class NativeQueue:
    """An ops.work.WorkQueue. when_idle: does a small piece of work that can wait, and tells whether there may be
    more."""

    def __init__(self, library: ctypes.CDLL, when_idle: Callable[[], bool] = lambda: False) -> None:
        self._library = library
        self._when_idle = when_idle
        self._queue = library.tm_queue_new()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._hosted: deque[Ticket] = deque()  # those the thread does in Python, in order
        self._untold: deque[tuple[Ticket, CallStruct, Callable[[Ticket], None]]] = deque()  # a byte comes for each
        self._read_fd = self._write_fd = -1
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, work: Callable[[], Any], on_end: Callable[[Ticket], None]) -> None:
        self._start()
        self._watch_from(asyncio.get_running_loop())
        ticket, struct = Ticket(work), self._struct_of(work)
        struct.tells = 1
        self._untold.append((ticket, struct, on_end))
        self._push(ticket, struct)

    def run(self, work: Callable[[], Any]) -> Ticket:
        self._start()
        ticket, struct = Ticket(work), self._struct_of(work)
        self._push(ticket, struct)
        self._library.tm_queue_wait(self._queue, struct)
        return _ended(ticket, struct)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._library.tm_queue_close(self._queue)
        if self._thread is not None:
            self._thread.join()
            self._watch_from(None)
            os.close(self._read_fd)
            os.close(self._write_fd)
        self._library.tm_queue_free(self._queue)
        self._tell(len(self._untold))
        self._hosted.clear()
        self._when_idle = lambda: False

    def _struct_of(self, work: Callable[[], Any]) -> CallStruct:
        return work.submitted() if isinstance(work, NativeCall) else CallStruct()

    def _push(self, ticket: Ticket, struct: CallStruct) -> None:
        if not struct.program:
            self._hosted.append(ticket)
        self._library.tm_queue_push(self._queue, struct)

    def _start(self) -> None:
        assert not self._is_closed, "the queue is closed"
        if self._thread is None:
            self._read_fd, self._write_fd = os.pipe()
            self._thread = threading.Thread(target=self._work, name="tokenmill-step", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        rest_ns = int(REST_S * 1e9)
        while True:
            if self._library.tm_queue_run(self._queue, self._write_fd, rest_ns):
                self._hosted.popleft().run()
            elif self._is_closed:
                return
            else:
                while self._library.tm_queue_is_empty(self._queue) and self._when_idle():
                    pass

    def _watch_from(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """The loop that reads the pipe is that of the last piece submitted."""
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._read_fd)
        if loop is not None:
            loop.add_reader(self._read_fd, lambda: self._tell(len(os.read(self._read_fd, 4096))))
        self._loop = loop

    def _tell(self, count: int) -> None:
        for _ in range(count):
            ticket, struct, on_end = self._untold.popleft()
            on_end(_ended(ticket, struct))


def _ended(ticket: Ticket, struct: CallStruct) -> Ticket:
    ticket.began_s, ticket.ended_s = struct.began_ns / 1e9, struct.ended_ns / 1e9
    if struct.error:
        work = ticket.work
        ticket.error = (
            work.failure(struct.error) if isinstance(work, NativeCall) else AssertionError(struct.error.decode())
        )
    return ticket
