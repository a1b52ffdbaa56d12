"""FairSlots between tenants and classes: who has received least goes first, rows kept for others, what is ahead."""

from __future__ import annotations

import random

import pytest

from tokenmill.cluster.fair_queueing import Ticket
from tokenmill.cluster.slots import FairSlots, Room
from tokenmill.core.fairness import class_of
from tokenmill.core.request import IDLE_PRIORITY, Request, SamplingParams
from tokenmill.core.terms import Terms

SAMPLING = SamplingParams()


def tickets(
    name: str, num: int, terms: Terms, due: int = 0, cost: int = 1, priority: int = 0, client: str = ""
) -> list[Ticket]:
    requests = [
        Request(f"{name}{i}", (1,) * cost, SAMPLING, 4, 0, choice=i, priority=priority, terms=terms) for i in range(num)
    ]
    return [Ticket(each, client or terms.tenant, due, cost, class_of(each)) for each in requests]


def choose_all(slots: FairSlots, most: int = 1000) -> list[str]:
    ids: list[str] = []
    while len(ids) < most and (request := slots.choose()) is not None:
        ids.append(request.id)
        slots.start(request.id)
    return ids


def test_who_has_received_least_is_next() -> None:
    """Prompts count as they get a place, output as it comes, divided by the weight; when it was due matters not."""
    drawn: dict[str, int] = {}
    slots = FairSlots(lambda request_id: drawn.get(request_id, 0))
    slots.room = Room(1, 1000)
    slots.join(tickets("a", 9, Terms("a"), due=-5, cost=10))
    slots.join(tickets("b", 9, Terms("b", weight=2.0), cost=10))
    served = []
    for _ in range(9):
        (first, second) = choose_all(slots)[:2] if not served else (*choose_all(slots), "")
        served += [each for each in (first, second) if each]
        oldest = served[-2]
        drawn[oldest] = 5
        slots.settle()
        slots.end(oldest, 5)
    assert served[:2] == ["a0", "b0"]
    assert sum(each.startswith("b") for each in served) in (6, 7), served


def test_who_comes_back_is_next_and_has_saved_nothing_up() -> None:
    """Beside a tenant with a long queue: one place for it at once, then both in turn."""
    slots = FairSlots()
    slots.room = Room(2, 1000)
    slots.join(tickets("hog", 40, Terms("hog"), cost=10))
    (first, *_) = ids = choose_all(slots)
    assert len(ids) == 3
    slots.join(tickets("n", 10, Terms("n"), due=99, cost=10))
    order = []
    for _ in range(6):
        slots.end(ids.pop(0))
        ids += (new := choose_all(slots))
        order += new
    assert first == "hog0" and sum(each.startswith("n") for each in order) == 3, order


def test_rows_are_kept_for_tenants_that_have_fewer_than_their_share() -> None:
    """One that has its share leaves an eighth of the rows free while others have something open; nobody else does."""
    slots = FairSlots()
    slots.room = Room(16, 1000)
    slots.join(tickets("m", 3, Terms("modest"), due=9))
    assert len(choose_all(slots)) == 3
    slots.join(tickets("hog", 40, Terms("hog")))
    assert len(choose_all(slots)) == 11 and slots.num_placed == 14
    slots.join(tickets("n", 5, Terms("modest"), due=9))
    came = choose_all(slots)
    assert came[0] == "n0" and len(came) == 3, "who comes back is next"


def test_a_class_keeps_no_place_from_a_higher_one() -> None:
    """Whatever a lower class holds, a higher one has all slots beside it, and its turn comes first."""
    slots = FairSlots()
    slots.room = Room(8, 1000)
    slots.join(tickets("low", 40, Terms("l", 2)))
    slots.join(tickets("idle", 40, Terms("l", 0), priority=IDLE_PRIORITY))
    low = choose_all(slots)
    assert len(low) == 7 and low[0] == "low0"
    slots.join(tickets("usual", 40, Terms("u")))
    assert choose_all(slots) == [f"usual{number}" for number in range(7)]
    slots.join(tickets("high", 4, Terms("h", 0)))
    assert choose_all(slots) == [f"high{number}" for number in range(4)]
    for number in range(4):
        slots.end(f"high{number}")
    slots.join(tickets("other", 9, Terms("o")))
    assert choose_all(slots) == ["other0", "other1"]


def test_what_is_ahead_of_a_tenants_newcomer() -> None:
    """All of higher classes, nothing of lower ones, of another tenant as much as brings both level."""
    slots = FairSlots()
    slots.room = Room(1, 1000)
    slots.join(tickets("run", 2, Terms("hog"), cost=10))
    choose_all(slots)
    slots.join(tickets("hog", 50, Terms("hog"), due=1, cost=10))
    new = Terms("new")
    assert slots.ahead("new", 0, 99, new) == (0, 0), "it is next, whoever came before"
    assert slots.ahead("new", 0, 99, Terms("new", 2)) == (50, 500)
    assert slots.ahead("new", 0, 99, Terms("new", 0)) == (0, 0)
    slots.join(tickets("own", 3, new, due=1, cost=20, client="new"))
    assert slots.ahead("new", 0, 99, new) == (1 + 2, 20 + 20), "its own call has a turn, and the other until level"
    assert slots.ahead_of_own("new", 0, 99, new) == 1


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events_keeps_shares_even_and_leaves_nothing_behind(seed: int) -> None:
    """Tenants, classes, weights, priorities and ends in any order: the service of tenants that wait all along differs
    by no more than what one choice and the rows in hand bring; and the book ends empty."""
    rng = random.Random(seed)
    drawn: dict[str, int] = {}
    slots = FairSlots(lambda request_id: drawn[request_id])
    slots.room = Room(rng.choice([1, 4, 16]), 100)
    names = {"a": Terms("a"), "b": Terms("b", weight=2.0), "c": Terms("c"), "d": Terms("d", 2)}
    placed: dict[str, Request] = {}
    num_open = 0
    service = {"a": 0.0, "b": 0.0}
    differences = []
    for number in range(600):
        for name in ("a", "b"):  # they never cease to wait
            if number % 8 == 0:
                for i in range(2 * slots.room.num_slots):
                    slots.join(tickets(f"{name}{number}.{i}-", 1, names[name], rng.randint(0, 50), rng.randint(1, 40)))
                    num_open += 1
        if rng.random() < 0.2:
            name, num = rng.choice("cd"), rng.choice([1, 3])
            priority = rng.choice([0, 5, IDLE_PRIORITY])
            slots.join(tickets(f"{name}{number}-", num, names[name], 0, rng.randint(1, 40), priority))
            num_open += num
        while (request := slots.choose()) is not None:
            placed[request.id] = request
            drawn[request.id] = 0
            if request.terms.tenant in service:
                service[request.terms.tenant] += len(request.prompt_tokens) / request.terms.weight
        for name in sorted(placed):
            drawn[name] += 1
            tenant, weight = placed[name].terms.tenant, placed[name].terms.weight
            if tenant in service:
                service[tenant] += 2 / weight
            if drawn[name] == 1:
                slots.start(name)
            if drawn[name] > rng.randint(1, 20):
                slots.end(name, drawn.pop(name))
                del placed[name]
                num_open -= 1
        slots.settle()
        differences.append(service["a"] - service["b"])
    assert min(service.values()) > 300
    assert max(differences) - min(differences) <= 2 * (40 + 2 * 20 * slots.room.num_slots)
    while num_open:
        while (request := slots.choose()) is not None:
            placed[request.id] = request
        assert placed, "choices wait and nobody gets a place"
        num_open -= len(placed)
        for name in sorted(placed):
            slots.end(name)
        placed = {}
    assert not slots._tickets and not slots._turns and not slots._shares and not slots._holders
    assert not slots._num_open and not slots._waiting and not slots._charged and slots.num_accounts == 0
    assert slots.num_placed == 0 and not any(slots._placed)
