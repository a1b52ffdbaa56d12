"""Which model answers a call: this server's own, one that upstreams serve, or one beside it."""
