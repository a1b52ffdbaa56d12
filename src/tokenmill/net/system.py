"""What a process has of the system: the clock, the event loop, entropy. No other code draws entropy, and a process's
clock never leaves it: messages carry ages instead of times (see `codec`).
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any


class MonotonicClock:
    def now(self) -> float:
        """Seconds since an arbitrary point, never going back."""
        return time.monotonic()


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_event_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end on a loop of its own."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main)


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
