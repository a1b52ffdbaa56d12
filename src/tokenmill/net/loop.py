"""The event loop of a process or thread: uvloop if it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
