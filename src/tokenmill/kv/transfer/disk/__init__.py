"""KV blocks on disk: a folder of extents, each a file of slots, of one KV store or of servers that share it."""
