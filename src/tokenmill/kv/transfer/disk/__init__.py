"""The disk tier: a folder of extents, each a file of slots."""
