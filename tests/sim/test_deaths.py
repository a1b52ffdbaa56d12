"""Engines that die under the real gateway, hundreds of times over: nobody loses a token, and poison finds its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simtest.cluster import run_seed
from tokenmill.cluster.entry import Entry
from tokenmill.cluster.events import Left
from tokenmill.cluster.failures import Suspects
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.placing import Placing
from tokenmill.core.request import Request
from tokenmill.sim.executor import Violation
from tokenmill.sim.loop import Deadlock, TimeLimit

NUM_SEEDS = 100
SEEDS_PER_TEST = 25


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_seed_holds(first: int) -> None:
    """A failure prints the command that repeats it."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            report = run_seed(seed)
        except BaseException as error:
            error.add_note(f"Replay: PYTHONPATH=tests python -m simtest.cluster --kind deaths --seed {seed}")
            raise
        totals.update(dict(report.ends))
        totals.update(deaths=report.num_left, resumed=report.num_resumed, poisoned=report.num_poisoned)
    idle = [name for name in ("stop", "length", "abort", "deaths", "resumed", "poisoned") if not totals[name]]
    assert not idle, f"seeds {first}... never exercised {idle}"


Plant = Callable[[pytest.MonkeyPatch], None]


def forget_the_last_token(patch: pytest.MonkeyPatch) -> None:
    submission = Entry.submission

    def forgetful(self: Entry) -> Request:
        request = submission(self)
        return replace(request, output_tokens=request.output_tokens[:-1]) if request.is_resumed else request

    patch.setattr(Entry, "submission", forgetful)


def resume_from_the_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Entry, "submission", lambda self: self.request)


def let_the_queue_refuse_the_resumed(patch: pytest.MonkeyPatch) -> None:
    submission = Entry.submission
    patch.setattr(Entry, "submission", lambda self: replace(submission(self), is_resumed=False))


def suspect_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "leave", lambda self, link, cause, now: set())


def never_hand_out_places_again(patch: pytest.MonkeyPatch) -> None:
    place = Placing.place

    def once(self: Placing, now: float, effects: Any) -> None:
        if not self.held:
            place(self, now, effects)

    patch.setattr(Placing, "place", once)


def lose_a_request_of_a_dead_engine(patch: pytest.MonkeyPatch) -> None:
    leave = Gateway._leave

    def keep(self: Gateway, event: Any, now: float, effects: Any) -> None:
        link = self._links.get(event.link)
        if link is not None:
            for name in list(link.entries)[:1]:
                del link.entries[name]
        leave(self, event, now, effects)

    patch.setitem(Gateway._HANDLERS, Left, keep)


PLANTS: list[Plant] = [
    forget_the_last_token,
    resume_from_the_prompt,
    let_the_queue_refuse_the_resumed,
    suspect_nobody,
    never_hand_out_places_again,
    lose_a_request_of_a_dead_engine,
]


# A full queue in front of one who has tokens is rare: its search starts near one.
FIRST_SEEDS = {let_the_queue_refuse_the_resumed: 205}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = FIRST_SEEDS.get(plant, 0)
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            run_seed(seed)
        except (AssertionError, Violation, Deadlock, TimeLimit) as error:  # else the plant does not fit the code
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:150]}")
            return
    raise AssertionError(f"{SEEDS_PER_TEST} seeds did not notice {plant.__name__}")
