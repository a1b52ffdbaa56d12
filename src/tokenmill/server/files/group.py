"""Tasks that end together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def first_failure() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises the first failure itself."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
