"""Which models are loaded, which unloaded and who waits, on a clock of the test's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tokenmill.cluster.on_demand import BUSY_LOOK_S, FAILED_S, Effects, ModelSchedule, Rules, State
from tokenmill.core.errors import BadCheckpoint, Infeasible, InvalidRequest, Overloaded, TokenmillError, Unavailable


class House:
    """A schedule with a shell whose loads and unloads end when the test says so. running: calls that were let in, by
    ticket; order: of what was done."""

    def __init__(self, *names: str, has_work: Callable[[str], bool] = lambda name: False, **rules: object) -> None:
        self.now = 0.0
        self.schedule = ModelSchedule(Rules(**{"max_loaded": 2} | rules), has_work)  # type: ignore[arg-type]
        self.schedule.set_names(names)
        self.num_tickets = 0
        self.named: dict[int, str] = {}
        self.running: set[int] = set()
        self.refused: dict[int, TokenmillError] = {}
        self.under_way: list[tuple[str, str]] = []
        self.order: list[tuple[str, str]] = []

    def do(self, effects: Effects) -> None:
        self.under_way += [("unload", name) for name in effects.unload] + [("load", name) for name in effects.load]
        self.order += [("unload", name) for name in effects.unload] + [("load", name) for name in effects.load]
        self.running |= set(effects.admitted)
        self.refused |= dict(effects.refused)
        states = {name: model.state for name, model in self.schedule.models.items()}
        assert self.schedule.num_with_memory <= (self.schedule.rules.max_loaded or math.inf)
        for ticket in self.running:
            assert states[self.named[ticket]] is State.LOADED, "a call without its model"

    def call(self, name: str, *, is_asked: bool = False) -> int:
        self.num_tickets += 1
        self.named[self.num_tickets] = name
        self.do(self.schedule.enter(self.num_tickets, name, self.now, is_asked=is_asked))
        return self.num_tickets

    def end(self, ticket: int, keep_s: float | None = None) -> None:
        self.running.remove(ticket)
        self.do(self.schedule.leave(self.named[ticket], keep_s, self.now))

    def finish(self, error: TokenmillError | None = None) -> None:
        """The first of the loads and unloads under way is over."""
        what, name = self.under_way.pop(0)
        if what == "unload":
            self.do(self.schedule.unloaded(name, self.now))
        elif error is None:
            self.do(self.schedule.loaded(name, self.now))
        else:
            self.do(self.schedule.failed(name, error, self.now))

    def finish_all(self) -> None:
        while self.under_way:
            self.finish()

    def serve(self, name: str, keep_s: float | None = None) -> None:
        """A call from its begin to its end."""
        ticket = self.call(name)
        self.finish_all()
        self.end(ticket, keep_s)

    def state(self, name: str) -> State:
        return self.schedule.models[name].state


def test_calls_of_one_model_share_its_load() -> None:
    house = House("a", "b")
    tickets = [house.call("a"), house.call("a"), house.call("a")]
    assert house.order == [("load", "a")] and not house.running
    house.finish()
    assert house.running == set(tickets)


def test_the_least_recently_used_idle_model_makes_room() -> None:
    house = House("a", "b", "c")
    for name in ("a", "b", "a", "c"):
        house.now += 1
        house.serve(name)
    assert house.order[-2:] == [("unload", "b"), ("load", "c")]


def test_a_model_with_calls_is_never_unloaded_and_takes_no_more_once_another_waits() -> None:
    house = House("a", "b", "c", max_loaded=1)
    first = house.call("a")
    house.finish()
    other = house.call("c")
    late = house.call("a")
    assert house.order == [("load", "a")] and house.running == {first}
    house.end(first)
    house.finish_all()
    assert house.running == {other}
    house.end(other)
    house.finish_all()
    assert house.running == {late}
    assert [name for what, name in house.order if what == "load"] == ["a", "c", "a"]


def test_who_waits_no_more_gives_the_room_back() -> None:
    house = House("a", "b", max_loaded=1)
    first = house.call("a")
    house.finish()
    waits = house.call("b")
    late = house.call("a")
    assert late not in house.running
    house.do(house.schedule.give_up(waits, house.now))
    assert house.running == {first, late} and house.order == [("load", "a")]


def test_a_model_is_kept_as_long_as_its_last_call_wants_and_the_operator_allows() -> None:
    house = House("a", idle_s=60)
    for keep_s, kept_s in ((None, 60), (5, 5), (1000, 60), (-1, 60), (0, 0)):
        house.serve("a", keep_s)
        due_s = house.schedule.next_due_s(house.now)
        if kept_s:
            assert due_s == house.now + kept_s
            house.now += kept_s - 1
            house.do(house.schedule.ticked(house.now))
            assert house.state("a") is State.LOADED
            house.now += 1
            house.do(house.schedule.ticked(house.now))
        assert house.state("a") is State.UNLOADING
        house.finish()
        assert house.state("a") is State.SLEEPING
    forever = House("a")
    forever.serve("a", -1)
    assert forever.schedule.next_due_s(0) is None


def test_a_model_that_computes_after_its_calls_stays() -> None:
    works = True
    house = House("a", has_work=lambda name: works)
    house.serve("a", 0)
    assert house.state("a") is State.LOADED and house.schedule.next_due_s(house.now) == house.now + BUSY_LOOK_S
    works = False
    house.do(house.schedule.ticked(house.now + BUSY_LOOK_S))
    assert house.state("a") is State.UNLOADING


def test_a_damaged_model_fails_its_calls_alone_and_is_not_tried_again_at_once() -> None:
    house = House("a", "bad", "c")
    good = house.call("a")
    house.finish()
    bad = house.call("bad")
    house.finish(BadCheckpoint("It is truncated."))
    assert isinstance(house.refused[bad], BadCheckpoint) and house.running == {good}
    with pytest.raises(BadCheckpoint):
        house.call("bad")
    house.call("bad", is_asked=True)
    house.finish(BadCheckpoint("It is truncated."))
    house.now += FAILED_S
    house.call("bad")
    assert house.order.count(("load", "bad")) == 3 and ("unload", "a") not in house.order


def test_a_model_that_finds_too_little_memory_waits_for_others_to_go() -> None:
    house = House("a", "b", "big", max_loaded=4)
    for name in ("a", "b"):
        house.serve(name)
        house.now += 1
    call = house.call("big")
    house.finish(Infeasible("too much"))
    assert house.under_way == [("unload", "a")]
    house.finish()
    house.finish(Infeasible("too much"))
    house.finish()
    assert house.under_way == [("load", "big")] and not house.refused
    house.finish(Infeasible("too much"))
    assert isinstance(house.refused[call], Infeasible), "alone it has all there is"


def test_bounds_on_who_waits() -> None:
    house = House("a", max_waiting=2, max_wait_s=30)
    first = house.call("a")
    house.now = 1.0
    house.call("a")
    with pytest.raises(Overloaded):
        house.call("a")
    assert house.schedule.next_due_s(house.now) == 30
    house.now = 30.0
    house.do(house.schedule.ticked(house.now))
    assert list(house.refused) == [first] and isinstance(house.refused[first], Unavailable)


def test_an_operator_loads_and_unloads() -> None:
    house = House("a", autoload=False)
    with pytest.raises(InvalidRequest):
        house.call("a")
    with pytest.raises(InvalidRequest):
        house.schedule.unload("a", house.now)
    asked = house.call("a", is_asked=True)
    house.finish()
    call = house.call("a")
    house.end(asked)
    house.do(house.schedule.unload("a", house.now))
    assert house.state("a") is State.LOADED
    house.end(call)
    house.finish()
    assert house.state("a") is State.UNLOADED
    asleep = House("a", autoload=False, idle_s=1)
    asked = asleep.call("a", is_asked=True)
    asleep.finish()
    asleep.end(asked, 0)
    asleep.finish()
    assert asleep.state("a") is State.SLEEPING
    asleep.call("a")
    assert asleep.state("a") is State.LOADING, "what sleeps is woken"


def test_models_that_come_and_go() -> None:
    house = House("a", "b")
    house.serve("a")
    house.schedule.set_names(["c"])
    assert list(house.schedule.models) == ["a", "c"], "one that is loaded stays until it is not"
    house.do(house.schedule.unload("a", house.now))
    house.finish()
    house.schedule.set_names(["c"])
    assert list(house.schedule.models) == ["c"]


def test_models_that_are_always_busy_keep_nobody_out() -> None:
    """Of two models each new call comes before the last one ends; a call for a third waits for no more than the calls
    that were open when it came."""
    house = House("a", "b", "c")
    open_calls = {name: house.call(name) for name in ("a", "b")}
    house.finish_all()
    waits = house.call("c")
    for _ in range(4):
        for name in ("a", "b"):
            late, before = house.call(name), open_calls[name]
            if before in house.running:
                house.end(before)
                open_calls[name] = late
            house.finish_all()
    assert waits in house.running


@pytest.mark.parametrize("seed", range(40))
def test_nobody_starves(seed: int) -> None:
    """Eight callers over three models with room for one or two, whatever ends first: while a call waits, no model is
    loaded twice before its own is, and all calls come to their end."""
    rng = random.Random(seed)
    names = ("a", "b", "c")
    house = House(*names, max_loaded=rng.choice((1, 2)))
    open_calls: dict[int, int] = {}
    came_at: dict[int, int] = {}
    num_calls = 0
    while num_calls < 200 or open_calls:
        house.now += 1
        idle = [caller for caller in range(8) if caller not in open_calls.values()] if num_calls < 200 else []
        running = sorted(house.running)
        what = rng.choice(["call"] * bool(idle) + ["end"] * bool(running) + ["finish"] * bool(house.under_way))
        if what == "call":
            caller = rng.choice(idle)
            came_at[house.num_tickets + 1] = len(house.order)
            num_calls += 1
            open_calls[house.call("a" if caller < 4 else rng.choice(names))] = caller
        elif what == "end":
            ticket = rng.choice(running)
            house.end(ticket)
            del open_calls[ticket]
        else:
            house.finish()
        for ticket in [each for each in came_at if each in house.running]:
            loads = [name for done, name in house.order[came_at.pop(ticket) :] if done == "load"]
            before = loads[: loads.index(house.named[ticket])] if house.named[ticket] in loads else loads
            assert len(before) == len(set(before)), f"seed {seed}: {loads} while {house.named[ticket]} was waited for"
    assert not house.refused and not house.schedule.num_waiting
