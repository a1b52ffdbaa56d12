"""The request queue of a front end: which choices have a slot, which wait, and how long a new call would wait.

Pure: events in, decisions out. Combines `slots` (whose turn it is) with `forecast` (what a turn costs). Without a call
of `share` every choice goes to the engine at once, as a program with its own engine wants it.

    join     choices of a call
    choose   what is to be submitted now
    start    a first token came
    end      a choice is over
    step     the engine's state after a step
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

from ..core.cost import Work
from ..core.events import EngineStats
from ..core.fairness import class_of
from ..core.policy import Forecast, Newcomer
from ..core.request import IDLE_PRIORITY, Request
from ..core.slo import least_tokens
from ..core.terms import NUM_PRIORITY_CLASSES, Terms
from ..core.work import PATIENCE, due, lead_s, step_work
from .events import Pace
from .fair_queueing import Ticket
from .forecast import Calibration, Load, Rates, RetryAfter, Rows, Scene, forecast, moved, predicted_wait
from .slots import FairSlots, Room

# How far the load is from what can be served in time, and what is given up first.
#
# Each call says how much of its tightest bound it would take (`Verdict.need`); by class of priority these are averaged
# over the last calls, and fade when none come. The plan says what follows, and hysteresis keeps it from flapping.
#
#     level 0  nothing
#           1  answers are shortened, where their tenants allow it
#           2  classes below the one that is not served in time are turned away


_WEIGHT = 1 / 8
_FADE_S = 5.0
_MOST = 2.0
_EVER = 1e-3


class Plan(NamedTuple):
    """shorten_at  the mean need from which answers are shortened
    shed_at     that of a class from which those below it are turned away
    relief      a measure ends where the need is below so much of where it began
    """

    shorten_at: float = 0.7
    shed_at: float = 1.0
    relief: float = 0.7


class Pressure:
    """Classes below 0 or above the last one count as those."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self._means = [0.0] * NUM_PRIORITY_CLASSES
        self._noted_s = [0.0] * NUM_PRIORITY_CLASSES
        self._is_shedding = [False] * NUM_PRIORITY_CLASSES
        self._is_shortening = False

    def note(self, priority_class: int, need: float, now: float) -> None:
        """A call of the class came."""
        place = _place(priority_class)
        mean = self.mean(place, now)
        self._means[place] = mean + _WEIGHT * (min(_MOST, need) - mean)
        self._noted_s[place] = now

    def mean(self, priority_class: int, now: float) -> float:
        place = _place(priority_class)
        mean = self._means[place]
        return mean * math.exp((self._noted_s[place] - now) / _FADE_S) if mean > _EVER else 0.0

    def level(self, now: float) -> int:
        is_shedding = any([self._sheds_below(place, now) for place in range(NUM_PRIORITY_CLASSES)])
        highest = max(self.mean(place, now) for place in range(NUM_PRIORITY_CLASSES))
        self._is_shortening = highest >= self._bound(self.plan.shorten_at, self._is_shortening)
        return 2 if is_shedding else int(self._is_shortening)

    def shed_s(self, priority_class: int, now: float) -> float:
        """Seconds until the class may come again, if no call of a better one comes; 0: it may now."""
        places = [place for place in range(_place(priority_class)) if self._sheds_below(place, now)]
        until = self.plan.shed_at * self.plan.relief
        return max((_FADE_S * math.log(max(1.01, self.mean(place, now) / until)) for place in places), default=0.0)

    def _sheds_below(self, place: int, now: float) -> bool:
        if self._means[place] > _EVER:
            mean, bound = self.mean(place, now), self._bound(self.plan.shed_at, self._is_shedding[place])
            self._is_shedding[place] = mean >= bound
        return self._is_shedding[place]

    def _bound(self, at: float, is_on: bool) -> float:
        return at * self.plan.relief if is_on else at


def _place(priority_class: int) -> int:
    return max(0, min(NUM_PRIORITY_CLASSES - 1, priority_class))


_LATELY = 64
_LEAST_TTFT_S = 0.05
"""First tokens that come sooner wait for little but the step under way."""


@dataclass(slots=True, eq=False)
class _OpenCall:
    client: str
    num_open: int
    num_tokens: int


class RequestQueue:
    """num_open   choices open, waiting or not
    num_tokens  prompt tokens held for them; choices of one prompt share it
    choice_s    seconds for which a choice, on average, takes all of what it needs most: the engine's time, or its rows
    pressure    how far the load is from what can be served in time
    calibration, tpot_calibration   by how much forecasts of first tokens are off, and of the time of further ones
    returns     when those who are refused are told to come back
    catch_up    is called before what answers have drawn is looked at: what has been paced is to be told

    num_drawn: tells how many tokens of a choice have come.
    """

    def __init__(self, patience: int = PATIENCE, num_drawn: Callable[[str], int] = lambda request_id: 0) -> None:
        self._patience = patience
        self.num_open = 0
        self.num_tokens = 0
        self.choice_s = 0.0
        self.pressure = Pressure()
        self.calibration = Calibration(_LEAST_TTFT_S)
        self.tpot_calibration = Calibration()
        self.retry_after = RetryAfter()
        self._slots = FairSlots(num_drawn)
        self._rates = Rates(0, 0)
        self._stats = EngineStats()
        self._calls: dict[str, _OpenCall] = {}
        self._tokens_of: dict[str, int] = {}
        self._stepped_s = 0.0
        self._num_sent = 0  # tokens of the prompts that engines were given since
        self._num_paced_steps = self._num_paced_tokens = 0  # that `pace` was told of and `repeat` was not
        self.catch_up: Callable[[], None] = lambda: None
        self._drawing: dict[str, tuple[float, Request, str, Sized]] = {}
        self._lately: deque[tuple[float, int, float]] = deque(maxlen=_LATELY)

    def share(self, room: Room) -> None:
        """Hand out slots in turn from now on, so many as `room` has; who has one keeps it."""
        self._slots.room = room
        self._rates.resize(room.num_rows, room.step_tokens, room.num_engines)

    @property
    def num_waiting(self) -> int:
        """Choices that the engine has not been told of."""
        return self._slots.num_waiting

    def is_waiting(self, request_id: str) -> bool:
        return self._slots.is_waiting(request_id)

    def waits_for(self, adapter: str) -> bool:
        """Whether a waiting choice names the adapter."""
        return self._slots.waits_for(adapter)

    def num_open_of(self, client: str) -> int:
        return self._slots.num_open_of(client)

    def num_tokens_of(self, client: str) -> int:
        return self._tokens_of.get(client, 0)

    def served(self) -> dict[tuple[int, str], float]:
        """By class and tenant that has something open: service received for its weight, as slots are shared by it."""
        return self._slots.served()

    def join(self, requests: Sequence[Request], client: str) -> None:
        """The choices of one call, in their order."""
        call = _OpenCall(client, len(requests), held_tokens(requests))
        self.num_open += len(requests)
        self.num_tokens += call.num_tokens
        self._tokens_of[client] = self.num_tokens_of(client) + call.num_tokens
        tickets, prompt, class_ = [], None, class_of(requests[0])
        for request in requests:
            self._calls[request.id] = call
            num_prompt, ttft_s = len(request.prompt_tokens), request.terms.ttft_s
            cost = 1 if request.prompt_tokens is prompt else self._cost(num_prompt)
            tickets.append(Ticket(request, client, self._due(num_prompt, ttft_s), cost, class_))
            prompt = request.prompt_tokens
        self._slots.join(tickets)
        self.retry_after.enter(len(requests))
        service_s = self._service_s(tickets[0])
        self.choice_s = moved(self.choice_s, service_s)
        self._lately.append((requests[0].arrival_s, len(requests[0].prompt_tokens), service_s))

    def choose(self) -> Request | None:
        """The next choice to submit; None: no more for now."""
        request = self._slots.choose()
        if request is not None and self._slots.room is not None:
            self._num_sent += self._cost(len(request.prompt_tokens))
        return request

    def start(self, request: Request, num_cached: int, now: float, tokens: Sized = ()) -> None:
        """Its first token came; so many of its prompt's tokens were cached. `tokens`: those that it has, and will."""
        self._slots.start(request.id, num_cached)
        self._rates.note_start(len(request.prompt_tokens), num_cached)
        if request.priority < IDLE_PRIORITY:  # the others give way
            self._drawing[request.id] = (now, request, self._calls[request.id].client, tokens)

    def end(self, request: Request, num_output: int, reason: str) -> None:
        """The choice is over, wherever it was."""
        self._slots.end(request.id, num_output)
        if self._drawing.pop(request.id, None) is not None:
            self._rates.note_end(num_output, reason)
        call = self._calls.pop(request.id)
        self.num_open -= 1
        call.num_open -= 1
        if not call.num_open:
            self.num_tokens -= call.num_tokens
            self._tokens_of[call.client] -= call.num_tokens
            if not self._tokens_of[call.client]:
                del self._tokens_of[call.client]

    def step(self, stats: EngineStats, now: float, link: int = 0, own: EngineStats | None = None) -> None:
        """See Rates.note_step."""
        self._stats = stats
        self._stepped_s = now
        self._num_sent = 0
        self._rates.note_step(stats, link, own)
        if self._slots.num_waiting and self._slots.is_shared:
            self._slots.settle()

    def repeat(
        self, stats: EngineStats, now: float, link: int, own: EngineStats, num_steps: int, num_tokens: int
    ) -> None:
        """As `step` of so many that are alike, when nothing waited, and of which `pace` has been told before."""
        self._stats = stats
        self._stepped_s = max(self._stepped_s, now)
        self._num_paced_steps -= num_steps
        self._num_paced_tokens -= num_tokens
        self._rates.note_repeated(stats, link, own)

    def pace(self, paces: Sequence[Pace]) -> None:
        """Of steps, as they ended, that `repeat` is told of later."""
        if paces:
            self._num_sent = 0
            self._num_paced_steps += len(paces)
            self._num_paced_tokens += sum([num_tokens for _, _, _, num_tokens in paces])
            self._rates.pace(paces)

    def forecast(self, newcomer: Newcomer, now: float) -> Forecast:
        """What the first choice of a call may expect."""
        self.catch_up()
        room, rates = self._slots.room, self._rates
        if room is None:
            return Forecast()
        at = self._due(newcomer.num_tokens, newcomer.terms.ttft_s)
        passes = self._passes(newcomer, now) if newcomer.terms.ttft_s else None
        num_ahead, num_tokens = self._slots.ahead(newcomer.client, newcomer.priority, at, newcomer.terms, passes)
        num_own = self._slots.ahead_of_own(newcomer.client, newcomer.priority, at, newcomer.terms)
        own_most = min(room.most_of_one, rates.num_rows)
        if num_ahead + len(self._drawing) < own_most:  # so many cannot fill the rows
            rows: tuple[Rows, ...] = ()
        else:
            limits = list(self._limits(now))
            own = [left_s for left_s, client in limits if client == newcomer.client]
            most = [request.max_tokens for _, request, _, _ in self._drawing.values()]
            hold_s = rates.hold_s(sum(most) / max(1, len(most)))
            rows = (
                Rows(rates.num_rows, num_ahead, [left_s for left_s, _ in limits], rates.hazard, hold_s),
                Rows(own_most, num_own, own, rates.hazard, hold_s),
            )
        scene = self._scene(newcomer, num_tokens, room, now)
        if not rates.is_measured(min(rates.room, scene.num_ahead + scene.num_own)):
            return Forecast()
        seen = forecast(scene)
        wait_s = predicted_wait(Load(seen.wait_s, rows, self._passing(newcomer, now)))
        first, further, terms = self.calibration, self.tpot_calibration, newcomer.terms
        ttft_s, tpot_s = first.factor * (seen.ttft_s + wait_s - seen.wait_s), further.factor * seen.tpot_s
        return Forecast(
            first.factor * wait_s,
            ttft_s,
            tpot_s,
            ttft_s + first.margin * terms.ttft_s,
            tpot_s + further.margin * self.tpot_target_s(terms),
        )

    def wait_s(self, newcomer: Newcomer, now: float) -> float:
        """Roughly its wait: for the prompts before its own, where rows are left."""
        room, rates = self._slots.room, self._rates
        if room is None:
            return 0.0
        at = self._due(newcomer.num_tokens, newcomer.terms.ttft_s)
        num_ahead, num_tokens = self._slots.ahead(newcomer.client, newcomer.priority, at, newcomer.terms)
        if num_ahead + len(self._drawing) < min(room.most_of_one, rates.num_rows):
            return num_tokens * rates.token_s
        return self.forecast(newcomer, now).wait_s

    def _passes(self, newcomer: Newcomer, now: float) -> Callable[[Ticket], bool]:
        """Whether an engine takes a choice first, by slack (sched.policies.slack); what has none left comes later."""
        token_s = self._rates.token_s
        slack_s = newcomer.terms.ttft_s - newcomer.since_s - self._cost(newcomer.num_tokens) * token_s

        def passes(ticket: Ticket) -> bool:
            terms, arrival_s = ticket.request.terms, ticket.request.arrival_s
            if not terms.ttft_s:
                return ticket.due <= due(self._work, newcomer.num_tokens, self._patience)
            return 0 <= arrival_s + terms.ttft_s - now - ticket.cost * token_s <= max(0.0, slack_s)

        return passes

    def _scene(self, newcomer: Newcomer, num_before: int, room: Room, now: float) -> Scene:
        """num_before: tokens of the prompts before its own; of these the engines have computed some already."""
        rates, stats, num_engines = self._rates, self._stats, room.num_engines
        num_done = self._slots.cost_arriving - self._num_sent - stats.num_prompt_left
        ends_s = sorted(left_s for left_s, _ in self._limits(now))[::num_engines]
        contexts = [len(request.prompt_tokens) + len(tokens) for _, request, _, tokens in self._drawing.values()]
        leads_s = [
            start_s + len(tokens) * request.terms.tpot_s - now
            for start_s, request, _, tokens in self._drawing.values()
            if request.terms.tpot_s
        ]
        lately = [num_prompt for _, num_prompt, _ in self._lately]
        span_s = now - self._lately[0][0] if lately else 0.0
        paces_s = [each for each in (self._tightest_tpot_s(NUM_PRIORITY_CLASSES), newcomer.terms.tpot_s) if each]
        pace_s = min(paces_s, default=0.0)
        return Scene(
            costs=rates.costs,
            residual_s=self._residual_s(now),
            num_ahead=max(0, num_before - max(0, num_done)) / num_engines,
            num_own=self._cost(max(1, newcomer.num_tokens)),
            ends_s=ends_s,
            hazard=rates.hazard,
            context=sum(contexts) / max(1, len(contexts)),
            usual=max(1.0, sum(lately) / max(1, len(lately)) * rates.share_computed),
            room=room.step_tokens if pace_s else max(1, round(rates.room)),
            least=least_tokens(room.step_tokens),
            pace_s=pace_s,
            lead_s=min(leads_s, default=0.0),
            num_rows=max(1, room.num_rows // num_engines),
            inflow=sum(lately) * rates.share_computed / span_s / num_engines if span_s > 0 else 0.0,
        )

    def _residual_s(self, now: float) -> float:
        """Until the step that a newcomer cannot join any more has ended: the one under way, or where that is nearly
        over and the next is planned already, that one too. It is as long, if it has prompts; else short."""
        stats, room = self._stats, self._slots.room
        in_flight_s = stats.in_flight_s
        left_s = self._stepped_s + in_flight_s - now
        if in_flight_s <= 0 or left_s <= -in_flight_s:
            return 0.0
        if left_s >= lead_s(in_flight_s):
            return left_s
        num = len(self._drawing) / (1 if room is None else room.num_engines)
        return max(0.0, left_s) + (
            in_flight_s if stats.num_prompt_left else self._rates.costs.predict(Work(num, num, 0))
        )

    def tpot_target_s(self, terms: Terms) -> float:
        if not (terms.ttft_s or terms.tpot_s):
            return 0.0
        paces_s = [each for each in (self._tightest_tpot_s(terms.priority_class), terms.tpot_s) if each]
        return min(paces_s, default=0.0)

    def _tightest_tpot_s(self, priority_class: int) -> float:
        """Of the choices that draw, of this class or a better one; 0: there is none."""
        targets = [
            terms.tpot_s
            for _, request, _, _ in self._drawing.values()
            if (terms := request.terms).tpot_s and terms.priority_class <= priority_class
        ]
        return min(targets, default=0.0)

    def shed_s(self, priority_class: int, now: float) -> float:
        return self.pressure.shed_s(priority_class, now)

    def _passing(self, newcomer: Newcomer, now: float) -> list[tuple[float, float]]:
        """What will pass it, if calls go on as they came lately."""
        if len(self._lately) < _LATELY:
            return []
        span_s = now - self._lately[0][0]
        if newcomer.terms.ttft_s and span_s > 0:  # by slack: for as long as their prompts take less
            token_s = self._rates.token_s
            return [
                (token_s * (newcomer.num_tokens - num_prompt), service_s / span_s)
                for _, num_prompt, service_s in self._lately
                if num_prompt < newcomer.num_tokens
            ]
        return [
            (due(0, newcomer.num_tokens - num_prompt, self._patience) * self._rates.work_s, service_s / span_s)
            for _, num_prompt, service_s in self._lately
            if num_prompt < newcomer.num_tokens and span_s > 0
        ]

    def _service_s(self, ticket: Ticket) -> float:
        """Seconds for which a choice takes all of what it needs most of: the engine's time, or its rows."""
        rates = self._rates
        return max(ticket.cost * rates.token_s, rates.hold_s(ticket.request.max_tokens) / max(1, rates.num_rows))

    def usual_wait_s(self, now: float) -> float:
        """The same for a call of a new client, with a prompt as long as prompts have been lately."""
        num_prompt = sum(num_tokens for _, num_tokens, _ in self._lately) // max(1, len(self._lately))
        return self.forecast(Newcomer("", num_tokens=num_prompt), now).wait_s

    def _limits(self, now: float) -> Iterator[tuple[float, str]]:
        """(seconds that it goes on at most, client) of each choice that draws."""
        for start_s, request, client, _ in self._drawing.values():
            yield max(0.0, start_s + request.max_tokens * self._rates.step_s - now), client

    def _due(self, num_prompt: int, ttft_s: float) -> int:
        """When a prompt that comes now should be served, on the clock of work, as the engine orders prompts with and
        without a target (`sched.policies.slack`)."""
        work, rates = self._work, self._rates
        if ttft_s and rates.work_s:
            slack_s = ttft_s - self._cost(num_prompt) * rates.token_s
            if slack_s >= 0:
                return work + int(slack_s / rates.work_s)
        return due(work, num_prompt, self._patience)

    def _cost(self, num_prompt: int) -> int:
        return max(1, round(num_prompt * self._rates.share_computed))

    @property
    def _work(self) -> int:
        stats, room = self._stats, self._slots.room
        num_tokens = stats.prompt_tokens_computed + stats.generation_tokens + self._num_paced_tokens
        num_steps = stats.num_steps + self._num_paced_steps
        return num_tokens + num_steps * step_work(0, 0 if room is None else room.step_tokens)


def newcomer(client: str, requests: Sequence[Request], now: float | None = None) -> Newcomer:
    """The call of `requests`, as an admission looks at it."""
    first = requests[0]
    since_s = 0.0 if now is None else max(0.0, now - first.arrival_s)
    num_prompt = len(first.prompt_tokens)
    return Newcomer(client, first.priority, num_prompt, len(requests), held_tokens(requests), first.terms, since_s)


def held_tokens(requests: Sequence[Request]) -> int:
    """Token ids that are held for the choices of one call: each prompt once, and each list of ids."""
    prompts = {id(request.prompt_tokens): len(request.prompt_tokens) for request in requests}
    lists = {
        id(request.sampling): len(request.sampling.stop_token_ids) + len(request.sampling.allowed_token_ids)
        for request in requests
    }
    words = {id(request.bad_words): sum(map(len, request.bad_words)) for request in requests}
    return sum(prompts.values()) + sum(lists.values()) + sum(words.values())
