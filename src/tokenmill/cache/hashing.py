"""Names KV by what it was computed from: a chained 128-bit key for every full block of a token list.

    root   = H(numerics id, adapter digest, salt)
    key[0] = H(root,   tokens[0:S])
    key[i] = H(key[i-1], tokens[i*S:(i+1)*S])

So a key names the whole prefix up to the end of its block. The hash is BLAKE2b, so that nobody can craft a prompt whose
blocks collide with another client's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from ..core.block import BlockKey

KEY_BYTES = 16
_TOKEN = "I" if array("I").itemsize == 4 else "L"


def root_key(numerics_id: str, adapter: str, salt: str) -> BlockKey:
    """Parent of every first block. Fields are length-prefixed, so that no two triples spell the same bytes."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (numerics_id, adapter, salt):
        data = part.encode("utf8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of the block that holds `tokens` below `parent`. Tokens are ids below 2**32."""
    return blake2b(parent + array(_TOKEN, tokens).tobytes(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[BlockKey], root: BlockKey, tokens: Sequence[int], block_size: int) -> None:
    """Append to `keys` the key of every full block of `tokens` that has none yet; about a microsecond a block."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        parent = block_key(parent, tokens[start : start + block_size])
        keys.append(parent)
