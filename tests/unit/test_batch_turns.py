"""Whose line begins next."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

import pytest

from tokenmill.server.files.calls import Turn, Turns


def order(owners: list[str], num_turns: int) -> list[int]:
    """Which batch, by its place in `owners`, has each turn, where each comes back as soon as it has had one."""
    turns = Turns()
    waiting = [turns.join(owner) for owner in owners]
    had = []
    for _ in range(num_turns):
        (number,) = [number for number, turn in enumerate(waiting) if turn.has_come.is_set()]
        had.append(number)
        turns.leave(waiting[number])
        waiting[number] = turns.join(owners[number])
    return had


@pytest.mark.parametrize("num_others", [1, 2, 5])
def test_owners_have_as_many_turns_whatever_their_batches(num_others: int) -> None:
    """One with 32 batches and others with one each: in any row of so many turns as there are owners, each has one."""
    owners = ["many"] * 32 + [f"other {number}" for number in range(num_others)]
    had = [owners[number] for number in order(owners, 200)]
    size = num_others + 1
    for start in range(len(had) - size):
        assert len(set(had[start : start + size])) == size


def test_an_owners_batches_take_turns() -> None:
    """None has a second turn before each of the owner's others has had one."""
    had = [number for number in order(["a", "b", "a", "a", "b"], 60) if number in (0, 2, 3)]
    assert had == list(itertools.islice(itertools.cycle((0, 2, 3)), len(had)))


def test_who_comes_waits_for_one_turn_of_each_other_at_most() -> None:
    turns = Turns()
    first = turns.join("many")
    others = [turns.join("many") for _ in range(31)]
    new = turns.join("new")
    turns.leave(first)
    assert new.has_come.is_set() and not any(turn.has_come.is_set() for turn in others)


def test_one_turn_is_on_whoever_leaves() -> None:
    """Batches come, begin a line or give up in any order: always exactly one of those that wait has the turn, and when
    all have left nobody is remembered."""
    draw = random.Random(5)
    turns = Turns()
    waiting: list[Turn] = []
    for _ in range(3000):
        if waiting and draw.random() < 0.5:
            turns.leave(waiting.pop(draw.randrange(len(waiting))))
        else:
            waiting.append(turns.join(draw.choice("abcd")))
        assert Counter(turn.has_come.is_set() for turn in waiting)[True] == bool(waiting)
    for turn in waiting:
        turns.leave(turn)
    assert vars(turns) == vars(Turns())


def test_a_cancelled_wait_leaves_the_queue() -> None:
    """Whether or not its turn had come: the next goes on."""

    async def main() -> None:
        turns = Turns()
        had: list[str] = []

        async def wait(owner: str) -> None:
            async with turns.of(owner):
                had.append(owner)

        now = turns.join("first")
        tasks = [asyncio.create_task(wait(owner)) for owner in ("b", "c", "d")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        turns.leave(now)
        tasks[0].cancel()  # its turn has come, and it has not noticed
        await asyncio.gather(*tasks, return_exceptions=True)
        assert had == ["d"]

    asyncio.run(main())
