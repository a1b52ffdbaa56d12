"""The bytes of KV tiers: host memory that processes share, disk, remote stores and peers. What is where, and what
moves, is decided in `kv.tiers`."""
