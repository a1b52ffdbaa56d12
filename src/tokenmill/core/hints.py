"""What a front end knows of KV that is wanted later, and tells the engine that has it, or whose store has it.

A tool runs between two turns, a session comes back, somebody says what will be asked: none of it is a promise, and
none changes an answer. An engine without a store with tiers passes it over.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Have the store keep the blocks with these keys, joined, the leading ones of one prefix, for so many seconds; -1:
    for ever, 0: as any others. owner: the salt of the requests that use them."""

    keys: bytes
    seconds: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PromoteKV:
    """Have the store bring these blocks into host memory: they are wanted soon."""

    keys: bytes
