"""Collects the effects of an event or a commit while it is handled."""

from __future__ import annotations

from dataclasses import dataclass, field

from .effects import Effects, Job
from .events import FromEngine, Output

_NOTHING = Effects()


@dataclass(slots=True, eq=False)
class Outbox:
    """Whatever part of the engine has something to say adds it here; EngineCore hands it out."""

    outputs: list[Output] = field(default_factory=list)
    answers: list[FromEngine] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def take(self) -> Effects:
        """All that was added since the last call, in order."""
        if not (self.outputs or self.answers or self.jobs):
            return _NOTHING
        effects = Effects(tuple(self.outputs), tuple(self.answers), tuple(self.jobs))
        self.outputs, self.answers, self.jobs = [], [], []
        return effects
