"""Whose choice gets the next place: rounds over clients and calls, shares, what is ahead; and any order of events."""

from __future__ import annotations

import random

import pytest

from tokenmill.cluster.fair_queueing import Ticket
from tokenmill.cluster.slots import FairSlots, Room
from tokenmill.core.fairness import class_of
from tokenmill.core.request import IDLE_PRIORITY, Request, SamplingParams

SAMPLING = SamplingParams()
ROOM = Room(num_rows=16, step_tokens=100)


def tickets(name: str, num: int = 1, client: str = "a", due: int = 0, cost: int = 1, priority: int = 0) -> list[Ticket]:
    requests = [Request(f"{name}{i}", (1,), SAMPLING, 4, 0, choice=i, priority=priority) for i in range(num)]
    return [Ticket(each, client, due, cost, class_of(each)) for each in requests]


def chosen(slots: FairSlots, most: int = 1000) -> list[str]:
    ids = []
    while len(ids) < most and (request := slots.choose()) is not None:
        ids.append(request.id)
        slots.start(request.id)
    return ids


def test_without_a_room_all_go_at_once_in_order() -> None:
    slots = FairSlots()
    slots.join(tickets("x", 3, due=5))
    slots.join(tickets("y", 2, client="b"))
    assert sorted(chosen(slots)) == ["x0", "x1", "x2", "y0", "y1"] and slots.num_waiting == 0


def test_places_go_round_over_clients_and_then_over_calls() -> None:
    """A call of many choices has one in each round, and so has each client, whatever it has waiting."""
    slots = FairSlots()
    slots.room = ROOM
    slots.join(tickets("hog", 40))
    first = chosen(slots)
    assert len(first) == 13, "an eighth of the rows is closed to it, and a sixteenth to one call of it"
    slots.join(tickets("mine", 2, due=9))
    slots.join(tickets("other", 3, client="b", due=9))
    assert chosen(slots) == ["other0", "mine0", "other1", "other2"], "the rest is for others"
    for request_id in first[:6]:
        slots.end(request_id)
    assert chosen(slots) == ["hog13", "mine1", "hog14", "hog15", "hog16", "hog17"]


def test_nobody_saves_rounds_up_while_it_may_not_be_served() -> None:
    """A client that stood at its bound while others were served has its turn afterwards, and no more."""
    slots = FairSlots()
    slots.room = Room(8, 100)
    slots.join(tickets("hog", 40))
    assert len(chosen(slots)) == 7
    slots.join(tickets("p", 40, client="b", due=1))
    assert chosen(slots) == ["p0", "p1"]
    for number in range(1, 20):
        slots.end(f"p{number}")
        assert chosen(slots) == [f"p{number + 1}"]
    for number in range(6):
        slots.end(f"hog{number}")
    assert sum(name.startswith("p") for name in chosen(slots)) >= 2


def test_priorities_come_before_rounds_and_what_is_due_first_before_the_rest_of_a_round() -> None:
    slots = FairSlots()
    slots.room = Room(1, 100)
    for name, client, due, priority in (
        ("late", "a", 9, 0),
        ("soon", "b", 3, 0),
        ("low", "c", 0, 1),
        ("top", "a", 99, -1),
    ):
        slots.join(tickets(name, 1, client, due, priority=priority))
    served = []
    while ids := chosen(slots, 1):
        served += ids
        slots.end(ids[0])
    assert served == ["top0", "soon0", "late0", "low0"]


def test_a_client_has_only_so_much_on_its_way_before_a_prompt_but_a_short_one_passes() -> None:
    """What the engine holds cannot be overtaken by others, so it holds little; order of service needs no more."""
    slots = FairSlots()
    slots.room = ROOM
    for number in range(4):
        slots.join(tickets(f"long{number}", cost=300, due=1000 + number))
    assert [request.id for request in iter(slots.choose, None)] == ["long00", "long10"]
    slots.join(tickets("short", cost=3, due=10))
    slots.join(tickets("other", cost=300, due=2000, client="b"))
    assert {request.id for request in iter(slots.choose, None)} == {"short0", "other0"}
    slots.start("long00")
    assert [request.id for request in iter(slots.choose, None)] == ["long20"]


def test_what_is_ahead_of_a_newcomer() -> None:
    """On its way and due before; of its own calls one choice each; of each other client as many as that makes."""
    slots = FairSlots()
    slots.room = Room(1, 1)
    slots.join(tickets("run", cost=50, due=0))
    slots.join(tickets("hog", 100, client="h", cost=2, due=5))
    assert slots.choose() is not None and slots.choose() is not None
    assert slots.num_waiting == 99
    assert slots.ahead("n", 0, 10) == (3, 54)
    assert slots.ahead("n", 0, -1) == (1, 2)
    assert slots.ahead("n", -1, 10) == (0, 0)
    assert slots.ahead("n", 1, 10) == (101, 50 + 2 + 99 * 2)
    slots.join(tickets("mine", 30, client="n", cost=7, due=6))
    assert slots.ahead("n", 0, 10) == (2 + 1 + 2, 52 + 7 + 4)
    assert (slots.ahead_of_own("n", 0, 10), slots.ahead_of_own("n", 0, 5), slots.ahead_of_own("z", 0, 9)) == (
        1,
        0,
        0,
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_events_keeps_the_book_and_leaves_nothing_behind(seed: int) -> None:
    """Nobody exceeds a share, what is chosen is open and was waiting, all get a place, and the book ends empty."""
    rng = random.Random(seed)
    slots = FairSlots()
    slots.room = Room(rng.choice([1, 4, 8, 20]), rng.choice([1, 10, 1000]))
    placed: dict[str, str] = {}
    waiting: dict[str, str] = {}
    for number in range(400):
        event = rng.random()
        if event < 0.3:
            client = rng.choice("abcd")
            new = tickets(f"c{number}-", rng.choice([1, 1, 3, 30]), client, rng.randint(0, 50), rng.randint(1, 40),
                          rng.choice([0, 0, 0, -1, 7]))  # fmt: skip
            slots.join(new)
            waiting |= {ticket.request.id: client for ticket in new}
        elif event < 0.5 and waiting and rng.random() < 0.3:
            name = rng.choice(sorted(waiting))
            del waiting[name]
            assert slots.end(name)
        elif event < 0.8 and placed:
            name = rng.choice(sorted(placed))
            slots.start(name)
            if rng.random() < 0.7:
                del placed[name]
                assert not slots.end(name)
        while rng.random() < 0.8 and (request := slots.choose()) is not None:
            placed[request.id] = waiting.pop(request.id)
        assert slots.num_waiting == len(waiting) and slots.num_placed == len(placed) <= slots.room.num_slots
        for client in "abcd":
            held = sum(each == client for each in placed.values())
            assert held <= slots.room.most_of_one
            assert slots.num_open_of(client) == held + sum(each == client for each in waiting.values())
            slots.ahead(client, 0, 25)
    for _ in range(len(waiting) + 1):
        for name in sorted(placed):
            slots.end(name)
        placed = {}
        while (request := slots.choose()) is not None:
            placed[request.id] = waiting.pop(request.id)
            slots.start(request.id)
        if not waiting and not placed:
            break
    assert not waiting and not slots._holders and not slots._tickets and not slots._turns and not slots._shares


def test_what_left_while_it_waited_is_not_kept() -> None:
    """Calls that come and go behind a full engine leave no trace that grows."""
    slots = FairSlots()
    slots.room = Room(1, 1)
    slots.join(tickets("run", cost=9))
    slots.choose()
    slots.join(tickets("next", cost=9, due=-5))
    for number in range(1000):
        slots.join(tickets(f"x{number}", 2, client="ab"[number % 2], due=number))
        for choice in range(2):
            assert slots.end(f"x{number}{choice}")
    (turns,) = slots._turns.values()
    lines = [line for ring in turns._rings.values() for line in ring.lines.values()]
    assert len(turns._heap) < 100 and all(len(line.calls) < 50 for line in lines)


def test_the_lowest_priority_keeps_no_place_from_others() -> None:
    """It has slots while there are rows for it; others have all of theirs beside it."""
    slots = FairSlots()
    slots.room = Room(8, 100)
    slots.join(tickets("idle", 40, client="batches", priority=IDLE_PRIORITY))
    idle = chosen(slots)
    assert len(idle) == 7
    slots.join(tickets("p", 40, client="b"))
    slots.join(tickets("q", 40, client="c"))
    assert len(chosen(slots)) == slots.room.num_slots == 9
    for request_id in idle:
        slots.end(request_id)
    assert chosen(slots) == []
    for number in range(5):
        slots.end(f"p{number}")
    assert all(not name.startswith("idle") for name in chosen(slots))
