"""The remote tier: blocks in a store that machines share, found by name. Nothing in it is ours alone."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from functools import partial

from ....core.errors import ConfigError
from ....core.mac import derive
from ....core.tiers import NO_PLACE, REMOTE, DropFrom, LoadFrom, LookIn, SaveTo, TierEntry, TierFacts, TierKey
from ....plugins.groups import KV_BACKENDS
from ....plugins.load import plugin_names
from ..seal import OVERHEAD, BadSeal, Seal
from .backend import OPTIONS, PARAM, Address, Backend, parse
from .calls import ASK, said
from .plugin_backend import open_plugin_backend
from .sealed import Limits, SealedStore, View

log = logging.getLogger(__name__)
ROOT = "tokenmill-kv1"
_FIRST = 1
_RECORD_BYTES = 8
_PLACE = (0, b"epoch")
THERE = 0
"""The place of all blocks: they are found by name."""


class RemoteTier:
    """Implements core.tiers.Tier. All calls on one event loop.

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
    if kind is not None:
        address = parse(text, (*OPTIONS, *kind.OPTIONS))
        return kind(address), address
    found = open_plugin_backend(text)
    if found is None:
        known = ", ".join(f"{scheme}://" for scheme in (*kinds, *plugin_names(KV_BACKENDS)))
        raise ConfigError("--kv-remote takes an address that begins with one of: " + known, param=PARAM)
    return found


class Fence:
    """Fencing epochs of a store that several machines write to: who was fenced off writes no more.

    A record in the store says which epoch it is; it is sealed as blocks are. Who opens the store takes part in that
    epoch. Whoever raises it goes on in the new one; all others learn of it soon, read what is written there, and write
    nothing before they are started anew: what they hold may be what the operator wanted to be rid of. What one writes
    late, having been suspended, has a name of the old epoch, which nobody looks at any more.

    The owner of a store may put an older record back, and older values with it: they were ours, and are what would be
    computed. An epoch that the operator gives (?epoch=N) holds whatever the record says.

    Its calls that take a limit are made on a thread, by one at a time, and raise as the backend's do.

    least      what the operator gives; 0: nothing
    epoch      that we take part in; 0: not known yet
    is_fenced  whether we write no more
    """

    def __init__(self, backend: Backend, names: Names, key: bytes, numerics_id: str, least: int) -> None:
        self._backend = backend
        self._name = names.epoch_record
        self._seal = Seal(key, "kv epoch", numerics_id)
        self._least = least
        self.epoch = 0
        self.is_fenced = False

    def check(self, limit_s: float) -> None:
        """Compare ours with the store's."""
        there = self._read(limit_s)
        if self.epoch == 0:
            self.epoch = max(there, self._least, _FIRST)
            self.is_fenced = 0 < self._least < there
            if self.is_fenced:
                self._say_so()
        elif there > self.epoch:
            self.epoch, self.is_fenced = there, True
            self._say_so()
        if there < self.epoch and not self.is_fenced:
            self._write(limit_s)

    def raise_epoch(self, limit_s: float) -> int:
        """Fence all others off: the new epoch."""
        epoch = max(self._read(limit_s), self.epoch) + 1
        self.epoch, self.is_fenced = epoch, False
        self._write(limit_s)
        return epoch

    def _read(self, limit_s: float) -> int:
        """0: there is none, or none of ours."""
        found = []

        def take(_: int, value: memoryview) -> None:
            record = bytearray(_RECORD_BYTES)
            try:
                self._seal.open(_PLACE, value, record)
            except BadSeal as error:
                log.warning("The record of the epoch in %s is %s; it is not used.", self._backend.name, error)
            else:
                found.append(int.from_bytes(record, "little"))

        self._backend.get([self._name], _RECORD_BYTES + OVERHEAD, take, limit_s)
        return found[0] if found else 0

    def _write(self, limit_s: float) -> None:
        sealed = bytearray(_RECORD_BYTES + OVERHEAD)
        self._seal.seal(_PLACE, 0, self.epoch.to_bytes(_RECORD_BYTES, "little"), sealed)
        self._backend.put([(self._name, sealed)], limit_s)

    def _say_so(self) -> None:
        log.warning(
            "%s is in epoch %d: this process was fenced off and writes nothing there until it is started anew.",
            self._backend.name, self.epoch,
        )  # fmt: skip


class Names:
    """Under which names a remote store holds our blocks: they tell nobody who has not the key of what is in them.

        PREFIX tokenmill-kv1 / model / epoch / block

    `model` stands for the numerics id, `block` for the KV group and key; both are made with the cluster's key, so that
    one who reads the store can neither test what prompts were seen nor is read by us when his key or model is another.
    An epoch has names of its own: what was written in an older one is never looked at again, and may be deleted as a
    whole.
    """

    def __init__(self, key: bytes, numerics_id: str) -> None:
        self._key = derive(key, b"names", numerics_id.encode())
        self._model = f"{ROOT}/{derive(self._key, b'model')[:8].hex()}"
        self.epoch_record = f"{self._model}/epoch"

    def of(self, block: TierKey, epoch: int) -> str:
        group, key = block
        digest = hmac.digest(self._key, group.to_bytes(2, "little") + key, hashlib.sha256)
        return f"{self._model}/{epoch}/{digest[:16].hex()}"
