"""An engine as the gateway knows it, whether two give equal answers to equal requests, and what is assumed of one that
has not told what its steps take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ..core.cost import UNKNOWN, Costs
from ..core.events import EngineStats, Ready
from .entry import Entry
from .load import Load

_FACTS = (
    ("numerics_id", "It computes otherwise: weights, --quantization, --kv-cache-dtype or kernels differ"),
    ("draw_version", "It draws tokens in another way"),
    ("vocab_size", "Its vocabulary is another"),
    ("max_model_len", "Its --max-model-len is another"),
    ("pooling", "Its --pooling is another"),
)


def incompatibility(ready: Ready, other: Ready | None) -> str:
    """Why an engine would not give the answers of another; "": it would, or there is no other."""
    if other is not None:
        for name, text in _FACTS:
            mine, theirs = getattr(ready, name), getattr(other, name)
            if mine != theirs:
                return f"{text} ({name} {mine}, not {theirs})."
    return ""


def unasked(ready: Ready, asked: Iterable[tuple[str, str]]) -> str:
    """Why an engine would not give the answers that these settings ask for; "": it would."""
    settings = dict(ready.settings)
    for name, value in asked:
        if settings.get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            return f"Its {flag} is {settings.get(name, 'not told')}; the front end was given {value}."
    return ""


_MOST_KINDS = 256


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
    assumed     what its steps are taken to cost while it has not told
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
    assumed: Costs = UNKNOWN

    @property
    def name(self) -> str:
        """The same for each life of the engine, where it has a name."""
        return self.ready.worker.id or str(self.number)

    @property
    def costs(self) -> Costs:
        """What its steps take, as it has told, or as is assumed until it has."""
        return self.stats.costs if self.stats.costs.is_known else self.assumed

    @property
    def kind(self) -> Hashable:
        """Equal for engines of one pool that were set up alike, on machines that are alike."""
        ready = self.ready
        return self.pool, ready.facts, ready.max_num_seqs, ready.max_num_batched_tokens, ready.num_blocks

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

    def assume(self, costs: Costs) -> None:
        """Take these for its own until it has told."""
        self.assumed = costs
        self.load.note_costs()

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


class NewestCosts:
    """The newest costs of each kind of engine, which hold for those of the kind that have told none; where nobody of a
    kind has told, the newest of all.

    Only what is told with prompts counts: it is prompts that are placed by it, and of other steps a simulation may tell
    later than they are made."""

    def __init__(self) -> None:
        self._unmeasured: dict[int, EngineLink] = {}
        self._of: dict[Hashable, Costs] = {}
        self._newest = UNKNOWN

    def join(self, link: EngineLink) -> None:
        if link.stats.costs.is_known:
            self._take(link)
        else:
            self._unmeasured[link.number] = link
            link.assume(self._of.get(link.kind, self._newest))

    def leave(self, number: int) -> None:
        self._unmeasured.pop(number, None)

    def step(self, link: EngineLink, before: EngineStats) -> None:
        """It has told of a step, after this state."""
        stats = link.stats
        if stats.prompt_tokens_computed > before.prompt_tokens_computed and stats.costs.is_known:
            self._unmeasured.pop(link.number, None)
            self._take(link)

    def _take(self, link: EngineLink) -> None:
        costs, kind = link.stats.costs, link.kind
        if self._of.pop(kind, UNKNOWN) == costs == self._newest:
            self._of[kind] = costs
            return
        self._of[kind] = self._newest = costs
        if len(self._of) > _MOST_KINDS:
            del self._of[next(iter(self._of))]
        for each in self._unmeasured.values():
            each.assume(self._of.get(each.kind, costs))
