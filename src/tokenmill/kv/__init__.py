"""All that is about KV: which blocks there are, where they are kept, and how their bytes move.

    blocks      block ids and keys: allocator, prefix tree, eviction             pure
    tiers       which block is in which tier of a store, and what moves          pure

Pure folders import the standard library only and know ids and keys. Bytes are elsewhere: no file here imports both.
Each folder has import rules of its own (docs/architecture.md).
"""
