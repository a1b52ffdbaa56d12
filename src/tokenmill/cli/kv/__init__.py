"""`tokenmill kv ...`: KV stores from the command line."""
