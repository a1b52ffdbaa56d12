"""Which physical block holds what: ids, reference counts, the prefix tree, eviction.

Knows block ids and keys, but no block bytes, sequences or requests. Imports only `core`.
"""
