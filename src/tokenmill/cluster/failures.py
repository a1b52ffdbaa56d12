"""Failures of engines. `Liveness` tells one that is lost though its link is open: its process is stopped, its machine
gone, or its steps hang. `Suspects` finds the request that kills engines. Pure.

An engine with work sends a heartbeat every `engine.background.HEARTBEAT_S`, also within a step, and sends what each
step has given. Lost is

    silent   one that has work and of which nothing was heard for most of `limit_s`, however long its step takes
    stuck    one that sends them, while its kernels do not get on, for `limit_s` and for STEP_SHARE times what the steps
             under way should take. Jobs beside the steps may hold a step up: while there are any, it is not judged

Not lost are an idle engine, one whose costs are unknown (a slower watch is kept by whoever runs it), and one whose
watcher was held up itself: what passes between two looks counts for no more than MOST_PASSED_S.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from ..core.events import Beat, FromEngine, StepOutputs
from .entry import Entry
from .events import Cause
from .links import EngineLink

LOOK_S = 0.1
MOST_PASSED_S = 0.5
LIMIT_S = 2.0
STEP_SHARE = 5.0
_SILENCE = 0.8
"""Share of the limit after which silence is believed, so that a loaded machine has the rest to act."""


class Liveness:
    """Of one engine, from its coming on. `limit_s` 0: it is never lost."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._looked_s: float | None = None
        self._silent_s = 0.0
        self._stuck_s = 0.0
        self._num_steps = 0
        self._num_ticks: int | None = None
        self._expected_s = 0.0
        self._is_judged = False  # whether it told that steps are under way, and how long they should take

    def hear(self, message: FromEngine) -> None:
        """Anything that it sent."""
        self._silent_s = 0.0
        if isinstance(message, Beat):
            if message.num_ticks is None or message.num_ticks != self._num_ticks:
                self._stuck_s = 0.0
            self._num_ticks, self._expected_s = message.num_ticks, message.in_flight_s
            self._is_judged = message.num_in_flight > 0 and message.in_flight_s > 0 and not message.num_jobs
        elif isinstance(message, StepOutputs):
            if message.stats.num_steps != self._num_steps:
                self._stuck_s = 0.0
            self._num_steps, self._expected_s = message.stats.num_steps, message.stats.in_flight_s

    def look(self, now: float, has_work: bool) -> str:
        """To be asked every LOOK_S: why it is lost, as a sentence, or ""."""
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, MOST_PASSED_S)
        self._looked_s = now
        if not has_work or not self._limit_s:
            self._looked_s = None
            self._silent_s = self._stuck_s = 0.0
            return ""
        self._silent_s += passed_s
        self._stuck_s = self._stuck_s + passed_s if self._is_judged else 0.0
        if self._silent_s >= _SILENCE * self._limit_s:
            return f"It has work and has said nothing for {self._silent_s:.1f} s."
        limit_s = max(self._limit_s, STEP_SHARE * self._expected_s)
        if self._stuck_s >= limit_s:
            return f"Its step has not got on for {self._stuck_s:.1f} s and should take {self._expected_s:.3g} s."
        return ""


# Which request may be the one that kills engines, and its trial.
#
# A front end does not see which rows a step had when its engine died. But it gives an engine only about as many
# requests as it has rows, so nearly all of them are in its steps, and those that produce tokens are known to run. A
# request is suspect if the dead engine had it, it had outlived another engine before, and it produced no token in
# between.
# Not every death counts (`events.Cause`). One by an outside cause says nothing of what the engine ran, nor does that of
# an engine that was told to leave. One of which nobody knows the cause counts for nothing where, in the same seconds,
# an engine has died that did not have the request; but an engine in which it was alone is excused so only so often,
# since two requests that end engines in trials beside each other would excuse each other for ever.
#
# Suspects are tried alone: an engine gets no other work until its suspect has produced a token. Then the suspect is
# cleared and continues, and the next one is tried. All engines that are free try at once; where none is, one gets no
# more until it is. The first to be tried is the one that was idle in most deaths; so after an engine dies in a trial,
# the same suspect is alone in the next engine from the start. A request that kills two engines while it is alone is
# given up. A death with other requests in the engine proves nothing against any of them.
#
# What a request does to an engine, it does at the same place of its prompt. If two engines in which it was alone ended
# at different places, one of the ends at least came from elsewhere, and the count begins anew with the later one. So it
# does where other engines die of faults in the same seconds. As a place is known only to a few steps, and a fault need
# not be strict, there is a bound on all such deaths, too.


MAX_ALONE = 2
"""So many engines may die with a suspect alone, at one place of its prompt."""
MAX_ALONE_ANYWHERE = 5
"""So many wherever they were."""
MAX_UNBLAMED_DEATHS = 20
"""So many of unknown causes, each while another engine died."""
TOGETHER_S = 3.0
"""Engines that die within this time may have died of one cause."""
_NEAR_STEPS = 3
"""FairSlots are the same that are no further apart than what so many steps compute at most: two are in flight."""


class Suspects:
    """trials  the suspects that engines have now, by engine
    link      the engine that gets no more, so that it can try one; None: none needs to
    """

    def __init__(self) -> None:
        self.trials: dict[int, Entry] = {}
        self.link: int | None = None
        self._waiting: dict[str, Entry] = {}
        self._deaths: deque[tuple[float, frozenset[str]]] = deque()  # lately: when, and what the engine had

    def __len__(self) -> int:
        """Those that wait for their trial."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def is_tried(self, entry: Entry) -> bool:
        """Whether it is alone in its engine."""
        return entry.link is not None and self.trials.get(entry.link) is entry

    def leave(self, link: EngineLink, cause: Cause, now: float) -> set[str]:
        """An engine has died, with all that `link` has. Requests that are to be given up."""
        while self._deaths and self._deaths[0][0] < now - TOGETHER_S:
            self._deaths.popleft()
        if link.is_leaving:
            cause = Cause.OUTSIDE
        tried = self.trials.pop(link.number, None)
        convicted = {
            entry.request.id
            for entry in link.entries.values()
            if entry.ending is None and self._judge(entry, link, cause, entry is tried)
        }
        if cause is not Cause.OUTSIDE:
            self._deaths.append((now, frozenset(link.entries)))
        return convicted

    def _judge(self, entry: Entry, link: EngineLink, cause: Cause, was_tried: bool) -> bool:
        is_common = any(entry.request.id not in others for _, others in self._deaths)
        counts = cause is Cause.FAULT or (cause is Cause.UNKNOWN and not is_common)
        entry.num_deaths += counts
        if entry.has_progressed:
            entry.num_idle = 0
            return False
        if counts:
            entry.num_idle += 1
            entry.num_trials += was_tried
            if was_tried and len(link.entries) == 1:
                _note_alone(entry, link, is_common)
                if entry.num_there >= MAX_ALONE or entry.num_alone >= MAX_ALONE_ANYWHERE:
                    return True
        elif was_tried and len(link.entries) == 1 and cause is Cause.UNKNOWN:
            entry.num_unblamed_deaths += 1
            if entry.num_unblamed_deaths >= MAX_UNBLAMED_DEATHS:
                return True
        if was_tried or (counts and entry.num_deaths > 1):
            self._waiting[entry.request.id] = entry
        return False

    def next(self, beside: Collection[Entry]) -> Entry | None:
        """Whom to try now, in an engine that has the requests `beside`: nobody, until all of those have given tokens;
        and who has died in a trial before, only where there are none."""
        if beside and not all(other.has_progressed for other in beside):
            return None
        able = [each for each in self._waiting.values() if not (beside and each.num_trials)]
        if not able:
            return None
        entry = max(able, key=lambda each: each.num_idle)  # of equal ones the first that came
        del self._waiting[entry.request.id]
        return entry

    def clear(self, entry: Entry) -> None:
        """It has given a token, or is over."""
        self._waiting.pop(entry.request.id, None)
        if self.is_tried(entry):
            assert entry.link is not None
            del self.trials[entry.link]


def _note_alone(entry: Entry, link: EngineLink, is_common: bool) -> None:
    """An engine has died that had nothing else. How far it had come is known once it has told so in a step."""
    left, near = link.stats.num_prompt_left, _NEAR_STEPS * link.ready.max_num_batched_tokens
    is_elsewhere = left and entry.num_left and near and abs(left - entry.num_left) > near
    entry.num_alone += 1
    entry.num_there = 1 if is_elsewhere or is_common else entry.num_there + 1
    entry.num_left = left
