"""The process that keeps KV below the pools of a machine's engines: its socket, its host memory and its tiers.
Decisions are the manager's (`kv.tiers`)."""
