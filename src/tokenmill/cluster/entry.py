"""One request in the gateway's record, how it continues after the death of its engine, and when it is due. Pure.

A resumed request carries the tokens that have arrived. The next engine computes their KV again and draws what follows.
Draws depend on seed, choice and position alone, so these are the tokens that the dead engine would have drawn. The
other facts that a client is told (cached tokens, times of scheduling and first token) stay those of the first engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..core.errors import RequestTimeout
from ..core.events import FINISH_ERROR, FINISH_LENGTH, TIMEOUT, Output, Timing
from ..core.policy import Forecast
from ..core.request import Request
from .length_predictor import Guess

# When open requests must have begun, when they must be over, and how long they wait for an engine that does not start.
# Pure: the caller says what time it is.


_FEW = 64
"""So many are kept in any case; beyond that, twice as many as all open requests could have."""

START_LIMIT_S = 30.0
NUM_STARTS = 3


class Due(NamedTuple):
    """is_end: the request must be over; else, an engine must have it."""

    at_s: float
    request_id: str
    is_end: bool


class Deadlines:
    """Of requests whose terms have bounds. Of those that are over some stay until their time comes: who asks knows
    them."""

    def __init__(self) -> None:
        self._heap: list[Due] = []

    @property
    def next_s(self) -> float | None:
        """When `take` has something; None: never."""
        return self._heap[0].at_s if self._heap else None

    def add(self, request: Request, still_open: Collection[str]) -> None:
        """`still_open`: all requests that are, this one too."""
        terms = request.terms
        if terms.timeout_s:
            heappush(self._heap, Due(request.arrival_s + terms.timeout_s, request.id, True))
        if terms.queue_s:
            heappush(self._heap, Due(request.arrival_s + terms.queue_s, request.id, False))
        if len(self._heap) > 4 * len(still_open) + _FEW:
            self._heap = [due for due in self._heap if due.request_id in still_open]
            heapify(self._heap)

    def take(self, now: float) -> list[Due]:
        """Those whose time has come."""
        due = []
        while self._heap and self._heap[0].at_s <= now:
            due.append(heappop(self._heap))
        return due


class StartLimit:
    """For how long engines may fail to start until what waits for one is ended.

    limit_s  counted from the first start that failed since there was a good engine, while something waits; None:
             START_LIMIT_S, or the time of NUM_STARTS starts like the last good one if that is longer
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self._start_s = 0.0
        self._since_s: float | None = None

    def join(self, start_s: float) -> None:
        """An engine serves; its start took so long."""
        self._start_s, self._since_s = start_s, None

    def is_over(self, now: float, num_waiting: int) -> bool:
        """To be asked when a start has failed and no engine serves."""
        if self._since_s is None or not num_waiting:
            self._since_s = now
        limit_s = self.limit_s
        return now - self._since_s >= (max(START_LIMIT_S, NUM_STARTS * self._start_s) if limit_s is None else limit_s)


_NOTHING = Forecast()


@dataclass(slots=True, eq=False)
class Entry:
    """request       as its call made it
    link          the engine that has it; None: it waits
    tokens        what engines have sent, also what lies beyond a stop string and is never shown
    ending        how it ended for its client, where its engine has not confirmed that
    attempt       of the engine that has it; outputs of others are dropped
    num_lives     engines that it was given to
    num_deaths    engines that died with it, but by a cause from outside
    num_idle      of those, how many of the last died before they gave a token of it
    num_trials    engines that died while they tried it as a suspect
    num_alone     of those, how many had nothing else
    num_unblamed_deaths   engines that died with nothing else, by an unknown cause and while others died
    num_there     of those of `num_alone`, how many of the last died at one place of its prompt
    num_left      tokens of the prompt that were left there; 0: unknown
    num_given     tokens that the engine that has it got with it
    guess         of the length of its answer, as made when it was first given to an engine
    num_splits    how often its prompt was computed by one engine for another
    num_failed_moves, rests_until_s  of its moves to another engine, and until when none is tried
    num_reserved  of the answer, as its engine expects it
    num_hit       tokens that were expected in the prefix cache of the engine that has it
    last_token_s  when tokens came last
    opened_s, told       when it was let in, and what was expected then
    first_token_s        when tokens came first
    num_cached, timing   of the first life that gave a token
    """

    request: Request
    link: int | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    ending: str | None = None
    attempt: int = 0
    num_lives: int = 0
    num_deaths: int = 0
    num_idle: int = 0
    num_trials: int = 0
    num_alone: int = 0
    num_unblamed_deaths: int = 0
    num_there: int = 0
    num_left: int = 0
    num_given: int = 0
    num_reserved: int = 0
    guess: Guess | None = None
    num_splits: int = 0
    num_failed_moves: int = 0
    rests_until_s: float = 0.0
    num_hit: int = 0
    last_token_s: float = -1.0
    opened_s: float = 0.0
    told: Forecast = _NOTHING
    first_token_s: float = -1.0
    num_cached: int = 0
    timing: Timing | None = None

    @property
    def has_progressed(self) -> bool:
        """Whether the engine that has it has given tokens of it."""
        return len(self.tokens) > self.num_given

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine must compute before it can draw the next."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    @property
    def num_given_tokens(self) -> int:
        """Tokens that the engine that has it got with it, the prompt's too."""
        return len(self.request.prompt_tokens) + self.num_given

    def submission(self) -> Request:
        """What the next engine is given, which has it from now on."""
        request = self.copy_for_another()
        self.num_given, self.attempt = len(self.tokens), request.attempt
        return request

    def copy_for_another(self) -> Request:
        """What a further engine is given, while the one that has it keeps it."""
        attempt = self.num_lives
        self.num_lives += 1
        if not attempt:
            return self.request
        output_tokens = (*self.request.output_tokens, *self.tokens)
        return replace(self.request, output_tokens=output_tokens, is_resumed=True, attempt=attempt)

    @property
    def tpot_s(self) -> float:
        """The time of each token after the first, of those that have come; 0: no two have."""
        return (self.last_token_s - self.first_token_s) / max(1, len(self.tokens) - 1)

    def note_first(self, output: Output, now: float) -> None:
        """The first tokens of all have come."""
        self.first_token_s = now
        self.num_cached, self.timing = output.num_cached, output.timing

    def as_first_life(self, output: Output) -> Output:
        """What a later life says, with the first one's numbers."""
        first, timing = self.timing, output.timing
        if first is None:
            return output
        if timing is not None:
            timing = replace(first, finished_s=timing.finished_s, num_preemptions=timing.num_preemptions)
        return output._replace(num_cached=self.num_cached, timing=timing)

    def timed_out(self, now: float) -> Output:
        """The last word on one whose time is over: what it has is its answer; without any it has failed."""
        if self.tokens:
            return self.last_word(FINISH_LENGTH, now, error=TIMEOUT)
        message = f"The request took longer than the {self.request.terms.timeout_s:g} s that it may."
        return self.last_word(FINISH_ERROR, now, error=message, error_kind=RequestTimeout.kind)

    def last_word(self, reason: str, now: float, *, error: str = "", error_kind: str = "") -> Output:
        """What an engine would say, had it not gone."""
        first = self.timing
        return Output(
            request_id=self.request.id,
            finish_reason=reason,
            num_output=len(self.request.output_tokens) + len(self.tokens),
            num_cached=self.num_cached,
            error=error,
            error_kind=error_kind,
            timing=Timing(self.request.arrival_s, -1.0, -1.0, now) if first is None else replace(first, finished_s=now),
        )
