"""Which engine gets a request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.request import Request
from .links import EngineLink


class LeastLoad:
    """The one with the fewest tokens open; of equal ones, who joined first."""

    def choose(self, request: Request, links: Sequence[EngineLink], now: float) -> EngineLink:
        return min(links, key=lambda link: link.num_tokens)
