"""Who hears of what an EngineClient does: meters, traces, logs. Each call is made in the event loop, within the time
that a step's tokens take to their clients, and must return in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..cluster.events import Ended
from ..core.events import Output, StepOutputs
from ..core.request import Request


class Watcher(Protocol):
    def opened(self, requests: Sequence[Request], client: str) -> None:
        """A call has been let in."""
        ...

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        """These outputs go to their clients as soon as this returns: those of a step, or None: of another event."""
        ...

    def ended(self, ended: Ended) -> None:
        """A request is over."""
        ...
