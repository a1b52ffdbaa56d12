"""Which objectives a request is served by: what it asks for, else its tenant's, else the server's, which may be what
its traffic resembles. Targets of profiles are those that this machine can hold: it is measured as the server starts,
and targets that are raised for it are logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from ...core.cost import Costs
from ...core.errors import TokenmillError
from ...core.events import Ready
from ...core.ports import Clock
from ...core.request import IDLE_PRIORITY, Request, SamplingParams
from ...core.slo import AUTO, OFF, PROFILES, Targets, Wish, raised, unloaded
from ...core.terms import Terms

CLIENT = "measure"
"""Who asks for what is measured."""

ENOUGH_STEPS = 48
"""The first steps are slow, and a few of them say nothing of prompts that are longer than theirs."""

_ALIKE = 0.1
"""Costs that differ by less, as a share, leave the targets as they are."""


class Objectives:
    """The objectives of one server. mode: of those for whom none are named: OFF, AUTO or a profile.

    costs         of steps, as measured lately
    step_tokens   most tokens of a step; 0: not known
    num_steps     that were measured. Until there are ENOUGH_STEPS, profiles give no targets, since these might be less
                  than what the machine can hold; where the mode is OFF, those that are wanted
    """

    def __init__(
        self,
        mode: str = OFF,
        costs: Callable[[], Costs] = Costs,
        step_tokens: Callable[[], int] = int,
        num_steps: Callable[[], int] = lambda: ENOUGH_STEPS,
    ) -> None:
        self.mode = mode
        self.costs = costs
        self.step_tokens = step_tokens
        self.num_steps = num_steps
        self._costs = Costs()
        self._effective: dict[str, Targets] = {name: profile.targets for name, profile in PROFILES.items()}

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured to tell what this machine can hold."""
        return self.num_steps() >= ENOUGH_STEPS and self.costs().is_known

    @property
    def effective(self) -> Mapping[str, Targets]:
        """By profile, the targets as far as this machine can hold them. What is not measured is not raised."""
        costs = self.costs()
        if self.is_known and costs is not self._costs and not _are_alike(costs, self._costs):
            self._costs = costs
            self._effective = {
                name: raised(each.targets, self.alone(each.num_prompt)) for name, each in PROFILES.items()
            }
        return self._effective

    def usual_targets(self) -> Targets:
        """Of those for whom none are named, where these are the same for all; zeros where they are not."""
        return self.effective[self.mode] if self.mode not in (OFF, AUTO) and self.is_known else Targets()

    def alone(self, num_prompt: int) -> Targets:
        """What a prompt's first token, and each further one, takes with nobody else there; 0: not yet measured."""
        return unloaded(self.costs(), num_prompt, self.step_tokens()) if self.is_known else Targets()

    def terms(self, terms: Terms, wish: Wish, num_prompt: int, recognised: str = "") -> Terms:
        """The tenant's terms as they are for a request with this wish and so many prompt tokens."""
        profile = wish.profile or terms.profile
        if not profile and self.mode != OFF:
            profile = recognised if self.mode == AUTO else self.mode
        ttft_s, tpot_s = wish.ttft_s, wish.tpot_s
        if not wish.profile:
            ttft_s, tpot_s = ttft_s or terms.ttft_s, tpot_s or terms.tpot_s
        if profile and not (ttft_s and tpot_s) and (self.mode == OFF or self.is_known):
            own = self.effective[profile]
            if num_prompt > PROFILES[profile].num_prompt:
                own = raised(own, self.alone(num_prompt))
            ttft_s, tpot_s = ttft_s or own.ttft_s, tpot_s or own.tpot_s
        if (profile, ttft_s, tpot_s) == (terms.profile, terms.ttft_s, terms.tpot_s):
            return terms
        return terms._replace(profile=profile, ttft_s=ttft_s, tpot_s=tpot_s)


def _are_alike(some: Costs, others: Costs) -> bool:
    work = unloaded(some, 1024, 512), unloaded(others, 1024, 512)
    return all(abs(one - other) <= _ALIKE * other for one, other in zip(*work, strict=True))


_WAIT_S = 3600.0
_STEPS, _STEP_TOKENS, _OUTPUT = 3, 512, 16
_TOKEN = 1
_MOST_S = 10.0
"""A slow machine is not measured for longer: its clients' requests show the rest."""

_LOOK_S = 1.0

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
        objectives = self._objectives
        with contextlib.suppress(TokenmillError):
            ready = await self._engines.wait_ready(_WAIT_S)
            if ready.pooling is None:
                step_tokens = ready.max_num_batched_tokens or _STEP_TOKENS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_MOST_S):
                        while not objectives.is_known:
                            await self._compute(min(_STEPS * step_tokens, ready.max_model_len - _OUTPUT))
            if not objectives.is_known:
                _log.info(
                    "Profiles have no targets until %d steps have shown what this machine can hold.", ENOUGH_STEPS
                )
            while not objectives.is_known:
                await asyncio.sleep(_LOOK_S)
            tell(objectives)

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
        await self._engines.compute(request, CLIENT)


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
