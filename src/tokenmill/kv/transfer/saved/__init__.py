"""Files of blocks by key that outlive the engine which wrote them (--kv-save)."""
