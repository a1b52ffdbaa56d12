"""Under which names a remote store holds our blocks: they tell nobody who has not the key of what is in them.

    PREFIX tokenmill-kv1 / model / epoch / block

`model` stands for the numerics id, `block` for the KV group and key; both are made with the cluster's key, so that one
who reads the store can neither test what prompts were seen nor is read by us when his key or model is another. An epoch
has names of its own: what was written in an older one is never looked at again, and may be deleted as a whole.
"""

from __future__ import annotations

import hashlib
import hmac

from ....core.mac import derive
from ....core.tiers import TierKey

ROOT = "tokenmill-kv1"


class Names:
    def __init__(self, key: bytes, numerics_id: str) -> None:
        self._key = derive(key, b"names", numerics_id.encode())
        self._model = f"{ROOT}/{derive(self._key, b'model')[:8].hex()}"
        self.epoch_record = f"{self._model}/epoch"

    def of(self, block: TierKey, epoch: int) -> str:
        group, key = block
        digest = hmac.digest(self._key, group.to_bytes(2, "little") + key, hashlib.sha256)
        return f"{self._model}/{epoch}/{digest[:16].hex()}"
