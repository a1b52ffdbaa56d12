"""Batches of a folder that another server has: they are opened once that server has gone, as in an upgrade where the
new one starts before the old one ends."""

from __future__ import annotations

import asyncio
import logging

from ...core.errors import ConfigError
from .runner import Batches

PERIOD_S = 1.0
_log = logging.getLogger(__name__)


class Handover:
    """`open` it inside the loop, `close` it when the server ends."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._batches.open()
        if self._batches.store.is_taken():
            self._task = asyncio.create_task(self._wait(), name="folder-of-files")

    async def _wait(self) -> None:
        while self._batches.store.is_taken():
            await asyncio.sleep(PERIOD_S)
        _log.info("The other server has gone: /v1/files and /v1/batches answer here.")
        try:
            self.open()  # a third one may have been quicker
        except ConfigError as error:
            _log.error("Files are not kept: %s", error.message)

    def stop(self) -> None:
        """Begin nothing more."""
        if self._task is not None:
            self._task.cancel()
        self._batches.stop()

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._batches.close()
