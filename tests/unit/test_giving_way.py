"""Running sequences of lower classes give way to waiting ones of higher classes; a tenant keeps to its share of KV."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger import FakeLedger
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.sequence import Sequence, Status
from tokenmill.core.terms import Terms
from tokenmill.sched.policies import pick

CONFIG = EngineConfig(
    full_groups(40), max_model_len=600, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, steps_in_flight=1
)
LOW, USUAL, HIGH = (Terms(f"p{number}", number) for number in (2, 1, 0))


def fake(config: EngineConfig = CONFIG) -> FakeLedger:
    return FakeLedger(config, pick(config))


def running(*sequences: Sequence) -> list[bool]:
    return [seq.status is Status.RUNNING for seq in sequences]


def test_a_row_is_given_up_by_the_lowest_class_and_there_by_the_last_to_come() -> None:
    """At once, as many as wait; who gave way goes on when there is room again, with the tokens it has."""
    engine = fake()
    low = [engine.add(4, 30, terms=LOW) for _ in range(2)]
    usual = [engine.add(4, 30, terms=USUAL) for _ in range(2)]
    engine.step()
    assert running(*low, *usual) == [True] * 4
    high = [engine.add(4, 3, terms=HIGH) for _ in range(3)]
    engine.step()
    assert running(*low, *usual, *high) == [False, False, True, False, True, True, True]
    assert [seq.num_output for seq in low] == [1, 1]
    while any(seq.status is not Status.FINISHED for seq in (*low, *usual, *high)):
        assert engine.step()
    assert [seq.num_preemptions for seq in (*low, *usual)] == [1, 1, 0, 1]


def test_no_one_gives_way_to_its_own_class_or_where_that_would_not_help() -> None:
    """Nor to a priority within a class; nor where the higher one does not fit even then."""
    engine = fake()
    low = [engine.add(4, 30, terms=LOW) for _ in range(4)]
    engine.step()
    urgent = engine.add(4, 3, priority=-99, terms=LOW)
    engine.step()
    assert running(*low, urgent) == [True] * 4 + [False]
    engine = fake()
    high = engine.add(120, 30, terms=HIGH)
    low = [engine.add(4, 30, terms=LOW)]
    for _ in range(4):
        engine.step()
    assert running(high, *low) == [True, True]
    large = engine.add(60, 3, terms=USUAL)
    engine.step()
    assert running(high, *low, large) == [True, True, False], "one block more or less does not make room for it"


def test_blocks_are_given_up_to_a_higher_class() -> None:
    """As many as it needs and no more, from the tenant that has received most."""
    engine = fake()
    quiet = engine.add(40, 9, terms=Terms("quiet", 2))
    greedy = engine.add(100, 9, terms=Terms("greedy", 2))
    while greedy.num_output < 2:
        engine.step()
    high = engine.add(30, 3, terms=HIGH)
    engine.step()
    assert running(quiet, greedy, high) == [True, False, True]


def test_one_with_a_row_in_flight_is_held_back_first() -> None:
    """It gets no further row, and gives way when the step that has its row is over."""
    engine = fake(replace(CONFIG, steps_in_flight=2))
    low = [engine.add(4, 30, terms=LOW) for _ in range(4)]
    engine.step()
    high = engine.add(4, 3, terms=HIGH)
    for seq in low:
        seq.rows_in_flight = 1
    assert [number for number, _ in engine.plan()] == [0, 1, 2]
    assert running(*low, high) == [True] * 4 + [False]
    engine.end()
    low[3].rows_in_flight = 0
    engine.step()
    assert running(*low, high) == [True, True, True, False, True]


def test_a_tenant_that_holds_its_share_is_passed() -> None:
    """Its next request waits although there is room; those of others go by."""
    engine = fake()
    mine = Terms("mine", kv_share=0.25)
    first = engine.add(30, 4, terms=mine)
    second = engine.add(30, 4, terms=mine)
    other = engine.add(30, 4, terms=Terms("other"))
    for _ in range(3):
        engine.step()
    assert running(first, second, other) == [True, False, True]
    while second.status is not Status.FINISHED:
        engine.step()
        assert held(engine, "mine") <= 10


def test_answers_that_outgrow_a_share_take_turns() -> None:
    """The junior of a tenant's own gives way, others of theirs do not; and all come to an end."""
    engine = fake()
    mine = [engine.add(12, 28, terms=Terms("mine", kv_share=0.3)) for _ in range(2)]
    other = engine.add(12, 28, terms=Terms("other"))
    most = 0
    while any(seq.status is not Status.FINISHED for seq in (*mine, other)):
        assert engine.step()
        most = max(most, held(engine, "mine"))
    assert 10 <= most <= 12 and sum(seq.num_preemptions for seq in mine) >= 1 and not other.num_preemptions


def test_what_is_larger_than_a_share_runs_alone() -> None:
    """A tenant's only request may take what it needs, and the next one waits for it."""
    engine = fake()
    large = engine.add(100, 4, terms=Terms("mine", kv_share=0.1))
    small = engine.add(4, 4, terms=Terms("mine", kv_share=0.1))
    idle = engine.add(4, 4, priority=IDLE_PRIORITY, terms=Terms("other"))
    order = engine.serve()
    assert order == [large.number, small.number, idle.number] or order == [small.number, large.number, idle.number]


def held(engine: FakeLedger, tenant: str) -> int:
    return sum(len(seq.tables[0]) for seq in engine.running if seq.request.terms.tenant == tenant)


def test_a_tenant_at_its_share_keeps_nobody_behind_it_from_a_row() -> None:
    """Who waits first may not hold more blocks: the next of its class has its row from a lower one all the same, and of
    the lower ones no more give way than can be used."""
    engine = fake()
    full = Terms("full", 0, kv_share=0.2)
    holder = engine.add(28, 30, terms=full)
    low = [engine.add(4, 30, terms=LOW) for _ in range(3)]
    engine.step()
    waiting = [engine.add(8, 3, terms=full, priority=-1) for _ in range(2)]
    engine.step()
    assert running(holder, *low, *waiting) == [True] * 4 + [False] * 2
    other = engine.add(4, 3, terms=Terms("other", 0))
    engine.step()
    assert running(holder, *low, *waiting, other) == [True, True, True, False, False, False, True]


def test_running_prompts_go_on_by_rank() -> None:
    """A short prompt that is let in before a long one that runs goes on before it, too."""
    config = replace(
        CONFIG, groups=full_groups(400), max_num_batched_tokens=16, scheduling_policy="short-prompts-first"
    )
    engine = fake(config)
    long = engine.add(400)
    engine.step()
    short = engine.add(40)
    rows = [engine.step()[0] for _ in range(3)]
    assert [number for number, _ in rows] == [short.number] * 3 and long.num_output == 0


@pytest.mark.parametrize(
    ("rows", "blocks", "kv_share", "has_room"),
    [(2, 4000, 1.0, False), (3, 4000, 1.0, True), (3, 760, 1.0, False), (3, 4000, 0.01, False)],
    ids=["no row", "room", "no block", "no share"],
)
def test_who_waits_and_has_no_room_makes_no_step_shorter(
    rows: int, blocks: int, kv_share: float, has_room: bool
) -> None:
    """A long prompt gets full steps, as if nobody waited, where the other tenant's cannot be let in."""
    config = replace(CONFIG, groups=full_groups(blocks), max_model_len=4000, max_num_seqs=rows)
    mine, other = Terms("mine"), Terms("other", kv_share=kv_share)
    engine = fake(config)
    engine.costs = Costs(step_s=0.004, row_s=0.0002, token_s=0.0005)
    holder = engine.add(4, 900, terms=other)
    while not holder.num_output:
        engine.step()
    long = engine.add(2900, terms=mine)
    for _ in range(20):  # of the other tenant, no prompt was computed lately
        engine.step()
    waits = engine.add(200, terms=other)
    taken = [dict(engine.step()) for _ in range(3)]
    assert (waits.status is Status.WAITING) is not has_room
    assert (min(each.get(long.number, 0) for each in taken) >= 60) is not has_room, taken
