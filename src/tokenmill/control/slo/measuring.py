"""What is done about objectives as a server starts: the machine is measured, where profiles will be asked for, and the
targets that it cannot hold are told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from ...core.errors import TokenmillError
from ...core.events import Ready
from ...core.ports import Clock
from ...core.request import IDLE_PRIORITY, Request, SamplingParams
from ...core.slo import OFF, PROFILES
from .objectives import Objectives

_WAIT_S = 3600.0
_STEPS, _STEP_TOKENS, _OUTPUT = 3, 512, 16
_TOKEN = 1
_ROUNDS = 3
"""The first steps of an engine are slow."""

_MOST_S = 10.0
"""After so long profiles have targets by what is known then."""

_LAST = IDLE_PRIORITY - 1
"""Behind all others, but no idle work, whose steps are small."""

_log = logging.getLogger(__name__)


class Engines(Protocol):
    """The engines of a front end, as far as they are measured."""

    async def wait_ready(self, longest_s: float) -> Ready:
        """Raises Unavailable where none is ready in time."""
        ...

    async def compute(self, request: Request, client: str) -> None:
        """Have the request answered, and drop the answer."""
        ...


class Measuring:
    """Run `open` in the loop, and `close` when the server ends."""

    def __init__(self, engines: Engines, objectives: Objectives, clock: Clock, new_id: Callable[[str], str]) -> None:
        self._engines = engines
        self._objectives = objectives
        self._clock = clock
        self._new_id = new_id
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        if self._objectives.mode != OFF:
            self._task = asyncio.create_task(self._run(), name="measure for objectives")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        with contextlib.suppress(TokenmillError):
            ready = await self._engines.wait_ready(_WAIT_S)
            if ready.pooling is None and not self._objectives.costs().is_known:
                step_tokens = ready.max_num_batched_tokens or _STEP_TOKENS
                self._objectives.is_measuring = True
                timer = asyncio.get_running_loop().call_later(_MOST_S, self._end)
                try:
                    for _ in range(_ROUNDS):
                        await self._compute(min(_STEPS * step_tokens, ready.max_model_len - _OUTPUT))
                finally:
                    timer.cancel()
                    self._end()
            tell(self._objectives)

    def _end(self) -> None:
        self._objectives.is_measuring = False

    async def _compute(self, num_prompt: int) -> None:
        """A request of some full steps, and of some small ones. Others go first."""
        if num_prompt < 1:
            return
        request = Request(
            id=self._new_id("measure"),
            prompt_tokens=(_TOKEN,) * num_prompt,
            sampling=SamplingParams(max_tokens=_OUTPUT, ignore_eos=True),
            max_tokens=_OUTPUT,
            seed=0,
            priority=_LAST,
            cache_salt=self._new_id("measure"),
            arrival_s=self._clock.now(),
        )
        await self._engines.compute(request, "measure")


def tell(objectives: Objectives) -> None:
    """Log the targets that are raised here."""
    for name, effective in objectives.effective.items():
        wanted = PROFILES[name].targets
        raised = [
            f"{time} {1000 * before:.0f} -> {1000 * now:.0f} ms"
            for time, before, now in zip(("TTFT", "TPOT"), wanted, effective, strict=True)
            if now > before
        ]
        if raised:
            _log.info("Profile %s, raised to what this machine can hold: %s.", name, ", ".join(raised))
