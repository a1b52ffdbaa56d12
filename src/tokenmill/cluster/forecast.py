"""How long a new call will wait, when its first token would come, and how long each further one would take. Pure.

What counts is the load at the time it would run, not the present one (Mooncake, Qin et al., FAST'25): prompts before
its own are computed first, in chunks beside the rows that draw; meanwhile some of these end, and the prompts become
rows that draw. So its time is a walk over the steps to come, several alike at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.cost import UNKNOWN, Costs, Work
from ..core.errors import MAX_RETRY_S
from ..core.events import FINISH_LENGTH, EngineStats
from ..core.policy import Forecast
from ..core.slo import paced_s
from ..core.work import step_work
from .events import Pace

# Predicts how long a new call will wait, from measured rates of service.
#
#     Rates           the cost of steps and how answers ended, from the engine's own messages
#     Load            what a new call finds, beside the walk of `forecast`
#     predicted_wait  seconds until it is computed
#     RetryAfter      when refused calls are told to come back
#
# A call waits for two things: that the prompt tokens before its own are computed, and that a row becomes free. Answers
# are assumed to end with a constant hazard, or at their limit. The time for which a row is held therefore follows from
# how many tokens were drawn for each answer that ended early, whatever the running answers have drawn so far.


_WEIGHT = 1 / 16
_ROUNDS = 6
_KEPT = 0.98
_HELD_UP = 4
"""After so many steps with room for prompts of which some wait, they wait for blocks: none came just now."""
_MEASURED = 3
"""So many steps of a size say what it costs."""
_SCARCE = 0.5
"""Of an engine's KV: while less is held, what waits there does not wait for blocks."""

_FIRST_ENDS, _FIRST_TOKENS = 1.0, 512.0


class Rates:
    """Measured service of all engines together.

    costs     of steps
    room      tokens of prompts that a step takes where more of them wait
    step_s    seconds of a step of one engine, lately
    work_s    seconds of a unit of work (core.work.step_work), lately
    share_computed  of prompt tokens, those that were not cached
    num_rows  rows that the engines have room for: what is configured, or less where blocks run out first
    """

    def __init__(self, num_rows: int, step_tokens: int) -> None:
        self.resize(num_rows, step_tokens)
        self._stats = EngineStats()
        self._ends = _FIRST_ENDS
        self._tokens = _FIRST_TOKENS
        self._num_held_up: dict[int, int] = {}
        self._num_made: dict[int, int] = {}  # steps so far, by the bit length of their tokens
        self.costs = UNKNOWN
        self.room = float(step_tokens)
        self.step_s = 0.0
        self._work_s = 0.0
        self.share_computed = 1.0

    def resize(self, num_rows: int, step_tokens: int, num_engines: int = 1) -> None:
        """Engines have come or gone; what was measured of one holds for all."""
        self._most_rows = self.num_rows = num_rows
        self._step_tokens = step_tokens
        self._num_engines = num_engines
        self.room = float(step_tokens)

    @property
    def token_s(self) -> float:
        """Seconds that a prompt token takes in a step that is full of them; 0: not known yet."""
        num = max(1, self._step_tokens)
        return self.costs.predict(Work(1, num, num * (num - 1) // 2)) / num / self._num_engines

    @property
    def work_s(self) -> float:
        return self._work_s / self._num_engines

    def is_measured(self, num_tokens: float) -> bool:
        """Whether steps of a quarter of so many tokens, or more, were made often enough to say what these cost: the
        first ones of a process take longer, and of sizes that nobody has seen costs are assumed."""
        least = int(num_tokens).bit_length() - 2
        return sum(num for size, num in self._num_made.items() if size >= least) >= _MEASURED

    def note_step(self, stats: EngineStats, link: int = 0, own: EngineStats | None = None) -> None:
        """The state of all engines after one more step of one. link: which; own: its own, if there are others: steps
        that draw in one say nothing of prompts that wait for another, and what waits there for KV to arrive is not
        held up by blocks while half of them are free."""
        before, self._stats = self._stats, stats
        if stats.num_steps == before.num_steps:
            return
        self.pace(((0.0, link, stats.last_step_s, stats.last_step_tokens),))
        is_full = 2 * stats.last_step_tokens >= self._step_tokens
        if stats.num_prompt_left and stats.num_steps == before.num_steps + 1:
            num_new = stats.last_step_tokens - (stats.generation_tokens - before.generation_tokens)
            if num_new > 0:
                self.room = moved(self.room, num_new)
        self._note_rows(stats, link, own, is_full)

    def note_repeated(self, stats: EngineStats, link: int, own: EngineStats) -> None:
        """As note_step of several steps of rows that draw alone; `pace` gets how long they took."""
        self._stats = stats
        self._note_rows(stats, link, own, is_full=False)

    def pace(self, paces: Iterable[Pace]) -> None:
        """Of steps that have ended, one after the other."""
        mean_s, work_s, of_step = self.step_s, self._work_s, step_work(0, self._step_tokens)
        for _, _, step_s, num_tokens in paces:
            size = num_tokens.bit_length()
            self._num_made[size] = self._num_made.get(size, 0) + 1
            unit_s = step_s / ((num_tokens + of_step) or 1)
            mean_s = mean_s + _WEIGHT * (step_s - mean_s) if mean_s else step_s
            work_s = work_s + _WEIGHT * (unit_s - work_s) if work_s else unit_s
        self.step_s, self._work_s = mean_s, work_s

    def _note_rows(self, stats: EngineStats, link: int, own: EngineStats | None, is_full: bool) -> None:
        self.costs = stats.costs
        waits = bool(stats.num_waiting)
        if own is not None and self._num_engines > 1:
            waits = own.num_waiting > 0 and own.kv_usage >= _SCARCE
        num_held_up = self._num_held_up[link] = self._num_held_up.get(link, 0) + 1 if waits and not is_full else 0
        if not stats.num_waiting:
            self.num_rows = self._most_rows
        elif num_held_up >= _HELD_UP:
            self.num_rows = max(1, min(self._most_rows, stats.num_running))
        else:
            self.num_rows = max(self.num_rows, stats.num_running)

    def note_start(self, num_prompt: int, num_cached: int) -> None:
        """A prompt has been computed, but for what was cached."""
        self.share_computed += _WEIGHT * (1 - num_cached / num_prompt - self.share_computed)

    def note_end(self, num_tokens: int, reason: str) -> None:
        """An answer of so many tokens has ended."""
        self._ends = _KEPT * self._ends + (reason != FINISH_LENGTH)
        self._tokens = _KEPT * self._tokens + num_tokens

    def hold_s(self, max_tokens: float) -> float:
        """Seconds for which a row draws up to so many tokens."""
        hazard = self._hazard
        num_tokens = (1 - (1 - hazard) ** max_tokens) / hazard if hazard > 1e-6 else max_tokens
        return num_tokens * self.step_s

    @property
    def hazard(self) -> float:
        """How likely an answer ends before its limit, in a second."""
        return self._hazard / self.step_s if self.step_s else 0.0

    @property
    def _hazard(self) -> float:
        return min(1.0, self._ends / max(1.0, self._tokens))


def moved(mean: float, value: float) -> float:
    """A mean over the last values, after one more."""
    return mean + _WEIGHT * (value - mean) if mean else value


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a newcomer may have one of.

    num_rows   in all
    num_ahead  those that get one before it
    limits_s   seconds until each row that draws comes free at the latest
    hazard     how likely one comes free before, in a second
    hold_s     how long one is held by who gets it next
    """

    num_rows: int
    num_ahead: int
    limits_s: Sequence[float] = ()
    hazard: float = 0.0
    hold_s: float = 0.0

    @property
    def wait_s(self) -> float:
        num_missing = self.num_ahead + 1 - (self.num_rows - len(self.limits_s))
        if num_missing <= 0:
            return 0.0
        turns, place = divmod(num_missing - 1, max(1, self.num_rows))
        return turns * self.hold_s + self._end_s(place + 0.5)

    def _end_s(self, number: float) -> float:
        """When so many are expected to have come free."""
        taken_next = [self.hold_s] * (self.num_rows - len(self.limits_s))
        limits = sorted([*self.limits_s, *taken_next])
        low, high = 0.0, limits[-1]
        for _ in range(20):
            middle = (low + high) / 2
            num_at_limit = bisect_right(limits, middle)
            num_before = (len(limits) - num_at_limit) * -math.expm1(-self.hazard * middle)
            low, high = (low, middle) if num_at_limit + num_before >= number else (middle, high)
        return high


@dataclass(frozen=True, slots=True)
class Load:
    """What a newcomer finds.

    prompts_s   until the prompts before its own are computed
    rows        each must have one for it: those of all, and those that its client may have
    passing     calls like those that came lately, which would pass it: (for how many seconds from now such calls will,
                the share of the engine's time that they take)
    """

    prompts_s: float
    rows: tuple[Rows, ...]
    passing: Sequence[tuple[float, float]] = ()


def predicted_wait(load: Load) -> float:
    """Seconds until the first step that has a row of the newcomer."""
    present_s = wait_s = max(load.prompts_s, *(rows.wait_s for rows in load.rows), 0.0)
    if present_s:
        for _ in range(_ROUNDS):
            wait_s = present_s + sum(min(wait_s, until_s) * share for until_s, share in load.passing)
    return wait_s


_KEPT_S = 120.0
_SHARE = 0.4
_FEW, _MANY = 8, 128
_APART_S = 10.0


class RetryAfter:
    """Those who are refused are told to come back one after another, as there will be room, and not all at once.

    They are given `_SHARE` of it, since new calls come as well. How much room there is, is known from how many calls
    were let in while others were refused. Not all will return: of those told `_KEPT_S` ago a third is still counted on,
    and none whose time has come while nobody was refused. Beyond what clients accept to be told, they are spread over
    the last half of it.
    """

    def __init__(self) -> None:
        self._pending_s = 0.0
        self._told_s = -_APART_S
        self._since_s = 0.0
        self._num_entered = 0.0

    def enter(self, num_choices: int) -> None:
        """A call is let in."""
        self._num_entered += num_choices

    def tell(self, now: float, excess_s: float, num_choices: int, choice_s: float) -> float:
        """Seconds after which a call that would wait `excess_s` too long is to come back. choice_s: that each choice
        takes, before it is known how many are served."""
        if now - self._told_s >= _APART_S:
            self._since_s, self._num_entered = now, 0.0
            self._pending_s = max(0.0, self._pending_s - (now - self._told_s))
        elif self._num_entered >= _MANY:
            self._since_s, self._num_entered = (self._since_s + now) / 2, self._num_entered / 2
        if self._num_entered >= _FEW:
            choice_s = max(choice_s, (now - self._since_s) / self._num_entered)
        self._pending_s *= math.exp((self._told_s - now) / _KEPT_S)
        self._told_s = now
        before_s = self._pending_s
        self._pending_s = _told_within(before_s + num_choices * choice_s / _SHARE)
        return _told_within(excess_s + before_s)


def _told_within(retry_s: float) -> float:
    half_s = MAX_RETRY_S / 2
    return retry_s if retry_s < MAX_RETRY_S else half_s + retry_s % half_s


_LEAPS = 24
"""Steps are taken together so that a walk has about so many."""
_ANY = 0.5
"""With fewer rows that draw than this, on average, a step is not sized to their pace."""
_BUSIEST = 0.9
"""Prompts are expected to take at most so much of the time while an answer is drawn."""


class Scene(NamedTuple):
    """What a newcomer finds in one engine.

    costs        of its steps
    residual_s   until the step under way ends
    num_ahead    prompt tokens that are computed before its own
    num_own      its own, those not cached
    ends_s       when each row that draws ends at the latest, in order
    hazard       how likely a row ends before, in a second
    context      positions before a row that draws, on average
    usual        tokens of a usual prompt
    room         most tokens of prompts in a step
    least        so many they get in any case
    pace_s       the tightest target for a token of those that draw or will: steps with rows of them are sized to it
    lead_s       by how much the tightest of these is ahead of its pace
    num_rows     most rows
    inflow       prompt tokens that come in a second
    """

    costs: Costs
    residual_s: float = 0.0
    num_ahead: float = 0.0
    num_own: int = 1
    ends_s: Sequence[float] = ()
    hazard: float = 0.0
    context: float = 0.0
    usual: float = 1.0
    room: int = 1
    least: int = 1
    pace_s: float = 0.0
    lead_s: float = 0.0
    num_rows: int = 1
    inflow: float = 0.0

    def rows_left(self, at_s: float) -> float:
        """Of the rows that draw now, how many will at that time."""
        return (len(self.ends_s) - bisect_right(self.ends_s, at_s)) * math.exp(-self.hazard * at_s)

    def step_s(self, num_draws: float, num_new: float, length: float) -> float:
        """A step of rows that draw, and of so many tokens of prompts of that length."""
        num_prompts = max(1.0, num_new / max(1.0, length)) if num_new else 0.0
        behind = max(0.0, length - num_new) / 2
        context = num_draws * self.context
        return self.costs.predict(
            Work(
                num_draws + num_prompts,
                num_draws + num_new,
                context + num_new * (behind + min(num_new, length) / 2),
                context + num_prompts * behind,
            )
        )

    def room_beside(self, num_draws: float, lead_s: float) -> float:
        """Tokens of prompts in a step with rows that draw, and are so much ahead of their pace."""
        if not self.pace_s or num_draws < _ANY:
            return self.room
        alone_s = self.step_s(num_draws, 0, 0)
        token_s = (self.step_s(num_draws, self.room, self.usual) - alone_s) / self.room
        within_s = paced_s(self.pace_s, lead_s) - alone_s
        return max(self.least, min(self.room, within_s / token_s if token_s else self.room))


def forecast(scene: Scene) -> Forecast:
    if not scene.costs.is_known:
        return Forecast()
    at_s, joined, lead_s = scene.residual_s, 0.0, scene.lead_s - scene.residual_s
    num_left = scene.num_ahead
    leap = max(1, math.ceil(num_left / max(1, scene.room) / _LEAPS))
    while True:
        num_draws = min(scene.num_rows, scene.rows_left(at_s) + joined)
        room = max(1.0, scene.room_beside(num_draws, lead_s))
        if num_left < room:
            break
        times = min(leap, int(num_left // room))
        step_s = scene.step_s(num_draws, room, scene.usual)
        at_s += times * step_s
        num_left -= times * room
        joined = joined * math.exp(-scene.hazard * times * step_s) + times * room / scene.usual
        lead_s += times * (scene.pace_s - step_s)
        if joined >= 1:  # who has just got a first token is ahead of nothing
            lead_s = min(lead_s, 0.0)
        lead_s = max(lead_s, -scene.pace_s)
    wait_s = at_s
    # What is left of the others shares the first step of its own prompt.
    own = float(scene.num_own)
    while own > 0:
        num_new = min(own, max(1.0, room - num_left))
        step_s = scene.step_s(num_draws, num_new + num_left, scene.num_own)
        at_s += step_s
        own -= num_new
        lead_s = max(lead_s + scene.pace_s - step_s, -scene.pace_s)
        if num_left:
            joined += num_left / scene.usual
            num_left = 0.0
        if own > 0:
            num_draws = min(scene.num_rows, scene.rows_left(at_s) + joined)
            room = max(1.0, scene.room_beside(num_draws, lead_s))
    return Forecast(wait_s, at_s, _tpot_s(scene, min(scene.num_rows, num_draws + 1)))


def _tpot_s(scene: Scene, num_draws: float) -> float:
    """Draws wait for the prompts that come meanwhile, in steps that have room for so many."""
    alone_s = scene.step_s(num_draws, 0, 0)
    room = scene.room_beside(num_draws, 0.0)
    full_s = scene.step_s(num_draws, room, scene.usual)
    share = min(_BUSIEST, scene.inflow * (full_s - alone_s) / max(1, room))
    return min(full_s, alone_s / (1 - share))


_GAIN = 1 / 32
_MOST_OFF = 0.5
UPPER = 0.95
"""Of those that are let in by an upper quantile, as many are to have what was forecast by then."""
_STEP = 1 / 32
_FIRST, _LEAST, _MOST = 0.1, 0.03, 0.5
"""The margin before anything was compared, and its bounds."""


class Calibration:
    """By how much forecasts are off, from those that came true: what the walk leaves out, such as the time that
    messages take, and what is unlike lately.

    least_s: times up to it say nothing of the factor, since they are of little more than a step.

    factor  is to be put to the next forecasts
    margin  is to be added to them, as a share of the target, for an upper quantile. It follows the errors by steps
            (Robbins and Monro 1951): up for one above it, down for one below, by so much less as there are to be more
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._log = 0.0
        self.margin = _FIRST

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def note(self, told_s: float, took_s: float, target_s: float = 0.0) -> None:
        """It was forecast, with the factor of then, and took so long, or as long at least. What had no target says
        nothing of the margin."""
        if min(told_s, took_s) > self._least_s:
            off = max(-1.0, min(1.0, math.log(took_s / told_s)))
            self._log = max(-_MOST_OFF, min(_MOST_OFF, self._log + _GAIN * off))
        if target_s:
            step = UPPER if took_s - told_s > self.margin * target_s else UPPER - 1
            self.margin = max(_LEAST, min(_MOST, self.margin + _STEP * step))
