"""Copies KV blocks between a worker's pools and its folder of saved ones.

Files are read and written on threads of their own; bytes go into and out of the pools in the backend's queue, between
two steps and a few at a time, so that no step waits long. The engine holds every block that is copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....core.block import BlockMove, cut_moves
from ....core.effects import FetchBlocks, FindBlocks, SaveBlocks
from ....core.errors import ConfigError, EngineFailed
from ....core.units import MiB
from ....ops.kv_pool import KVPool
from ...transfer.disk.extent import BadExtent
from ...transfer.disk.folder import SharedFolder
from ...transfer.disk.whole import StoredBlock

log = logging.getLogger(__name__)

COPY_BYTES = 4 * MiB
"""Copied between two steps: about a millisecond."""

BetweenSteps = Callable[[Callable[[], Any]], Awaitable[Any]]


def open_folder(path: Path, numerics_id: str, pools: Sequence[KVPool]) -> SharedFolder:
    """The folder of the model with this id, which holds as much as its pools do. Raises ConfigError."""
    block_bytes = [pool.group.bytes_per_block for pool in pools]
    most_bytes = sum(pool.num_blocks * pool.group.bytes_per_block for pool in pools)
    folder = SharedFolder(path.expanduser().absolute(), numerics_id, block_bytes, most_bytes)
    try:
        folder.open()
    except OSError as error:
        reason = (error.strerror or str(error)).removesuffix(".")
        raise ConfigError(f"--kv-save {path} cannot be used: {reason}.", param="kv_save") from error
    return folder


class Transfers:
    """`pools`: of each KV group."""

    def __init__(self, pools: Sequence[KVPool], folder: SharedFolder) -> None:
        self._pools = pools
        self._folder = folder

    async def fetch(self, job: FetchBlocks, between_steps: BetweenSteps) -> str:
        """Raises EngineFailed where a block cannot be read as it was written; some others may have been copied."""
        for run in self._runs(job.moves):
            data = await self._beside("read", self._folder.read, [(group, key) for group, key, _ in run])
            await between_steps(partial(self._copy_in, run, data))
        return ""

    async def find(self, job: FindBlocks) -> str:
        """Raises EngineFailed where the folder cannot be read."""
        await self._beside("read", SharedFolder.refresh, self._folder)
        return "".join("01"[is_there] for is_there in self._folder.holds(job.wanted))

    async def save(self, job: SaveBlocks, between_steps: BetweenSteps) -> str:
        """Raises EngineFailed where the file cannot be written."""
        await self._beside("read", SharedFolder.refresh, self._folder)
        held = self._folder.holds([(group, key) for group, key, _ in job.stored])
        moves = [*job.moves, *(move for move, is_held in zip(job.stored, held, strict=True) if not is_held)]
        blocks: list[StoredBlock] = []
        for run in self._runs(moves):
            data = await between_steps(partial(self._copy_out, run))
            blocks += [StoredBlock(group, key, each) for (group, key, _), each in zip(run, data, strict=True)]
        if blocks:
            await self._beside("written", self._folder.save, blocks)
        return ""

    def close(self) -> None:
        self._folder.close()

    def _runs(self, moves: Sequence[BlockMove]) -> list[tuple[BlockMove, ...]]:
        return cut_moves(moves, [pool.group.bytes_per_block for pool in self._pools], COPY_BYTES)

    def _copy_in(self, run: Sequence[BlockMove], data: Sequence[bytes]) -> None:
        for (group, _, block), each in zip(run, data, strict=True):
            self._pools[group].copy_in((block,), each)

    def _copy_out(self, run: Sequence[BlockMove]) -> list[bytes]:
        return [self._pools[group].copy_out((block,)) for group, _, block in run]

    async def _beside(self, done: str, work: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, work, argument)
        except (BadExtent, OSError) as error:
            log.warning("Saved KV in %s cannot be %s: a file of it %s.", self._folder.path, done, _reason(error))
            raise EngineFailed("Saved KV could not be had.") from error


def _reason(error: BadExtent | OSError) -> str:
    return str(error) if isinstance(error, BadExtent) else f"gives an error ({error.strerror})"
