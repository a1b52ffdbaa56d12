"""What the manager has to say and to ask for, until the input that it follows from has been dealt with."""

from __future__ import annotations

from collections.abc import Callable

from ...core.tier_jobs import TierEffects, TierJob
from ...core.tiers import FromStore


class Outbox:
    """Jobs are numbered here, over all tiers."""

    def __init__(self) -> None:
        self._answers: list[tuple[int, FromStore]] = []
        self._jobs: list[TierJob] = []
        self._num_jobs = 0

    def say(self, client: int, message: FromStore) -> None:
        self._answers.append((client, message))

    def ask(self, job: Callable[[int], TierJob]) -> int:
        """The number of the job, which is made with it."""
        number = self._num_jobs
        self._num_jobs += 1
        self._jobs.append(job(number))
        return number

    def take(self, freed: list[tuple[int, int]]) -> TierEffects:
        effects = TierEffects(tuple(self._answers), tuple(self._jobs), tuple(freed))
        self._answers, self._jobs = [], []
        freed.clear()
        return effects
