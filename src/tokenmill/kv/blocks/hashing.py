"""Names KV by what it was computed from: a chained 128-bit key for every full block of a token list.

    root   = H(numerics id, adapter digest, salt)
    key[0] = H(root,   tokens[0:S])
    key[i] = H(key[i-1], tokens[i*S:(i+1)*S])

Where inputs that are not token ids (`core.embeds`) have places in a block, their digests, places and positions are
hashed after its tokens. So a key names the whole prefix up to the end of its block. The hash is BLAKE2b, so that nobody
can craft a prompt whose blocks collide with another client's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from hashlib import blake2b
from struct import Struct

from ...core.block import KEY_BYTES, BlockKey, split_keys
from ...core.config import EngineConfig
from ...core.embeds import Embeds
from ...core.sequence import Sequence

_TOKEN = "I" if array("I").itemsize == 4 else "L"
_TOKEN_BYTES = 4
_CONTENT = Struct("<qqqII")


def root_key(numerics_id: str, adapter: str, salt: str) -> BlockKey:
    """Parent of every first block. Fields are length-prefixed, so that no two triples spell the same bytes."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (numerics_id, adapter, salt):
        data = part.encode("utf8")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(
    keys: list[BlockKey], root: BlockKey, tokens: List[int], block_size: int, embeds: List[Embeds] = ()
) -> None:
    """Append to `keys` the key of every full block of `tokens` that has none yet; half a microsecond a block. Tokens
    are ids below 2**32; `embeds`: as in Request."""
    parent, first = keys[-1] if keys else root, len(keys) * block_size
    data = array(_TOKEN, tokens[first : len(tokens) // block_size * block_size]).tobytes()
    size = block_size * _TOKEN_BYTES
    contents = _contents(embeds, block_size) if embeds else {}
    for start in range(0, len(data), size):
        block = data[start : start + size]
        if contents:
            block += contents.get(len(keys), b"")
        parent = blake2b(parent + block, digest_size=KEY_BYTES).digest()
        keys.append(parent)


def _contents(embeds: List[Embeds], block_size: int) -> dict[int, bytes]:
    """What is hashed beside the tokens, by the number of the block: of each content where it begins from the block's
    start on and how many places it takes, its digest, and the positions of its inputs up to the block's end."""
    found: dict[int, bytes] = {}
    for one in embeds:
        for number in range(one.start // block_size, max(one.start, one.end - 1) // block_size + 1):
            begin = number * block_size
            positions = [each for position in one.positions[: begin + block_size - one.start] for each in position]
            numbers = array("q", positions).tobytes()
            head = _CONTENT.pack(one.start - begin, one.num, len(one.positions), len(one.digest), len(numbers))
            found[number] = found.get(number, b"") + head + one.digest + numbers
    return found


def prompt_keys(
    numerics_id: str, adapter: str, salt: str, tokens: List[int], block_size: int, embeds: List[Embeds] = ()
) -> bytes:
    """Keys of the full blocks of a prompt, joined (Request.keys)."""
    keys: list[BlockKey] = []
    if len(tokens) >= block_size:
        extend_keys(keys, root_key(numerics_id, adapter, salt), tokens, block_size, embeds)
    return b"".join(keys)


def extend_seq_keys(seq: Sequence, config: EngineConfig) -> None:
    """Give each full block of the sequence that has no key yet its key."""
    size, request = config.block_size, seq.request
    if (len(seq.keys) + 1) * size > len(seq.tokens):
        return
    if not seq.keys and request.keys and len(request.keys) == len(request.prompt_tokens) // size * KEY_BYTES:
        seq.keys += split_keys(request.keys)
    # The keys that are there stand for the root: they hang below it.
    root = b"" if seq.keys else root_key(config.numerics_id, request.adapter, request.cache_salt)
    extend_keys(seq.keys, root, seq.tokens, size, request.embeds)
