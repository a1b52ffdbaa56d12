"""KV bytes: where they lie and how they move. Knows block ids, never sequences."""
