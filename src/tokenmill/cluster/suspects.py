"""Which request may be the one that kills engines, and its trial. Pure.

A front end does not see which rows a step had when its engine died. But it gives an engine only about as many requests
as it has rows, so nearly all of them are in its steps, and those that produce tokens are known to run. A request is
suspect if the dead engine had it, it had outlived another engine before, and it produced no token in between.

Suspects are tried one at a time: the engine gets no other work until the suspect has produced a token. Then the suspect
is cleared and continues, and the next one is tried. The first to be tried is the one that was idle in most deaths; so
after an engine dies in a trial, the same suspect is alone in the next engine from the start. A request that kills two
engines while it is alone is given up. A death with other requests in the engine proves nothing against any of them, nor
does that of one that was told to leave.

What a request does to an engine, it does at the same place of its prompt. If two engines in which it was alone ended at
different places, one of the ends at least came from outside, and the count begins anew with the later one. As a place
is known only to a few steps, and a fault need not be strict, there is a bound on all such deaths, too.
"""

from __future__ import annotations

from collections.abc import Collection

from .entry import Entry
from .links import EngineLink

MAX_ALONE = 2
"""So many engines may die with a suspect alone, at one place of its prompt."""
MAX_ALONE_ANYWHERE = 5
"""So many wherever they were."""
_NEAR_STEPS = 3
"""Places are the same that are no further apart than what so many steps compute at most: two are in flight."""


class Suspects:
    """on_trial  the suspect that an engine has now
    link      the engine that tries them, or will when what it has has given tokens; None: there are no suspects
    """

    def __init__(self) -> None:
        self.on_trial: Entry | None = None
        self.link: int | None = None
        self._waiting: dict[str, Entry] = {}

    def __len__(self) -> int:
        """Those that wait for their trial."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def judge(self, entry: Entry, link: EngineLink) -> bool:
        """Its engine has died, with all that `link` has. Whether it is to be given up."""
        was_tried = entry is self.on_trial
        if was_tried:
            self.on_trial = None
        entry.num_deaths += not link.is_leaving
        if entry.has_progressed:
            entry.num_idle = 0
            return False
        if link.is_leaving:
            if was_tried:
                self._waiting[entry.request.id] = entry
            return False
        entry.num_idle += 1
        entry.num_trials += was_tried
        if was_tried and len(link.entries) == 1:
            _note_alone(entry, link)
            if entry.num_there >= MAX_ALONE or entry.num_alone >= MAX_ALONE_ANYWHERE:
                return True
        if entry.num_deaths > 1:
            self._waiting[entry.request.id] = entry
        return False

    def next(self, beside: Collection[Entry]) -> Entry | None:
        """Whom to try now, in an engine that has the requests `beside`: nobody, until all of those have given tokens;
        and who has died in a trial before, only where there are none."""
        assert self._waiting and self.on_trial is None
        entry = max(self._waiting.values(), key=lambda each: each.num_idle)  # of equal ones the first that came
        if beside and (entry.num_trials or not all(other.has_progressed for other in beside)):
            return None
        del self._waiting[entry.request.id]
        self.on_trial = entry
        return entry

    def clear(self, entry: Entry) -> None:
        """It has given a token, or is over."""
        self._waiting.pop(entry.request.id, None)
        if entry is self.on_trial:
            self.on_trial = None


def _note_alone(entry: Entry, link: EngineLink) -> None:
    """An engine has died that had nothing else. How far it had come is known once it has told so in a step."""
    left, near = link.stats.num_prompt_left, _NEAR_STEPS * link.ready.max_num_batched_tokens
    is_elsewhere = left and entry.num_left and near and abs(left - entry.num_left) > near
    entry.num_alone += 1
    entry.num_there = 1 if is_elsewhere else entry.num_there + 1
    entry.num_left = left
