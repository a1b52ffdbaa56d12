"""Which objectives a request is served by: what it asks for, else its tenant's, else the server's, which may be what
its traffic resembles. Targets of profiles are those that this machine can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...core.cost import Costs
from ...core.slo import AUTO, OFF, PROFILES, Targets, Wish, raised, unloaded
from ...core.terms import Terms

_ALIKE = 0.1
"""Costs that differ by less, as a share, leave the targets as they are."""


class Objectives:
    """The objectives of one server. mode: of those for whom none are named: OFF, AUTO or a profile.

    costs         of steps, as measured lately
    step_tokens   most tokens of a step; 0: not known
    is_measuring  the machine is being measured: until it is over profiles give no targets, since these might be less
                  than what the machine can hold
    """

    def __init__(self, mode: str = OFF, costs: Callable[[], Costs] = Costs, step_tokens: Callable[[], int] = int):
        self.mode = mode
        self.costs = costs
        self.step_tokens = step_tokens
        self.is_measuring = False
        self._costs = Costs()
        self._effective: dict[str, Targets] = {name: profile.targets for name, profile in PROFILES.items()}

    @property
    def effective(self) -> Mapping[str, Targets]:
        """By profile, the targets as far as this machine can hold them. What is not measured is not raised."""
        costs = self.costs()
        if costs is not self._costs and not _are_alike(costs, self._costs):
            self._costs = costs
            self._effective = {
                name: raised(each.targets, self.alone(each.num_prompt)) for name, each in PROFILES.items()
            }
        return self._effective

    def usual_targets(self) -> Targets:
        """Of those for whom none are named, where these are the same for all; zeros where they are not."""
        known = self.mode not in (OFF, AUTO) and not self.is_measuring
        return self.effective[self.mode] if known else Targets()

    def alone(self, num_prompt: int) -> Targets:
        """What a prompt's first token, and each further one, takes with nobody else there; 0: not yet measured."""
        return unloaded(self.costs(), num_prompt, self.step_tokens())

    def terms(self, terms: Terms, wish: Wish, num_prompt: int, recognised: str = "") -> Terms:
        """The tenant's terms as they are for a request with this wish and so many prompt tokens."""
        profile = wish.profile or terms.profile
        if not profile and self.mode != OFF:
            profile = recognised if self.mode == AUTO else self.mode
        ttft_s, tpot_s = wish.ttft_s, wish.tpot_s
        if not wish.profile:
            ttft_s, tpot_s = ttft_s or terms.ttft_s, tpot_s or terms.tpot_s
        if profile and not (ttft_s and tpot_s) and not self.is_measuring:
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
