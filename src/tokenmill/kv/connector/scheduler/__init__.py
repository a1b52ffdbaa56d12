"""Which KV an engine fetches from a store, saves there, offers to peers and pulls from them.

Jobs go out, and their ends come in."""
