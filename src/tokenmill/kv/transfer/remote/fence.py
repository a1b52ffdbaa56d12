"""Fencing epochs of a store that several machines write to: who was fenced off writes no more.

A record in the store says which epoch it is; it is sealed as blocks are. Who opens the store takes part in that epoch.
Whoever raises it goes on in the new one; all others learn of it soon, read what is written there, and write nothing
before they are started anew: what they hold may be what the operator wanted to be rid of. What one writes late, having
been suspended, has a name of the old epoch, which nobody looks at any more.

The owner of a store may put an older record back, and older values with it: they were ours, and are what would be
computed. An epoch that the operator gives (?epoch=N) holds whatever the record says.
"""

from __future__ import annotations

import hashlib
import hmac
import logging

from ....core.mac import derive
from ....core.tiers import TierKey
from ..seal import OVERHEAD, BadSeal, Seal
from .backend import Backend

ROOT = "tokenmill-kv1"


log = logging.getLogger(__name__)

_FIRST = 1
_RECORD_BYTES = 8
_PLACE = (0, b"epoch")


class Fence:
    """Its calls that take a limit are made on a thread, by one at a time, and raise as the backend's do.

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
