"""Bugs that are planted in how requests and KV move between workers are found within a few dozen seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simtest.cluster import run_seed
from tokenmill.cluster.entry import Entry
from tokenmill.cluster.events import Stepped
from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.links import EngineLink
from tokenmill.cluster.moves import Move, Moves
from tokenmill.cluster.placing import Placing
from tokenmill.core.moves import Continue, Release
from tokenmill.kv.connector.scheduler.kv_export import KVExports, _Export
from tokenmill.kv.connector.scheduler.kv_import import KVImports, _Import
from tokenmill.sim.executor import Violation
from tokenmill.sim.loop import Deadlock, TimeLimit

NUM_SEEDS = 25

Plant = Callable[[pytest.MonkeyPatch], None]


def take_outputs_of_any_attempt(patch: pytest.MonkeyPatch) -> None:
    step = Gateway._step

    def trusting(self: Gateway, event: Stepped, now: float, effects: Any) -> None:
        entries = self._entries
        outputs = tuple(
            each._replace(attempt=entries[each.request_id].attempt) if each.request_id in entries else each
            for each in event.step.outputs
        )
        for each in outputs:
            entry = entries.get(each.request_id)
            link = self._links.get(event.link)
            if entry is not None and link is not None and entry.link is not None and entry.link != event.link:
                message = replace(event.step, outputs=(each,), stats=self._links[entry.link].stats)
                step(self, Stepped(entry.link, message), now, effects)
        step(self, replace(event, step=replace(event.step, outputs=outputs)), now, effects)

    patch.setitem(Gateway._HANDLERS, Stepped, trusting)


def lose_a_release(patch: pytest.MonkeyPatch) -> None:
    end = Moves._end

    def forgetful(self: Moves, move: Move, now: float, effects: Any, num_tokens: int, error: str) -> None:
        end(self, move, now, effects, num_tokens, error)
        effects.tells[:] = [each for each in effects.tells if not isinstance(each[1], Release)]

    patch.setattr(Moves, "_end", forgetful)


def go_on_without_the_last_token(patch: pytest.MonkeyPatch) -> None:
    go_on = KVImports.go_on
    patch.setattr(
        KVImports, "go_on", lambda self, event, now: go_on(self, replace(event, tokens=event.tokens[:-1]), now)
    )


def go_on_before_the_source_has_stopped(patch: pytest.MonkeyPatch) -> None:
    proceed = KVImports._proceed

    def eager(self: KVImports, pull: _Import, now: float) -> None:
        pull.is_going |= pull.is_staged
        proceed(self, pull, now)

    patch.setattr(KVImports, "_proceed", eager)


def never_say_continue(patch: pytest.MonkeyPatch) -> None:
    hand_over = Moves.hand_over

    def silent(self: Moves, entry: Entry, now: float, effects: Any) -> None:
        hand_over(self, entry, now, effects)
        effects.tells[:] = [each for each in effects.tells if not isinstance(each[1], Continue)]

    patch.setattr(Moves, "hand_over", silent)


def give_a_request_to_two(patch: pytest.MonkeyPatch) -> None:
    submit = Placing._submit

    def twice(self: Placing, entry: Entry, link: EngineLink, *rest: Any) -> None:
        submit(self, entry, link, *rest)
        others = [each for each in self.links.values() if each is not link]
        if others and entry.num_lives > 1:
            others[0].give(entry)

    patch.setattr(Placing, "_submit", twice)


def swallow_the_last_tokens_of_the_source(patch: pytest.MonkeyPatch) -> None:
    hand_over = Gateway._hand_over

    def greedy(self: Gateway, entry: Entry, output: Any, now: float, effects: Any) -> None:
        hand_over(self, entry, output._replace(tokens=()), now, effects)

    patch.setattr(Gateway, "_hand_over", greedy)


def leave_a_target_waiting(patch: pytest.MonkeyPatch) -> None:
    cancel = Moves._cancel

    def rude(self: Moves, move: Move, now: float, effects: Any, error: str, is_there: bool = True) -> None:
        cancel(self, move, now, effects, error, is_there=False)

    patch.setattr(Moves, "_cancel", rude)


def send_blocks_before_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    send = KVExports._send

    def early(self: KVExports, offer: _Export, seq: Any, num_blocks: int, *, is_last: bool) -> None:
        send(self, offer, seq, num_blocks if is_last else len(seq.tables[0]), is_last=is_last)

    patch.setattr(KVExports, "_send", early)


PLANTS: list[Plant] = [
    take_outputs_of_any_attempt,
    lose_a_release,
    go_on_without_the_last_token,
    go_on_before_the_source_has_stopped,
    never_say_continue,
    give_a_request_to_two,
    swallow_the_last_tokens_of_the_source,
    leave_a_target_waiting,
    send_blocks_before_they_are_computed,
]

KINDS = {give_a_request_to_two: "mixed"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(NUM_SEEDS):
        try:
            run_seed(seed, KINDS.get(plant, "moves"))
        except (AssertionError, Violation, Deadlock, TimeLimit) as error:  # else the plant does not fit the code
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:150]}")
            return
    raise AssertionError(f"{NUM_SEEDS} seeds did not notice {plant.__name__}")
