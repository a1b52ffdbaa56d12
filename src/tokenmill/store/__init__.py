"""KV bytes that outlive a process: files of blocks by key. Knows nothing of block ids or sequences."""
