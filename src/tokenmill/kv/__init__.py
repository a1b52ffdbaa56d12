"""KV: which blocks there are, where they are kept, and how their bytes move.

    blocks                block ids and keys: allocator, prefix tree, eviction              pure
    events                what others hear of published blocks                              pure
    tiers                 which block is in which tier of a store, and what moves           pure
    connector/scheduler   what an engine fetches, saves, offers and pulls, and when         pure
    connector/worker      bytes between a worker's pools and all that is elsewhere
    transfer              bytes: shared host memory, disk, remote stores, peers
    store                 the process that keeps the tiers of a machine

Pure folders import the standard library only and know ids and keys; no file imports both them and bytes, but the
process of the store. Each folder has import rules of its own (docs/architecture.md).
"""
