"""The keys of a sequence's blocks: those that its request brought, then our own."""

from __future__ import annotations

from ...core.block import KEY_BYTES, split_keys
from ...core.config import EngineConfig
from ...core.sequence import Sequence
from .hashing import extend_keys, root_key


def extend(seq: Sequence, config: EngineConfig) -> None:
    """Give each full block of the sequence its key, as far as it has none."""
    size, request = config.block_size, seq.request
    if (len(seq.keys) + 1) * size > len(seq.tokens):
        return
    if not seq.keys and request.keys and len(request.keys) == len(request.prompt_tokens) // size * KEY_BYTES:
        seq.keys += split_keys(request.keys)
    # The keys that are there stand for the root: they hang below it.
    root = b"" if seq.keys else root_key(config.numerics_id, request.adapter, request.cache_salt)
    extend_keys(seq.keys, root, seq.tokens, size, request.embeds)
