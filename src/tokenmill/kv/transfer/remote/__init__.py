"""Blocks in stores that other machines use too: Redis or Valkey, S3-compatible ones, a shared folder."""

from .tier import RemoteTier

__all__ = ["RemoteTier"]
