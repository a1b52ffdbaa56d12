"""What came of drafts on an engine, and simulated drafters that draft so again.

A record has, of each answer, what each step drew, what was proposed to follow, by which drafter, how likely each token
of it was said to be right, and how many were. It is made of an engine's story (`engine.journal`) and holds no token of
a prompt or an answer. A simulated sequence goes over the steps of an answer that its seed chooses, and over the next
one where it is longer. Where other numbers of drafts are verified than were then, it comes to positions at which
nothing was proposed: what was proposed last goes on there, as far as it was right. Beside the answers stands what a
step was late that was planned when the one before had been committed, as steps are where drafts are worth it.

Rates are for what nobody has recorded: each draft is right with a chance that is given, whatever came of others.

How many drafts are verified is not decided here, but by `engine.speculation`, as live.

In a file a record is lines of JSON: a header, then an answer in each, as a list of its steps:

    [num_drawn]                                        nothing was proposed
    [num_drawn, source, num_right, [chance, ...]]
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple, Protocol

from ..core.effects import StepFailed
from ..core.errors import ConfigError
from ..core.speculation import MOST_SPECULATIVE_TOKENS, SpeculationConfig
from ..core.step import Drafts, Introduction, RowResult, StepPlan, StepResult
from ..engine.journal import Committed, Entry, Handled, Planned
from .fields import Fields

FORMAT = "tokenmill acceptance"
VERSION = 1
SYNTHETIC = "synthetic"
"""The drafter whose drafts are right by given rates."""
_DIGITS = 4
"""Of a chance, in a file."""


class Proposed(NamedTuple):
    """Drafts without their tokens. chances: of each, how likely it is said to be right where all before it are;
    num_right: the first so many are."""

    source: str
    chances: tuple[float, ...]
    num_right: int


class Acceptance(Protocol):
    """wait_s: seconds between two steps of which the second waited for what the first drew, beside their own."""

    wait_s: float

    def proposed(self, seed: int, position: int) -> Proposed | None:
        """What follows the first `position` tokens of the answer to the request with this seed: the same each time."""
        ...


class RecordedStep(NamedTuple):
    """It drew so many tokens; what was proposed to follow them."""

    num_drawn: int
    proposed: Proposed | None = None


Answer = tuple[RecordedStep, ...]


class Record(NamedTuple):
    """answers: of at least one step each; wait_s: as in Acceptance, the median."""

    answers: Sequence[Answer]
    wait_s: float = 0.0


class Recorded:
    """Acceptance by a record of at least one answer."""

    def __init__(self, record: Record) -> None:
        answers, self.wait_s = record
        self._steps = [step for answer in answers for step in answer]
        self._ends = list(accumulate(step.num_drawn for step in self._steps))
        lengths = [sum(step.num_drawn for step in answer) for answer in answers]
        self._begins = [0, *accumulate(lengths[:-1])]

    def proposed(self, seed: int, position: int) -> Proposed | None:
        at = random.Random(seed).choice(self._begins) + position
        at = (at - 1) % self._ends[-1] + 1  # the first answer comes after the last
        index = bisect_right(self._ends, at) - 1
        last, num_since = (self._steps[index].proposed, at - self._ends[index]) if index >= 0 else (None, 0)
        if last is None or num_since > last.num_right or num_since >= len(last.chances):
            return None
        return Proposed(last.source, last.chances[num_since:], last.num_right - num_since)


class Rates:
    """Acceptance by chance: of each draft, where all before it are right. They are said, too."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.wait_s = 0.0
        self._rates = tuple(rates)

    def proposed(self, seed: int, position: int) -> Proposed | None:
        draw, rates = random.Random(seed << 32 | position).random, self._rates
        num_right = next((number for number, rate in enumerate(rates) if draw() >= rate), len(rates))
        return Proposed(SYNTHETIC, rates, num_right)


# ---- made of an engine's story ----


@dataclass(slots=True)
class _Open:
    """A sequence under way. first_step: that introduced it; before: outputs that it had by then. is_over: it has drawn
    one of end_ids."""

    first_step: int
    end_ids: frozenset[int]
    before: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, Drafts | None]] = field(default_factory=list)
    is_over: bool = False

    def add(self, result: RowResult) -> None:
        drawn = list(result.tokens)
        ends = [place for place, token in enumerate(drawn) if token in self.end_ids]
        if ends:
            self.is_over = True
            del drawn[ends[0] + 1 :]
        self.tokens += drawn
        self.steps.append((len(drawn), None if self.is_over else result.drafts))

    def answer(self) -> Answer:
        found, at = [], 0
        for num_drawn, drafts in self.steps:
            at += num_drawn
            proposed = None
            if drafts is not None and drafts.tokens:
                proposed = Proposed(drafts.source, drafts.chances, num_equal(drafts.tokens, self.tokens[at:]))
            found.append(RecordedStep(num_drawn, proposed))
        return tuple(found)


def num_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Leading ones."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((at for at, (token, other) in pairs if token != other), min(len(tokens), len(others)))


class AcceptanceRecorder:
    """journal.Recorder of the answers that an engine gives. A sequence that begins again after a preemption counts as
    another answer; draws of steps that failed count as none."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._waits: list[float] = []
        self._open: dict[int, _Open] = {}
        self._in_flight: deque[bool] = deque()  # of each step, whether it waited
        self._committed_s = 0.0

    def __call__(self, entry: Entry) -> None:
        match entry:
            case Planned(plan=StepPlan() as plan):
                self._plan(plan)
            case Committed(result, now):
                self._commit(result, now)
            case Handled(StepFailed()):
                self._in_flight.popleft()

    def end(self) -> Record:
        """All that was heard, the answers under way as far as they have come. Another engine's story may follow."""
        for number in list(self._open):
            self._close(number)
        self._in_flight.clear()
        return Record(self._answers, median(self._waits) if self._waits else 0.0)

    def _commit(self, result: StepResult, now: float) -> None:
        if self._in_flight.popleft():
            self._waits.append(max(0.0, now - self._committed_s - result.duration_s))
        self._committed_s = now
        for row in result.rows:
            one = self._open.get(row.seq)
            if one is not None and row.tokens and not one.is_over and result.step >= one.first_step:
                one.add(row)

    def _plan(self, plan: StepPlan) -> None:
        # Whoever runs on without a step in flight was waiting for the one before.
        self._in_flight.append(not self._in_flight and all(row.intro is None for row in plan.rows))
        for number in plan.released:
            self._close(number)
        for row in plan.rows:
            if row.intro is not None:
                self._begin(plan.step, row.seq, row.intro)

    def _begin(self, step: int, number: int, intro: Introduction) -> None:
        known = self._open.get(number)
        if known is not None and (*known.before, *known.tokens) != intro.output_tokens:
            del self._open[number]  # a step has failed, and what it drew came to nothing
        self._close(number)
        end_ids = frozenset(intro.eos_token_ids + intro.sampling.stop_token_ids)
        self._open[number] = _Open(step, end_ids, intro.output_tokens)

    def _close(self, number: int) -> None:
        known = self._open.pop(number, None)
        if known is not None and known.steps:
            self._answers.append(known.answer())


# ---- in a file ----


def lines_of(record: Record) -> Iterator[str]:
    """Of a record's file, each with its end."""
    yield json.dumps({"format": FORMAT, "version": VERSION, "wait_s": record.wait_s}) + "\n"
    for answer in record.answers:
        steps: list[list[Any]] = []
        for num_drawn, proposed in answer:
            steps.append([num_drawn])
            if proposed is not None:
                source, chances, num_right = proposed
                steps[-1] += [source, num_right, [round(chance, _DIGITS) for chance in chances]]
        yield json.dumps(steps, separators=(",", ":")) + "\n"


def read_record(lines: Iterable[str], name: str) -> Record:
    """name: of the file. Raises ConfigError, which names the line."""
    lines = iter(lines)
    header = _parsed(next(lines, ""))
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        told = "write one by tokenmill draft acceptance."
        raise ConfigError(f"{name} is no record of acceptance: {told}", param="acceptance")
    if header.get("version") != VERSION:
        told = f"{name} has version {header.get('version')}; this build reads {VERSION}: record again."
        raise ConfigError(told, param="acceptance")
    try:
        wait_s = Fields(header).number("wait_s")
    except ConfigError as error:
        raise ConfigError(f"{name}, line 1: {error.message}", param="acceptance") from None
    answers = []
    for number, line in enumerate(lines, 2):
        answer = _answer(_parsed(line))
        if answer is None:
            raise ConfigError(f"{name}, line {number}, is no answer of a record of acceptance.", param="acceptance")
        answers.append(answer)
    if not answers:
        raise ConfigError(f"{name} has no answers: record while requests are served.", param="acceptance")
    return Record(answers, wait_s)


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _answer(plain: Any) -> Answer | None:
    """None where it is none."""
    if not isinstance(plain, list) or not plain:
        return None
    steps = []
    for each in plain:
        if not isinstance(each, list) or len(each) not in (1, 4) or not _is_count(each[0], 1):
            return None
        if len(each) == 1:
            steps.append(RecordedStep(each[0]))
            continue
        num_drawn, source, num_right, chances = each
        is_fine = isinstance(source, str) and isinstance(chances, list) and all(map(_is_chance, chances))
        if not is_fine or not _is_count(num_right, 0) or num_right > len(chances):
            return None
        steps.append(RecordedStep(num_drawn, Proposed(source, tuple(chances), num_right)))
    return tuple(steps)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_chance(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


# ---- in a cluster's file ----


def no_acceptance(path: str) -> Acceptance:
    raise ConfigError("records of acceptance cannot be read here; give rates")


def read_drafts(
    fields: Fields, named: Callable[[str], Acceptance]
) -> tuple[SpeculationConfig | None, Acceptance | None]:
    """From `[engine.speculative_config]`; named: the record in such a file. None where no token is to be drafted.
    Raises ConfigError, which names the field."""
    given = fields.plain.get("acceptance")
    acceptance: Acceptance
    if isinstance(given, str):
        try:
            acceptance = named(fields.text("acceptance"))
        except ConfigError as error:
            raise fields.error("acceptance", error.message) from None
    else:
        rates: list[Any] = given if isinstance(given, list) else [given] * MOST_SPECULATIVE_TOKENS
        if not rates or not all(map(_is_chance, rates)):
            what = "a record's file, a rate from 0 to 1 or a list of such, one for each draft, is needed"
            raise fields.error("acceptance", f"{what}, not {given!r}")
        acceptance = Rates(rates)
    fields.has("acceptance")
    acceptance.wait_s = fields.number("wait_s", acceptance.wait_s)
    usual = SpeculationConfig()
    most = fields.count("num_speculative_tokens", usual.num_speculative_tokens, most=MOST_SPECULATIVE_TOKENS)
    n_min, p_min = fields.count("n_min", 0, most=MOST_SPECULATIVE_TOKENS), fields.number("p_min", 0.0, most=1.0)
    adaptive = fields.flag("adaptive", True)
    fields.end()
    if not most:
        return None, None
    try:
        config = SpeculationConfig(num_speculative_tokens=most, n_min=n_min, p_min=p_min, adaptive=adaptive)
    except ConfigError as error:
        raise fields.error("n_min", error.message) from None
    return config, acceptance
