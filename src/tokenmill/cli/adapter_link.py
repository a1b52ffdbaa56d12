"""A worker's link whose adapters come over it: the engine loads from this machine's cache what the front end has sent.

The worker never opens a path that a front end names. What comes is kept by its digest, which is computed here, in a
folder of the cache that only this user can enter; adapters that have not been used for longest go beyond MOST_BYTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from ..core.errors import BadCheckpoint, TokenmillError
from ..core.events import (
    ADAPTER_FILES,
    PART_BYTES,
    AdapterLoaded,
    FilePart,
    FromEngine,
    LoadAdapter,
    ToEngine,
    WantPart,
)
from ..formats.adapter import open_adapter
from ..net.link import EngineLink

MOST_BYTES = 8 << 30
"""Of all adapters in the cache together, and of one."""

STALE_S = 3600.0
"""What a process that was killed had half of is removed after this long."""

_log = logging.getLogger(__name__)


class AdapterCache:
    """Folders by digest, in `folder`. Methods block."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self._folder = folder

    def find(self, digest: str) -> Path | None:
        """What has this digest, and is what it was."""
        found = self._folder / digest
        if not (digest.isalnum() and found.is_dir()):
            return None
        try:
            if open_adapter(found).digest == digest:
                os.utime(found)
                return found
        except (BadCheckpoint, OSError):
            pass
        _log.warning("The adapter in %s is damaged; it is fetched again.", found)
        shutil.rmtree(found, ignore_errors=True)
        return None

    def begin(self) -> Path:
        """A new folder for one that comes."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clear()
        return Path(tempfile.mkdtemp(prefix=".part-", dir=self._folder))

    def keep(self, part: Path, digest: str) -> Path:
        """All of it has come. Returns where it lies now. Raises BadCheckpoint where it is no adapter, or is not the one
        with this digest ("": any)."""
        found = open_adapter(part).digest
        if digest and found != digest:
            raise BadCheckpoint("The adapter's files have changed since they were loaded.")
        place = self._folder / found
        with contextlib.suppress(OSError):  # another process has put it there
            part.rename(place)
        os.utime(place)
        return place

    def _clear(self) -> None:
        """Make room, and remove what was left half done."""
        now, total = time.time(), 0
        found: list[tuple[float, int, Path]] = []
        for folder in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another process clears, too
                found.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
        for used_s, size, folder in sorted(found, reverse=True):
            is_part = folder.name.startswith(".")
            total += 0 if is_part else size
            if now - used_s > STALE_S if is_part else total > self.most_bytes:
                shutil.rmtree(folder, ignore_errors=True)


class AdapterLink:
    """core.ports.EngineEnd on a link to a front end: LoadAdapter comes out of it once the files are here."""

    def __init__(self, link: EngineLink, cache: AdapterCache) -> None:
        self._link = link
        self._cache = cache
        self._inbox: asyncio.Queue[ToEngine | Exception] = asyncio.Queue()
        self._parts: dict[int, asyncio.Future[FilePart]] = {}
        self._tasks = {asyncio.create_task(self._read(), name="adapter-link")}

    def close(self) -> None:
        """What is still coming is given up. The link itself is its maker's to close."""
        for task in self._tasks:
            task.cancel()

    async def send(self, message: FromEngine) -> None:
        await self._link.send(message)

    async def receive(self) -> ToEngine:
        message = await self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def _read(self) -> None:
        try:
            while True:
                message = await self._link.receive()
                if isinstance(message, FilePart):
                    waiting = self._parts.pop(message.number, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                elif isinstance(message, LoadAdapter):
                    task = asyncio.create_task(self._fetch(message), name="fetch-adapter")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                else:
                    self._inbox.put_nowait(message)
        except (EOFError, ValueError) as error:
            self._inbox.put_nowait(error)

    async def _fetch(self, load: LoadAdapter) -> None:
        try:
            folder = await asyncio.to_thread(self._cache.find, load.digest) or await self._pull(load)
        except TokenmillError as error:
            await self._answer(AdapterLoaded(load.number, "", error.message, error.kind, error.param or ""))
        except OSError as error:
            text = f"The adapter cannot be kept on the worker's disk: {error.strerror}."
            await self._answer(AdapterLoaded(load.number, "", text, TokenmillError.kind))
        except EOFError:
            pass
        else:
            self._inbox.put_nowait(replace(load, path=str(folder), inside=""))

    async def _answer(self, answer: AdapterLoaded) -> None:
        with contextlib.suppress(EOFError):
            await self._link.send(answer)

    async def _pull(self, load: LoadAdapter) -> Path:
        part = await asyncio.to_thread(self._cache.begin)
        try:
            left = self._cache.most_bytes
            for name in ADAPTER_FILES:
                left = await self._pull_file(load.number, name, part / name, left)
            return await asyncio.to_thread(self._cache.keep, part, load.digest)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    async def _pull_file(self, number: int, name: str, to: Path, most_bytes: int) -> int:
        """Returns how many bytes may come after it."""
        with to.open("wb") as file:
            offset = 0
            while True:
                said = await self._ask(number, name, offset)
                if said.error:
                    raise BadCheckpoint(said.error)
                if said.size > most_bytes:
                    raise BadCheckpoint(f"{name} has {said.size} bytes; a worker takes at most {most_bytes}.")
                is_end = offset + len(said.data) >= said.size
                if len(said.data) > PART_BYTES or offset + len(said.data) > said.size or not (said.data or is_end):
                    raise BadCheckpoint(f"{name} changed while it was sent.")
                await asyncio.to_thread(file.write, said.data)
                offset += len(said.data)
                if is_end:
                    return most_bytes - offset

    async def _ask(self, number: int, name: str, offset: int) -> FilePart:
        answer = self._parts[number] = asyncio.get_running_loop().create_future()
        await self._link.send(WantPart(number, name, offset))
        return await answer
