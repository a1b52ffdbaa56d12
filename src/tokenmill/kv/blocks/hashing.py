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

from ...core.block import KEY_BYTES, BlockKey

_TOKEN = "I" if array("I").itemsize == 4 else "L"
_TOKEN_BYTES = 4


def root_key(numerics_id: str, adapter: str, salt: str) -> BlockKey:
    """Parent of every first block. Fields are length-prefixed, so that no two triples spell the same bytes."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (numerics_id, adapter, salt):
        data = part.encode("utf8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(keys: list[BlockKey], root: BlockKey, tokens: Sequence[int], block_size: int) -> None:
    """Append to `keys` the key of every full block of `tokens` that has none yet; half a microsecond a block. Tokens
    are ids below 2**32."""
    parent, first = keys[-1] if keys else root, len(keys) * block_size
    data = array(_TOKEN, tokens[first : len(tokens) // block_size * block_size]).tobytes()
    size = block_size * _TOKEN_BYTES
    for start in range(0, len(data), size):
        parent = blake2b(parent + data[start : start + size], digest_size=KEY_BYTES).digest()
        keys.append(parent)


def prompt_keys(numerics_id: str, adapter: str, salt: str, tokens: Sequence[int], block_size: int) -> bytes:
    """Keys of the full blocks of a prompt, joined (Request.keys)."""
    keys: list[BlockKey] = []
    if len(tokens) >= block_size:
        extend_keys(keys, root_key(numerics_id, adapter, salt), tokens, block_size)
    return b"".join(keys)
