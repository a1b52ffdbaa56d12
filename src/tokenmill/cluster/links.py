"""An engine as the gateway knows it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..core.events import EngineStats, Ready
from .entry import Entry
from .load import Load


@dataclass(slots=True, eq=False)
class EngineLink:
    """An engine that serves.

    number      of this life of it
    pool        in which it serves
    entries     requests that it has, by id
    arriving    requests that another engine has and that are on their way to this one -> tokens they were sent with
    num_arriving  of these, together
    num_tokens  of both, as they were given to it
    num_expected  tokens that are predicted to be drawn for `entries`, from when they were given to it
    num_prompt  of num_tokens, those of requests that have got no token from it yet
    num_drawing  requests that have got tokens from it
    stats       its state after its last step
    is_leaving  it gets no more
    load        what it has to do
    adapters    of its requests, and how many name each
    """

    number: int
    ready: Ready
    pool: str
    stats: EngineStats
    entries: dict[str, Entry] = field(default_factory=dict)
    arriving: dict[str, int] = field(default_factory=dict)
    num_arriving: int = 0
    num_tokens: int = 0
    num_expected: int = 0
    num_prompt: int = 0
    num_drawing: int = 0
    is_leaving: bool = False
    load: Load = field(default_factory=Load)
    adapters: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The same for each life of the engine, where it has a name."""
        return self.ready.worker.id or str(self.number)

    @property
    def num_slots(self) -> int:
        """Tokens that its KV blocks have room for."""
        return self.ready.num_blocks * self.ready.block_size

    def give(self, entry: Entry, num_hit: int = 0) -> None:
        """`num_hit`: tokens of it that the engine is expected to have KV of."""
        entry.link, entry.num_hit = self.number, num_hit
        self.entries[entry.request.id] = entry
        num_tokens = entry.num_given_tokens
        self.num_tokens += num_tokens
        self.num_prompt += num_tokens
        entry.num_reserved = 0 if entry.guess is None else max(0, entry.guess.num_tokens - entry.num_given)
        self.num_expected += entry.num_reserved
        self.load.give(num_tokens, num_hit)
        if entry.request.adapter:
            self.adapters[entry.request.adapter] += 1

    def start(self, entry: Entry, num_cached: int = 0) -> None:
        """It is giving the first tokens that it gives of the request; so many of its tokens were cached."""
        self.num_drawing += 1
        self.num_prompt -= entry.num_given_tokens
        self.load.start(entry.num_given_tokens, entry.num_hit, num_cached)

    def take_back(self, entry: Entry) -> None:
        del self.entries[entry.request.id]
        num_tokens = entry.num_given_tokens
        self.num_tokens -= num_tokens
        self.num_expected -= entry.num_reserved
        if entry.has_progressed:
            self.num_drawing -= 1
        else:
            self.num_prompt -= num_tokens
        self.load.end(num_tokens, entry.num_hit, len(entry.tokens) - entry.num_given)
        if entry.request.adapter:
            self.adapters[entry.request.adapter] -= 1
            if not self.adapters[entry.request.adapter]:
                del self.adapters[entry.request.adapter]

    def step(self, stats: EngineStats) -> None:
        self.stats = stats
        self.load.step(stats.prompt_tokens_computed)

    def expect(self, entry: Entry) -> None:
        """It is to have the request later."""
        self.arriving[entry.request.id] = entry.num_tokens
        self.num_arriving += entry.num_tokens
        self.num_tokens += entry.num_tokens

    def forget(self, request_id: str) -> None:
        """The request has come, or will not."""
        num_tokens = self.arriving.pop(request_id)
        self.num_arriving -= num_tokens
        self.num_tokens -= num_tokens

    def check(self) -> None:
        """Assert what must hold between events; slow, for tests."""
        entries = self.entries.values()
        assert all(entry.link == self.number for entry in entries), self
        num_given = sum(entry.num_given_tokens for entry in entries)
        assert self.num_arriving == sum(self.arriving.values()), self
        assert self.num_tokens == num_given + self.num_arriving, self
        assert self.num_drawing == sum(entry.has_progressed for entry in entries), self
        assert self.num_prompt == sum(each.num_given_tokens for each in entries if not each.has_progressed), self
        assert self.num_expected == sum(entry.num_reserved for entry in entries), self
        waiting = [entry for entry in entries if not entry.has_progressed]
        assert self.load.num_waiting == len(waiting) and self.load.num_drawing == self.num_drawing, self
        assert self.load.num_to_compute == sum(each.num_given_tokens - each.num_hit for each in waiting), self
