"""An engine as the gateway knows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.events import EngineStats, Ready
from .entry import Entry


@dataclass(slots=True, eq=False)
class EngineLink:
    """An engine that serves.

    number      of this life of it
    pool        in which it serves
    entries     requests that it has, by id
    num_tokens  of these requests, as they were given to it
    stats       its state after its last step
    is_leaving  it gets no more
    """

    number: int
    ready: Ready
    pool: str
    stats: EngineStats
    entries: dict[str, Entry] = field(default_factory=dict)
    num_tokens: int = 0
    is_leaving: bool = False

    def give(self, entry: Entry) -> None:
        entry.link = self.number
        self.entries[entry.request.id] = entry
        self.num_tokens += len(entry.request.prompt_tokens) + entry.num_given

    def take_back(self, entry: Entry) -> None:
        del self.entries[entry.request.id]
        self.num_tokens -= len(entry.request.prompt_tokens) + entry.num_given
