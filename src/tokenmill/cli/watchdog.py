"""Tells an engine that is stuck from one that is slow, or idle, or whose watcher itself was held up.

An engine is stuck when it has had work for `limit_s` and given no sign: no end of a step, and no heartbeat from within
one (net/child_process.py). Loading gives no signs and is not watched: before it is ready, an engine has no work.
"""

from __future__ import annotations

from ..net.child_process import HEARTBEAT_S

LOOK_S = HEARTBEAT_S


class Watchdog:
    """limit_s  0: nothing is ever stuck
    quiet_s  for how long there has been work and no sign
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.quiet_s = 0.0
        self._looked_s = -1.0
        self._num_steps = 0

    def finds_stuck(self, now_s: float, *, has_work: bool, has_beaten: bool, num_steps: int) -> bool:
        """To be asked every LOOK_S. What passes between two looks counts for no more than twice that: where it is
        more, this process was stopped, or the machine slept, and the engine may have been, too."""
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S) if self._looked_s >= 0 else 0.0
        gives_sign = has_beaten or num_steps != self._num_steps
        self._looked_s, self._num_steps = now_s, num_steps
        self.quiet_s = 0.0 if gives_sign or not has_work else self.quiet_s + passed_s
        return 0 < self._limit_s <= self.quiet_s
