"""Which KV blocks the tiers of a KV store keep, and what moves between them (`core.tiers`); no bytes, no I/O."""
