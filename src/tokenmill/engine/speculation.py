"""How many drafts the next step verifies: as many as make the most tokens a second, which may be none.

A step that verifies drafts takes longer than one that verifies none, and the next is planned only when it has been
committed, since nobody knows before how many tokens its rows draw. It gives a token for each row and, of a sequence's
drafts, those before the first that is wrong. So, where p is the chance that a draft and all before it are right,

    tokens / second = (rows + sum of p over the drafts verified) / seconds of the step

Drafts are taken in order of p, over all sequences, as far as that grows. What this needs is measured:

    chances   A drafter says how likely each of its tokens is if those before it are right. What came of that is counted
              for each sequence and drafter, and for each drafter over all: how many were right, against what it said.
              Old counts fade. Drafts need not be verified to be judged: the tokens that are drawn later say as much. So
              it costs nothing to know that a drafter whose drafts nobody wants has become better.
    seconds   From one commit to the next, as a multiple of what a step without drafts takes, for so many rows and
              drafts; between and beyond the numbers that were measured it is assumed to lie on straight lines. So what
              is lost by waiting for the commit is in it, as is what the head and the draw of a drafted token cost.
              The step without drafts is measured first: of the first steps of an engine, a prediction may be far off.
              Beyond what was measured lately, more drafts are tried little by little, if they are likely to be right.
              A step with drafts that took clearly less than is expected of one without says that this takes less: else
              what is expected to take too long would be drafted for ever. What was measured seldom is forgotten soon,
              so that one step that was held up by something else keeps no drafts away for long.

Where the costs of steps are unknown, nothing is drafted. Nor is anything in a step that computes prompts: computing is
what bounds it, and drafts are more of it. Pure: time comes with commits.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import chain
from math import prod
from typing import NamedTuple

from ..core.cost import Costs, Work
from ..core.speculation import MOST_DRAFTS, DraftStats, SpeculationConfig
from ..core.step import Drafts
from ..core.terms import Terms

_FADES_OF_ONE, _FADES_OF_ALL = 0.95, 0.995
"""Of what a draft says of its drafter, in one sequence and over all, after each later one."""
_PRIOR = 4.0
"""What all sequences say counts as so many drafts of a new one."""
_MOST_SURE = 0.99
_LEAST_LIKELY = 0.02
"""No draft that is less likely to be right is worth a row of a step."""
_NEW, _FIRST = 0.1, 0.5
"""Of a measured step, in what is known of such steps: the least, of one of many, and of the first one."""
_FAR = 1.5
"""A step that took so many times what was expected, or the inverse, counts as that."""
_TOO_SHORT = 0.9
"""Times what a step without drafts is expected to take: one with drafts that takes less shows that this is wrong."""
_SOON, _FORGOTTEN = 32, 512
"""Steps after which what was measured once counts no more, and what was measured often. Twice as many each time."""
_HOPE = 0.5
"""What further drafts are assumed to cost, of what the first ones do."""
_LATELY = 1 / 8
_WORTH = 1.03
"""Times as many tokens a second, lately, for which steps wait for each other."""


class Proposal(NamedTuple):
    """Drafts for the next row of a sequence. sure: how likely it is that all that is being drawn before them is what
    they are to follow."""

    drafts: Drafts
    sure: float


class Candidate(NamedTuple):
    """A row whose sequence has drafts. room: most that may be verified. end: position behind the row's own tokens."""

    number: int
    proposal: Proposal
    room: int
    end: int
    terms: Terms


class _Record:
    """What a drafter said, what was right, and of how many tokens, all faded."""

    __slots__ = ("judged", "right", "said")

    def __init__(self) -> None:
        self.judged = self.right = self.said = 0.0

    def note(self, chance: float, is_right: bool, kept: float) -> None:
        self.right = kept * self.right + is_right
        self.said = kept * self.said + chance
        self.judged = kept * self.judged + 1


class _Point(NamedTuple):
    """What steps with so many drafts take, as a multiple of one without, from num_steps measured ones, until
    last_step."""

    num_drafts: int
    multiple: float
    num_steps: int
    last_step: int


class _Curve:
    """What steps with the same number of rows take by their number of drafts, as a multiple of what one without takes.

    It goes in straight lines through what was measured lately: a point for each power of two of drafts."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}  # by bit length of the number of drafts
        self._lives: dict[int, int] = {}

    def multiples(self, most: int, first: float, step: int) -> list[float]:
        """For 0 to `most` drafts, or as many as may be tried. first: what the first draft adds where none was
        measured."""
        for size in [size for size, known in self._points.items() if step > known.last_step]:
            del self._points[size]
        found, last, slope = [1.0], 0, first
        for _, (num_drafts, multiple, _, _) in sorted(self._points.items()):
            slope = (multiple - found[-1]) / (num_drafts - last)
            found += [found[-1] + slope * more for more in range(1, num_drafts - last + 1)]
            slope, last = (multiple - 1) / num_drafts, num_drafts
        slope = max(0.0, _HOPE * slope)
        found += [found[-1] + slope * more for more in range(1, last + 2)]
        return found[: most + 1]

    def note(self, num_drafts: int, multiple: float, first: float, step: int) -> None:
        """A step with so many took so long."""
        expected = self.multiples(num_drafts, first, step)[-1]
        multiple = min(max(multiple, expected / _FAR), expected * _FAR)
        size = num_drafts.bit_length()
        life = self._lives[size] = min(2 * self._lives.get(size, _SOON // 2), _FORGOTTEN)
        known = self._points.get(size) or _Point(num_drafts, expected, 0, 0)
        share = max(_NEW, 1 / (1 / _FIRST + known.num_steps))
        moved = known.multiple + share * (multiple - expected)
        self._points[size] = _Point(known.num_drafts, moved, known.num_steps + 1, step + life)


def _best(chances: Many[float], multiples: Many[float], num_rows: float) -> tuple[int, float]:
    """How many drafts give the most tokens a second, taken in this order, and how many times as many as none."""
    num_tokens, num_best, gain = num_rows, 0, 1.0
    for num_drafts, (chance, multiple) in enumerate(zip(chances, multiples[1:], strict=False), 1):
        num_tokens += chance
        if num_tokens / num_rows / multiple > gain:
            num_best, gain = num_drafts, num_tokens / num_rows / multiple
    return num_best, gain


def _size(work: Work) -> int:
    return int(work.num_rows).bit_length()


def _plain(work: Work, num_drafts: int) -> Work:
    """The same rows, with so many drafts behind one whose context is as long as the mean."""
    ahead = num_drafts * work.num_context / max(1, work.num_rows)
    return Work(work.num_rows, work.num_rows + num_drafts, work.num_context + ahead, work.num_context)


def _first(work: Work, costs: Costs) -> float:
    """What one draft adds to a step with these rows, as a share of it, as predicted."""
    plain_s = costs.predict(_plain(work, 0))
    return costs.predict(_plain(work, 1)) / plain_s - 1 if plain_s > 0 else 0.0


class Speculation:
    """The drafts and drafters of one engine. proposed: by sequence number, for the next step alone: what may follow its
    known and pending tokens."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self.proposed: dict[int, Proposal] = {}
        self._latest: dict[int, Drafts] = {}  # by sequence, what follows its known tokens
        self._of_one: dict[int, dict[str, _Record]] = {}
        self._of_all: dict[str, _Record] = {}
        self._plain: dict[int, tuple[Work, float]] = {}  # seconds of a step without drafts, and which, by size of rows
        self._waits: dict[int, float] = {}  # of one that waited for another and had no drafts, as a multiple of it
        self._curves: dict[int, _Curve] = {}
        self._num_steps = 0
        self._gain = 1.0
        self._multiples: list[float] = [1.0]  # that were gone by last
        self._chosen: dict[str, int] = {}  # drafts of the latest step, by drafter

    @property
    def waits(self) -> bool:
        """Whether the next step is better planned when the one before it has been committed. Then it is known what its
        drafts follow; else what is drawn meanwhile must be right, too."""
        return self._gain > _WORTH or not self._config.adaptive

    @property
    def stats(self) -> DraftStats:
        sources = tuple(
            [
                (source, record.right / record.judged, self._chosen.get(source, 0))
                for source, record in self._of_all.items()
                if record.judged
            ]
        )
        places = range((len(self._multiples) - 1).bit_length())
        return DraftStats(self._gain, sources, tuple([self._multiples[1 << each] for each in places]))

    def note_tokens(self, number: int, tokens: Many[int], drafts: Drafts | None, num_pending: int) -> None:
        """A sequence has drawn `tokens`. drafts: what is proposed to follow, of which so many are being drawn."""
        self.proposed.pop(number, None)  # where no step was planned since, what it follows was not known yet
        before = self._latest.pop(number, None)
        if before is not None:
            self._judge(number, before, tokens)
        if drafts is not None and drafts.tokens:
            self._latest[number] = drafts
            if (left := drafts.after(num_pending)) is not None:
                trust = self._trust(number, drafts.source)
                sure = prod(min(_MOST_SURE, trust * said) for said in drafts.chances[:num_pending])
                self.proposed[number] = Proposal(left, sure)

    def forget(self, number: int) -> None:
        """A sequence has left, or has been preempted."""
        self.proposed.pop(number, None)
        self._latest.pop(number, None)
        self._of_one.pop(number, None)

    def note_step(self, work: Work, num_drafts: int, costs: Costs, seconds: float, *, has_waited: bool = False) -> None:
        """A step that computed no prompt took so long, from commit to commit. has_waited: it had no drafts, and was
        planned when the one before had ended."""
        self._num_steps += 1
        if seconds <= 0:
            return
        plain_s = self._plain_s(work, costs)
        if plain_s <= 0:
            if not (num_drafts or has_waited):
                self._plain[_size(work)] = work, seconds
            return
        multiple = seconds / plain_s
        if has_waited and multiple > _TOO_SHORT:
            known = self._waits.get(_size(work), 1.0)
            self._waits[_size(work)] = known + _NEW * (min(max(multiple, 1.0), _FAR) - known)
            return
        if num_drafts and multiple > _TOO_SHORT:
            self._curve(work).note(num_drafts, multiple, _first(work, costs), self._num_steps)
            return
        share = _FIRST if num_drafts or has_waited else _NEW
        self._plain[_size(work)] = work, plain_s * (1 + share * (min(max(multiple, 1 / _FAR), _FAR) - 1))

    def choose(self, candidates: Many[Candidate], work: Work, costs: Costs, most: int) -> list[int]:
        """Of each candidate's drafts, how many to verify in a step that does `work` beside them; at most so many
        together."""
        if self._config.adaptive:
            numbers = self._worth(candidates, work, costs, most)
        else:
            numbers = self._all(candidates, most)
        self._chosen.clear()
        for each, num in zip(candidates, numbers, strict=True):
            source = each.proposal.drafts.source
            self._chosen[source] = self._chosen.get(source, 0) + num
        return numbers

    def _worth(self, candidates: Many[Candidate], work: Work, costs: Costs, most: int) -> list[int]:
        """Of each candidate's drafts, as many as make the most tokens a second, all together."""
        chosen = [0] * len(candidates)
        if not candidates or not costs.is_known or work.num_tokens != work.num_rows:
            self._gain += _LATELY * (1 / self._waits.get(_size(work), 1.0) - self._gain)
            return chosen
        if _size(work) not in self._plain:
            self._gain = 1.0  # one without drafts is to be measured first, and is only if it does not wait for another
            return chosen
        each_chances = [self._chances(each) for each in candidates]
        sure = [each.proposal.sure for each in candidates]
        likely = sorted((-chance * sure[at], at) for at, each in enumerate(each_chances) for chance in each)
        self._multiples = self._curve(work).multiples(MOST_DRAFTS, _first(work, costs), self._num_steps)
        multiples = self._multiples[: most + 1]
        num_best, gain = _best([-chance for chance, _ in likely], multiples, work.num_rows)
        num_waiting = num_best
        if min(sure, default=1.0) < 1.0:  # what it would be without rows in flight
            num_waiting, gain = _best(sorted(chain(*each_chances), reverse=True), multiples, work.num_rows)
        if not num_waiting:
            gain = 1 / self._waits.get(_size(work), 1.0)
        self._gain += _LATELY * (gain - self._gain)
        for _, index in likely[:num_best]:
            chosen[index] += 1
        least = self._config.n_min
        return [
            0 if num < max(least, each.terms.draft_n_min) else num for num, each in zip(chosen, candidates, strict=True)
        ]

    def _all(self, candidates: Many[Candidate], most: int) -> list[int]:
        """Of each candidate's drafts, as many as there are and as limits leave room for."""
        chosen: list[int] = []
        for each in candidates:
            room = min(each.room, self._config.num_speculative_tokens, each.terms.draft_n_max, most - sum(chosen))
            chosen.append(max(0, min(room, len(each.proposal.drafts.tokens))))
        return chosen

    def _judge(self, number: int, drafts: Drafts, tokens: Many[int]) -> None:
        """Against what was drawn in their places."""
        one = self._of_one.setdefault(number, {}).setdefault(drafts.source, _Record())
        every = self._of_all.setdefault(drafts.source, _Record())
        for token, draft, chance in zip(tokens, drafts.tokens, drafts.chances, strict=False):
            one.note(chance, token == draft, _FADES_OF_ONE)
            every.note(chance, token == draft, _FADES_OF_ALL)
            if token != draft:
                break

    def _chances(self, candidate: Candidate) -> list[float]:
        """Of each draft that may be verified, how likely it and all before it are right, if what they follow is."""
        drafts, terms = candidate.proposal.drafts, candidate.terms
        room = min(candidate.room, self._config.num_speculative_tokens, terms.draft_n_max)
        least = max(self._config.p_min, terms.draft_p_min)
        trust, chances, together = self._trust(candidate.number, drafts.source), list[float](), 1.0
        for said in drafts.chances[: max(0, room)]:
            chance = min(_MOST_SURE, trust * said)
            together *= chance
            if chance < least or together < _LEAST_LIKELY:
                break
            chances.append(together)
        return chances

    def _trust(self, number: int, source: str) -> float:
        """How many times as often as it says the drafter is right."""
        every, one = self._of_all.get(source), self._of_one.get(number, {}).get(source)
        usual = 1.0 if every is None else (every.right + 1) / (every.said + 1)
        return usual if one is None else (one.right + _PRIOR * usual) / (one.said + _PRIOR)

    def _plain_s(self, work: Work, costs: Costs) -> float:
        """Seconds of a step with these rows and no drafts: as was measured of so many rows, or nearly, as far as it is
        not predicted to be another for this work. 0 where none was measured."""
        if (known := self._plain.get(_size(work))) is None:
            return 0.0
        before, seconds = known
        before_s = costs.predict(_plain(before, 0))
        return seconds * costs.predict(_plain(work, 0)) / before_s if before_s > 0 else 0.0

    def _curve(self, work: Work) -> _Curve:
        return self._curves.setdefault(_size(work), _Curve())
