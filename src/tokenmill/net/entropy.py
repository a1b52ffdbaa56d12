"""Where true randomness enters: seeds for requests that have none, and identifiers. No other code draws entropy."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable


def new_seed() -> int:
    """A fresh seed of 63 bits, so that a client can send it back as any language's signed integer."""
    return secrets.randbits(63)


def seeds_from(seed: int) -> Callable[[], int]:
    """As new_seed, but always the same seeds in the same order."""
    source = random.Random(seed)
    return lambda: source.getrandbits(63)


def new_id(prefix: str) -> str:
    """`prefix-` and 32 hex digits: unique across processes and restarts."""
    return f"{prefix}-{secrets.token_hex(16)}"
