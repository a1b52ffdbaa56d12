"""What nobody waits for is done when nothing else is, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tokenmill.cli import engine_process
from tokenmill.cli.engine_process import NUM_IDLE_CHECKS, until_idle


@pytest.mark.parametrize(
    ("is_busy", "num_done", "looks"),
    [
        (lambda look: False, lambda look: 7, NUM_IDLE_CHECKS),
        (lambda look: look in (1, 4), lambda look: 0, 4 + NUM_IDLE_CHECKS),
        (lambda look: False, lambda look: min(look, 5), 5 + NUM_IDLE_CHECKS),  # what came and went between two looks
        (lambda look: look % NUM_IDLE_CHECKS == 0 and look < 99, lambda look: 0, 90 + NUM_IDLE_CHECKS),
    ],
)
def test_idle_is_a_while_without_work(
    is_busy: Callable[[int], bool], num_done: Callable[[int], int], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = 0

    async def sleep(seconds: float) -> None:
        nonlocal look
        look += 1

    monkeypatch.setattr(engine_process.asyncio, "sleep", sleep)
    asyncio.run(until_idle(lambda: is_busy(look), lambda: num_done(look)))
    assert look == looks
