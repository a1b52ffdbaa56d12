"""Copies KV blocks between a worker's pools and the host memory of its machine's KV store: what its engine asks of a
store with tiers (`core.tiers`).

    FetchBlocks   find slots leased -- thread --> pool, sum compared there --> what was wrong is told
    SaveBlocks    slots granted    <-- thread --  pool, summed there

Blocks are copied where they lie, a thread for each direction, beside the steps: the engine reserves what is filled and
holds what is saved, so that no step touches either before the job has ended. Whatever fails is a miss: the engine
computes. Where the store is away, every answer is no; the client joins it again by itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ....core.block import BlockMove
from ....core.effects import DropBlocks, FetchBlocks, FindBlocks, NoteStepCosts, PinBlocks, PromoteBlocks, SaveBlocks
from ....core.errors import EngineFailed
from ....core.tiers import Lease, TierEvents, TierFacts
from ....ops.kv_pool import KVPool
from ...transfer.checksum import block_sum
from ...transfer.client import StoreClient

log = logging.getLogger(__name__)

FIND_S = 5.0
FETCH_S = 120.0
"""A store that takes longer is not waited for: its answer would come too late to be of use."""

SAVE_S = 300.0
SAVING_NICE = 5
"""No more: a thread that is hardly scheduled while it holds the interpreter holds up the engine's loop."""

T = TypeVar("T")


class TierCopies:
    """`pools`: of each KV group; `client`: of the machine's KV store, which is closed with this."""

    def __init__(self, pools: Sequence[KVPool], client: StoreClient) -> None:
        self._pools = pools
        self._memories = [pool.memory() for pool in pools]
        self._sizes = [pool.group.bytes_per_block for pool in pools]
        self._client = client
        self._fetching = ThreadPoolExecutor(1, "kv-fetch")
        self._saving = ThreadPoolExecutor(1, "kv-save", initializer=give_way)

    @property
    def tiers(self) -> tuple[TierFacts, ...]:
        return self._client.tiers

    def watch(self, hear: Callable[[TierEvents], None] | None) -> None:
        """See StoreClient.watch."""
        self._client.watch(hear)

    def when_rejoined(self, hear: Callable[[], None]) -> None:
        """The store was away and is back: this hears of it from now on."""
        self._client.when_rejoined = hear

    async def leave(self) -> None:
        """The store, while the loop still runs; nothing is asked of it any more."""
        await self._client.close()
        await asyncio.sleep(0)

    def close(self) -> None:
        """Wait for copies under way: the pools may go after that."""
        self._fetching.shutdown(cancel_futures=True)
        self._saving.shutdown(cancel_futures=True)
        self._client.leave()

    async def run(self, job: FindBlocks | FetchBlocks | SaveBlocks) -> str:
        """Raises EngineFailed where blocks that were to be saved are not where they were to be."""
        match job:
            case FindBlocks():
                return await self.find(job)
            case FetchBlocks():
                return await self.fetch(job)
            case SaveBlocks():
                return await self.save(job)

    async def find(self, job: FindBlocks) -> str:
        try:
            async with asyncio.timeout(job.within_s or FIND_S):
                return await self._client.find(job.wanted)
        except (OSError, TimeoutError) as error:
            log.debug("The KV store does not say what it has: %s", error)
            return "0" * len(job.wanted)

    async def fetch(self, job: FetchBlocks) -> str:
        wanted = tuple((group, key) for group, key, _ in job.moves)
        taken: set[int] = set()

        async def take(leases: Sequence[Lease]) -> Sequence[int]:
            bad = await _beside(self._fetching, partial(self._copy_in, job.moves, leases))
            taken.update({lease.nth for lease in leases} - set(bad))
            return bad

        try:
            async with asyncio.timeout(job.within_s or FETCH_S):
                await self._client.fetch(wanted, take)
        except (OSError, TimeoutError) as error:
            log.info("KV of the store cannot be had: %s", error or "it takes too long.")
        if len(taken) == len(wanted):
            return ""
        return "".join("01"[nth in taken] for nth in range(len(wanted)))

    async def save(self, job: SaveBlocks) -> str:
        """Raises EngineFailed where the blocks are not where they were to be."""
        assert len(job.facts) == len(job.moves), (len(job.facts), len(job.moves))
        try:
            async with asyncio.timeout(SAVE_S):
                is_kept = await self._client.store(job.facts, partial(self._fill, job.moves), job.is_shared)
        except (OSError, TimeoutError) as error:
            raise EngineFailed(f"The KV store did not take KV: {error}") from error
        if job.is_shared and not is_kept:
            raise EngineFailed("KV did not reach a tier that others share.")
        return ""

    def tell(self, job: PromoteBlocks | DropBlocks | PinBlocks | NoteStepCosts) -> str:
        """What is not answered: nothing is waited for."""
        with suppress(OSError):
            match job:
                case PromoteBlocks(wanted):
                    self._client.promote(wanted)
                case DropBlocks(wanted):
                    self._client.drop(wanted)
                case PinBlocks(wanted, seconds, owner):
                    self._client.pin(wanted, seconds, owner)
                case NoteStepCosts(token_s, position_s):
                    self._client.note_costs(token_s, position_s)
        return ""

    async def _fill(self, moves: Sequence[BlockMove], slots: Sequence[tuple[int, int]]) -> Sequence[int]:
        """The checksums."""
        return await _beside(self._saving, partial(self._copy_out, moves, slots))

    def _copy_in(self, moves: Sequence[BlockMove], leases: Sequence[Lease]) -> list[int]:
        for group, pool in enumerate(self._pools):  # the first touch of memory is dear
            pool.commit([moves[lease.nth][2] for lease in leases if moves[lease.nth][0] == group])
        bad = []
        for lease in leases:
            group, key, block = moves[lease.nth]
            size = self._sizes[group]
            ctypes.memmove(self._address(group, block), _address(self._client.view(lease.offset, size)), size)
            if block_sum((group, key), self._view(group, block)) != lease.sum:
                bad.append(lease.nth)
        if bad:
            log.warning("%d of %d KV blocks from the store are not what was saved; they are computed.",
                        len(bad), len(leases))  # fmt: skip
        return bad

    def _copy_out(self, moves: Sequence[BlockMove], slots: Sequence[tuple[int, int]]) -> list[int]:
        sums = []
        for nth, offset in slots:
            group, key, block = moves[nth]
            size = self._sizes[group]
            ctypes.memmove(_address(self._client.view(offset, size)), self._address(group, block), size)
            sums.append(block_sum((group, key), self._view(group, block)))
        return sums

    def _view(self, group: int, block: int) -> memoryview:
        size = self._sizes[group]
        return self._memories[group][0][block * size : (block + 1) * size]

    def _address(self, group: int, block: int) -> int:
        return self._memories[group][1] + block * self._sizes[group]


def give_way() -> None:
    """The thread that calls this comes after others: nobody waits for what is saved, and kernel threads wait for each
    other, so that a processor taken from one of them is taken from all."""
    with suppress(OSError, AttributeError):  # a system whose threads have no priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVING_NICE)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def _beside(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Also where nobody waits for it any more, a copy has ended when this has."""
    copying = thread.submit(work)
    waiting = asyncio.wrap_future(copying)
    is_cancelled = False
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            is_cancelled = True
            if copying.cancel():
                break
    if is_cancelled:
        raise asyncio.CancelledError
    return waiting.result()
