"""The remote tier: blocks in a store that machines share, found by name. Nothing in it is ours alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from ....core.errors import ConfigError
from ....core.tier_jobs import DropFrom, LoadFrom, LookIn, SaveTo
from ....core.tiers import NO_PLACE, REMOTE, TierEntry, TierFacts
from ..seal import Seal
from .address import OPTIONS, PARAM, Address, parse
from .backend import Backend
from .calls import ASK, said
from .fence import Fence, Names
from .sealed import Limits, SealedStore, View

THERE = 0
"""The place of all blocks: they are found by name."""


class RemoteTier:
    """Implements core.tier_jobs.Tier. All calls on one event loop.

    url          see `address`
    block_bytes  of each KV group
    view         (offset, bytes) of host memory
    key          the cluster's (`seal.load_key`)

    Raises ConfigError.
    """

    def __init__(
        self,
        url: str,
        numerics_id: str,
        block_bytes: Sequence[int],
        view: View,
        key: bytes,
        limits: Limits | None = None,
    ) -> None:
        if not key:
            raise ConfigError(
                "--kv-remote needs --kv-key-file FILE: what others can write to is sealed with a key of the cluster."
                " One is made by: (umask 077; head -c 32 /dev/urandom | base64 > FILE)",
                param=PARAM,
            )
        self._limits = limits or Limits()
        self._backend, address = open_backend(url)
        names = Names(key, numerics_id)
        self._seal = Seal(key, "kv remote", numerics_id)
        self._fence = Fence(self._backend, names, key, numerics_id, address.number("epoch", 0))
        self._store = SealedStore(
            self._backend, names.of, self._seal, block_bytes, view, self._limits, self._enter, self._may_write
        )
        self._polling: asyncio.Task[None] | None = None

    @property
    def facts(self) -> TierFacts:
        rate = self._store.rate
        return TierFacts(REMOTE, 0, rate.latency_s, rate.bytes_s)

    def stat(self) -> dict[str, float]:
        """Counters of all outcomes, and the state."""
        return {**self._store.stat(), "epoch": self._fence.epoch, "is_fenced": self._fence.is_fenced}

    async def open(self) -> Sequence[TierEntry]:
        """A store that does not answer is tried again later."""
        await self._store.open()
        self._polling = asyncio.get_running_loop().create_task(self._poll())
        return ()

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._store.close()

    async def fence(self) -> int:
        """Have all other processes write no more, and nothing found that was written before: the new epoch. Raises
        OSError."""
        try:
            epoch: int = await self._store.calls.one(ASK, partial(self._fence.raise_epoch, self._limits.call_s))
        except EOFError as error:
            raise OSError(said(error)) from error
        self._seal.epoch = epoch
        return epoch

    async def look(self, job: LookIn) -> Sequence[int]:
        return [THERE if is_there else NO_PLACE for is_there in await self._store.look(job.wanted)]

    async def load(self, job: LoadFrom) -> Sequence[int]:
        return await self._store.load([(block, offset) for block, _, offset in job.blocks])

    async def save(self, job: SaveTo) -> Sequence[int]:
        kept = await self._store.save([(facts.block, offset, value) for facts, offset, value in job.blocks])
        return [THERE if is_kept else NO_PLACE for is_kept in kept]

    async def drop(self, job: DropFrom) -> None:
        await self._store.drop([block for block, _ in job.blocks])

    def _may_write(self) -> bool:
        return not self._fence.is_fenced

    async def _enter(self, limit_s: float) -> None:
        """Take part in the store's epoch. Raises OSError, EOFError."""
        await self._store.calls.one(ASK, partial(self._backend.check, limit_s))
        began_s = time.monotonic()
        await self._store.calls.one(ASK, partial(self._fence.check, limit_s))
        self._store.rate.note_latency(time.monotonic() - began_s)
        self._seal.epoch = self._fence.epoch

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._limits.poll_s)
            if self._store.is_down:
                continue
            try:
                await self._enter(self._limits.call_s)
            except (OSError, EOFError) as error:
                self._store.calls.breaker.fail(said(error))


def open_backend(text: str) -> tuple[Backend, Address]:
    """Nothing is connected yet. Raises ConfigError."""
    from .mooncake import MooncakeBackend
    from .objects import ObjectBackend
    from .redis import RedisBackend

    kinds = {scheme: kind for kind in (RedisBackend, ObjectBackend, MooncakeBackend) for scheme in kind.SCHEMES}
    kind = kinds.get(text.partition("://")[0])
    if kind is None:
        known = ", ".join(f"{scheme}://" for scheme in kinds)
        raise ConfigError("--kv-remote takes an address that begins with one of: " + known, param=PARAM)
    address = parse(text, (*OPTIONS, *kind.OPTIONS))
    return kind(address), address
