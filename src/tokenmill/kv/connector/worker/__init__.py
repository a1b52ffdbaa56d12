"""Copies KV between a worker's pools and files, the store of the machine, and peers, as the plans and jobs say."""
