"""The KV store of this machine as operators see it over HTTP: what it has, what is kept, what goes, and its metrics."""
