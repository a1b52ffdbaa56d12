"""A routing policy: a request goes where the fewest prompt tokens are still to be computed, since these delay its first
token; of equal workers to the one with the fewest requests."""

from collections.abc import Mapping

from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.routing import Route
from tokenmill.core.request import Request
from tokenmill.plugins.groups import Plugin


class FewestPromptTokens:
    uses_keys = False

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        best = min(links.values(), key=lambda link: (link.num_prompt, len(link.entries), link.number))
        return Route(best, "fewest prompt tokens")

    def leave(self, link: int) -> None:
        pass

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        pass


plugin = Plugin(interface=1, provides=FewestPromptTokens)
