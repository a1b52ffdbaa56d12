"""Tells an engine that is lost though its link is open: its process is stopped, its machine gone, or its steps hang.
Pure.

An engine with work beats every `engine.beats.BEAT_S`, also within a step, and sends what each step has given. Lost is

    silent   one that has work and of which nothing was heard for most of `limit_s`, however long its step takes
    stuck    one that beats, while its kernels do not get on, for `limit_s` and for STEP_SHARE times what the steps
             under way should take. Jobs beside the steps may hold a step up: while there are any, it is not judged

Not lost are an idle engine, one whose costs are unknown (a slower watch is kept by whoever runs it), and one whose
watcher was held up itself: what passes between two looks counts for no more than MOST_PASSED_S.
"""

from __future__ import annotations

from ..core.events import Beat, FromEngine, StepOutputs

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
