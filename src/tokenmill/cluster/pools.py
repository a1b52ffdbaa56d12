"""Which engines serve in which pool, and by which of them a request is computed: by one, or the prompt by one and the
answer by another. Pure.

A pool is a name. Engines of the pool `prefill` compute prompts for those of the pool `decode`; those of any other pool
take everything, also a part where a pool has nobody (Splitwise's mixed pool, Patel et al., 2024). An engine itself
knows nothing of this.

Requests are placed on two levels (TetriInfer, Hu et al., 2024): prompts where they are computed soonest, answers where
there will be room for them and for what is predicted to be drawn there already.

    always  split whatever can be             never  split nothing
    cost    split where it costs less. Counted are seconds that this request takes, and those that others lose by it:
            a prompt holds up each row that draws beside it; an answer is held up by prompts that come later, as often
            as they came lately; a hand-over takes what it took lately. A target that is missed counts up to as much
            as the request takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..core.config import OwnPolicy
from ..core.cost import Costs, Work
from ..core.request import Request
from .entry import Entry
from .length_predictor import LengthPredictor
from .links import EngineLink
from .load import positions

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
DECISIONS = ("cost", "always", "never")

_ARRIVING = 0.25
"""Of the tokens that an engine has room for, those of requests whose prompts are still being computed elsewhere."""
_LATELY_S = 10.0
_HANDOFF_S = 0.01
"""What a hand-over is taken to cost before one was seen."""
_FULLEST = 0.9
_WEIGHT = 1 / 16

Router = Callable[[Request, Sequence[EngineLink], float], EngineLink]


def kind_of(pool: str) -> str:
    """PREFILL, DECODE or MIXED."""
    return pool if pool in (PREFILL, DECODE) else MIXED


class Choice(NamedTuple):
    """link: who gets it; is_split: only its prompt."""

    link: EngineLink
    is_split: bool = False


class Disaggregation(Protocol):
    """Whether a request is computed by two engines. A policy."""

    def splits(self, request: Request, at: Options, now: float) -> bool: ...


class Options(NamedTuple):
    """Between what is chosen.

    plain            who would compute it alone
    prefill, decode  who would compute its prompt, and its answer
    num_tokens       whose KV is needed before the first one is drawn
    hits             of these, those that engines are expected to have in their prefix caches, by number
    num_expected     tokens of the answer still to be drawn
    shares           of their time, what engines spent on prompts lately, by number
    handoff_s        what a hand-over takes
    """

    plain: EngineLink
    prefill: EngineLink
    decode: EngineLink
    num_tokens: int
    hits: Mapping[int, int]
    num_expected: int
    shares: Callable[[EngineLink, float], float]
    handoff_s: float


class Always:
    def splits(self, request: Request, at: Options, now: float) -> bool:
        return True


class Never:
    def splits(self, request: Request, at: Options, now: float) -> bool:
        return False


class LeastCost:
    """See the module's text. Splits nothing while nothing is known of what it costs."""

    def splits(self, request: Request, at: Options, now: float) -> bool:
        plain, prefill, decode = at.plain, at.prefill, at.decode
        if not (plain.costs.is_known and prefill.costs.is_known):
            return False
        drawn, num_tokens = at.num_expected - 1, at.num_tokens
        hit, other_hit = at.hits.get(plain.number, 0), at.hits.get(prefill.number, 0)
        first, other_first = first_s(plain, num_tokens, hit), first_s(prefill, num_tokens, other_hit)
        alone = _Way(first, draw_s(plain) / (1 - at.shares(plain, now)))
        split = _Way(other_first + at.handoff_s, draw_s(decode) / (1 - at.shares(decode, now)))
        alone_s = alone.cost_s(request, drawn) + harm_s(plain, num_tokens, drawn, hit)
        split_s = split.cost_s(request, drawn) + harm_s(prefill, num_tokens, 0, other_hit) + harm_s(decode, 0, drawn)
        return split_s <= alone_s


class _Way(NamedTuple):
    """What a request may expect: until its first token, and for each further one."""

    first_s: float
    each_s: float

    def cost_s(self, request: Request, num_drawn: int) -> float:
        """Seconds that it takes, and as many again for each of its targets, by how much that is missed, up to all."""
        terms, took_s = request.terms, self.first_s + num_drawn * self.each_s
        missed = 0.0
        for target_s, real_s in ((terms.ttft_s, self.first_s), (terms.tpot_s, self.each_s)):
            if target_s:
                missed += min(1.0, max(0.0, real_s / target_s - 1))
        return took_s * (1 + missed)


def decision_named(name: str) -> Disaggregation:
    """One of DECISIONS, or one's own."""
    made: dict[str, Disaggregation] = {"cost": LeastCost(), "always": Always(), "never": Never()}
    return name.make() if isinstance(name, OwnPolicy) else made[name]


def prompt_s(costs: Costs, num_tokens: int, chunk: int, num_hit: int = 0) -> float:
    """Seconds of steps for a prompt alone, of which so many leading tokens need not be computed."""
    num_new = num_tokens - num_hit
    num_steps = -(-num_new // max(1, chunk))
    num_context = max(0, num_steps - 1) * num_new / 2 + num_steps * num_hit
    work = Work(num_steps, num_new, positions(num_new, num_hit), num_context)
    return costs.predict(work) + (num_steps - 1) * costs.weights_s(chunk)


def first_s(link: EngineLink, num_tokens: int, num_hit: int = 0) -> float:
    """Until a request that comes now has its first token there, behind the prompts that are there and beside the rows
    that draw. `num_hit`: tokens of it that are in the prefix cache there."""
    costs, chunk = link.costs, link.ready.max_num_batched_tokens or num_tokens
    own_s = prompt_s(costs, num_tokens, chunk, num_hit)
    num_before = link.load.num_to_compute
    before_s = prompt_s(costs, num_before, chunk) if num_before else 0.0
    num_steps = -(-(num_before + num_tokens - num_hit) // chunk)
    rows_s = draw_s(link) - costs.weights_s(_num_drawn(link))
    return before_s + own_s + num_steps * max(0.0, rows_s)


def draw_s(link: EngineLink) -> float:
    """A step that draws one token for each of its requests and one more."""
    costs, num_rows, num_drawn = link.costs, _num_open(link), _num_drawn(link)
    context = link.num_tokens * min(1.0, num_drawn / num_rows)
    step_s = costs.predict(Work(num_drawn, num_drawn, context, context))
    return step_s * max(1.0, num_rows / num_drawn)


def _num_open(link: EngineLink) -> int:
    """Its requests, and one more."""
    return len(link.entries) + len(link.arriving) + 1


def _num_drawn(link: EngineLink) -> int:
    """Of these, those that a step has rows of."""
    return min(_num_open(link), link.ready.max_num_seqs or _num_open(link))


def harm_s(link: EngineLink, num_tokens: int, num_drawn: int, num_hit: int = 0) -> float:
    """Seconds that others there lose by a prompt of so many tokens, some of them cached, and an answer of so many."""
    costs, num_others = link.costs, link.num_drawing
    lost_s = num_drawn * (costs.row_s + costs.token_s)
    if num_tokens:
        lost_s += prompt_s(costs, num_tokens, link.ready.max_num_batched_tokens or num_tokens, num_hit)
    return num_others * lost_s


def predicted_load(link: EngineLink) -> float:
    """Tokens that its requests will have together, as a share of its room."""
    return (link.num_tokens + link.num_expected) / max(1, link.num_slots)


class Pools:
    """lengths   predicts answers
    decision  whether a request is split
    are_divided  whether an engine serves in another pool than MIXED
    """

    def __init__(self, lengths: LengthPredictor) -> None:
        self.lengths = lengths
        self.decision: Disaggregation = LeastCost()
        self.are_divided = False
        self._spent: dict[int, tuple[float, float]] = {}
        self._handoff_s = _HANDOFF_S

    def note_links(self, links: Iterable[EngineLink]) -> None:
        """These serve now."""
        self.are_divided = any([kind_of(link.pool) != MIXED for link in links])

    def choose(
        self,
        entry: Entry,
        links: Sequence[EngineLink],
        route: Router,
        can_send: Callable[[EngineLink], bool],
        hits: Callable[[Request], Mapping[int, int]],
        now: float,
    ) -> Choice:
        """Who of `links` gets a request that no engine has. `route` chooses among equals. `hits`: tokens of it that
        engines are expected to have in their prefix caches, by number."""
        request = entry.request
        if len(links) == 1:
            return Choice(links[0])
        if entry.guess is None:
            entry.guess = self.lengths.guess(request)
        names = {link.pool for link in links} if self.are_divided else ()
        if PREFILL not in names and DECODE not in names:
            return Choice(self._note(route(request, links, now), entry, {}, now))
        kinds = [kind_of(link.pool) for link in links]
        cached = hits(request)
        alone = [link for link, kind in zip(links, kinds, strict=True) if kind == MIXED] or list(links)
        plain = (
            self._cheapest(entry, links, cached, now)
            if isinstance(self.decision, LeastCost)
            else route(request, alone, now)
        )
        sources = _of_kind(links, kinds, PREFILL, can_send)
        if not sources or not _may_split(entry):
            return Choice(self._note(plain, entry, cached, now))
        prefill = route(request, sources, now)
        decode = self.find_decode(entry, links, prefill.number, must=True)
        if decode is None:
            return Choice(self._note(plain, entry, cached, now))
        num_left = self._expected(entry)
        at = Options(plain, prefill, decode, entry.num_tokens, cached, num_left, self._share, self._handoff_s)
        if self.decision.splits(request, at, now):
            return Choice(self._note(prefill, entry, cached, now), True)
        return Choice(self._note(plain, entry, cached, now))

    def find_decode(self, entry: Entry, links: Sequence[EngineLink], source: int, must: bool) -> EngineLink | None:
        """Who draws the answer of a request whose prompt the engine `source` computes: where the fewest tokens will be,
        of all that there will be when answers are as long as predicted. Unless it must, an engine gets nothing more
        while a part of its room waits for prompts."""
        kinds = [kind_of(link.pool) for link in links]
        targets = [link for link in _of_kind(links, kinds, DECODE, lambda link: True) if link.number != source]
        if not must:
            targets = [link for link in targets if _has_room(link, entry.num_tokens)]
        return min(targets, key=predicted_load, default=None)

    def note_handoff(self, pause_s: float) -> None:
        """One took so long."""
        self._handoff_s += _WEIGHT * (pause_s - self._handoff_s)

    def leave(self, link: int) -> None:
        self._spent.pop(link, None)

    def _expected(self, entry: Entry) -> int:
        num_drawn = len(entry.request.output_tokens) + len(entry.tokens)
        guess = entry.guess
        if guess is None or num_drawn >= guess.num_tokens:
            guess = self.lengths.guess(entry.request, num_drawn)
        return max(1, guess.num_tokens - num_drawn)

    def _cheapest(self, entry: Entry, links: Sequence[EngineLink], hits: Mapping[int, int], now: float) -> EngineLink:
        """Who computes it alone at the least cost; before costs are known, who has the fewest tokens."""
        num_left = self._expected(entry)

        def cost_s(link: EngineLink) -> tuple[float, int]:
            if not link.costs.is_known:
                return 0.0, link.num_tokens
            later_s = num_left * draw_s(link) / (1 - self._share(link, now))
            num_hit = hits.get(link.number, 0)
            own_s = first_s(link, entry.num_tokens, num_hit) + later_s
            return own_s + harm_s(link, entry.num_tokens, num_left, num_hit), link.num_tokens

        return min(links, key=cost_s)

    def _note(self, link: EngineLink, entry: Entry, hits: Mapping[int, int], now: float) -> EngineLink:
        """It is given a prompt."""
        costs = link.costs
        if costs.is_known:
            chunk = link.ready.max_num_batched_tokens or entry.num_tokens
            took_s = prompt_s(costs, entry.num_tokens, chunk, hits.get(link.number, 0))
            self._spent[link.number] = (self._spent_s(link.number, now) + took_s, now)
        return link

    def _spent_s(self, link: int, now: float) -> float:
        spent_s, at_s = self._spent.get(link, (0.0, now))
        return spent_s * max(0.0, 1 - (now - at_s) / _LATELY_S)

    def _share(self, link: EngineLink, now: float) -> float:
        """Of its time, what it spent on prompts lately."""
        return min(_FULLEST, self._spent_s(link.number, now) / _LATELY_S)


def can_copy(request: Request) -> bool:
    """Whether it may go on from KV that another engine computed."""
    return request.pooling is None and not request.handoff and request.sampling.prompt_logprobs is None


def _may_split(entry: Entry) -> bool:
    request = entry.request
    num_left = request.max_tokens - len(request.output_tokens) - len(entry.tokens)
    return can_copy(request) and not entry.num_splits and num_left > 1


def _of_kind(
    links: Sequence[EngineLink], kinds: Sequence[str], kind: str, is_able: Callable[[EngineLink], bool]
) -> list[EngineLink]:
    """Those of the pool, or where it has nobody, those that take everything."""
    able = [(link, each) for link, each in zip(links, kinds, strict=True) if is_able(link)]
    return [link for link, each in able if each == kind] or [link for link, each in able if each == MIXED]


def _has_room(link: EngineLink, num_tokens: int) -> bool:
    most = _ARRIVING * link.num_slots
    return not link.arriving or link.num_arriving + num_tokens <= most
