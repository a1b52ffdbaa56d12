"""The bytes of KV: host memory that processes share, disk, remote stores, peers. Knows no block ids and no sequences.
What is where, and what moves, is decided in `kv.tiers`."""
