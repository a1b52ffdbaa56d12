"""Which request may be what ends engines, and its trial. Pure.

A front end does not see which rows a step had when its engine died. But places are handed out one for a row, so that
nearly all that an engine has are in its steps; what draws tells so by its tokens. So those are suspect that the dead
engine had, that had outlived another engine before, and that gave no token since.

Suspects are tried one at a time: the engine gets no other work until the suspect has given a token. Then it is cleared
and goes on, and the next one is tried. First comes who was idle in most deaths; so an engine that died in a trial is
followed by one where the same suspect is alone from the start. Who ends an engine twice while it is alone is given
up: an engine that died of something else, or of another request, is held against nobody.
"""

from __future__ import annotations

from collections.abc import Collection

from .entry import Entry

MAX_ALONE = 2
"""So many engines may die with a suspect alone."""


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

    def judge(self, entry: Entry, num_beside: int) -> bool:
        """Its engine has died, and had `num_beside` other requests. Whether it is to be given up."""
        was_tried = entry is self.on_trial
        if was_tried:
            self.on_trial = None
        if entry.has_progressed:
            entry.num_idle = 0
            return False
        entry.num_idle += 1
        entry.num_trials += was_tried
        entry.num_alone += was_tried and not num_beside
        if entry.num_alone >= MAX_ALONE:
            return True
        if entry.num_lives > 1:
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
