"""A scheduling policy: of the waiting requests, the one that may draw the fewest tokens is served next. This is
shortest job first where answers, not prompts, take the time. Nobody waits forever: a request that may draw n more
tokens waits at most PATIENCE * n units of work longer."""

from dataclasses import dataclass

from tokenmill.core.policy import Waiting
from tokenmill.core.work import PATIENCE
from tokenmill.plugins.groups import Plugin


@dataclass(frozen=True, slots=True)
class ShortAnswersFirst:
    summary: str = "fewest tokens to draw, with aging"
    num_refreshed: int = 0
    patience: int = 0

    def due(self, waiting: Waiting) -> float:
        return waiting.arrived + PATIENCE * waiting.request.max_tokens


plugin = Plugin(interface=1, provides=ShortAnswersFirst)
