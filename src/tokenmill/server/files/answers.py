"""What a batch's calls gave, on its way to the disk: whole lines, flushed before they count.

Lines that come while others are written are written together.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from .lines import mend
from .store import FileStore

_MOST_WAITING = 64


class Answers:
    """The two files that a batch writes. `open` it, `put` lines, `close` it; a failure to write is raised by both.

    done           custom_ids of the lines that are on the disk
    num_completed  of these, those in the output; num_failed: those in the errors
    """

    def __init__(self, store: FileStore, output_id: str, error_id: str) -> None:
        self._store = store
        self._paths = (store.content(output_id), store.content(error_id))
        self.sizes = [0, 0]
        self.done: set[str] = set()
        self.num_completed = 0
        self.num_failed = 0
        self._queue: asyncio.Queue[tuple[int, str, bytes] | None] = asyncio.Queue(_MOST_WAITING)
        self._writer: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take up what is on the disk already."""
        for index, path in enumerate(self._paths):
            ids, self.sizes[index] = await asyncio.to_thread(mend, path)
            self.done |= ids
            if index:
                self.num_failed = len(ids)
            else:
                self.num_completed = len(ids)
        self._store.reserve(sum(self.sizes))
        self._writer = asyncio.create_task(self._write_all(), name="batch-answers")

    async def put(self, custom_id: str, line: bytes, *, is_error: bool) -> None:
        """Waits while many lines do."""
        assert self._writer is not None
        await self._send((int(is_error), custom_id, line), self._writer)

    async def close(self) -> None:
        """Write what has been put. The sizes then belong to whoever makes files of them."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                await self._send(None, writer)
                await writer
            finally:
                self._store.reserve(-sum(self.sizes))

    async def _send(self, line: tuple[int, str, bytes] | None, writer: asyncio.Task[None]) -> None:
        putting = asyncio.ensure_future(self._queue.put(line))
        try:
            await asyncio.wait((putting, writer), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            putting.cancel()

    async def _write_all(self) -> None:
        while (first := await self._queue.get()) is not None:
            lines = [first]
            is_last = False
            while not self._queue.empty():
                line = self._queue.get_nowait()
                if line is None:
                    is_last = True
                    break
                lines.append(line)
            num_bytes = sum(len(data) for _, _, data in lines)
            self._store.require_room(num_bytes)
            await asyncio.to_thread(self._append, lines)
            self._store.reserve(num_bytes)
            for index, custom_id, data in lines:
                self.sizes[index] += len(data)
                self.done.add(custom_id)
                if index:
                    self.num_failed += 1
                else:
                    self.num_completed += 1
            if is_last:
                return

    def _append(self, lines: list[tuple[int, str, bytes]]) -> None:
        for index, path in enumerate(self._paths):
            data = b"".join(line for number, _, line in lines if number == index)
            if data:
                _append(path, data)


def _append(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
