"""Work that takes long on the event loop, cut into pieces: a generator that yields where others may have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Work = Generator[None, None, T]
"""Yields None after each piece, of a millisecond or so, and returns the result."""


async def in_turns(work: Work[T]) -> T:
    """Do it, and let all else on the loop have its turn after each piece."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)
