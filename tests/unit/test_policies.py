"""Policies by example, without an engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ledger import FakeLedger, arrive, queue_with, take_next
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.policy import Waiting
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence, Status
from tokenmill.core.work import PATIENCE
from tokenmill.sched.policies import ORDERS, pick
from tokenmill.sched.policies.lpm import LongestPrefixFirst
from tokenmill.sched.policies.spare_ends import SpareEnds

REQUEST = Request("r", (7,) * 500, SamplingParams(), 4, 0)


def due(name: str, *, num_tokens: int = 500, num_cached: int = 0, arrived: int = 0) -> float:
    return ORDERS[name].due(Waiting(REQUEST, num_tokens, num_cached, arrived, 0.0))


def test_fcfs_knows_no_difference() -> None:
    """Whatever is asked and cached: the order of arrival alone is left."""
    assert due("fcfs", arrived=7) == due("fcfs", num_tokens=1, num_cached=400, arrived=7) < due("fcfs", arrived=8)


def test_short_prompts_first_counts_what_is_to_be_computed() -> None:
    """A cached prompt is short; one that is shorter by d tokens passes for PATIENCE * d units of work."""
    name = "short-prompts-first"
    assert due(name, num_cached=400) == due(name, num_tokens=100) < due(name)
    assert due(name, num_tokens=100, arrived=400 * PATIENCE - 1) < due(name) == due(name, num_cached=400, arrived=25600)


def test_lpm_prefers_hits_for_a_while() -> None:
    """The longer hit goes first, however long the prompt, unless the other came so much earlier."""
    assert due("lpm", num_cached=32) < due("lpm", num_cached=16) < due("lpm", num_tokens=1)
    assert due("lpm", num_cached=16, arrived=16 * PATIENCE + 1) > due("lpm")


@pytest.mark.parametrize("most", [1, 3, 100])
def test_places_are_asked_for_again_in_turn(most: int) -> None:
    """At most so many at a time, all within a few times; the queue then serves by the new places."""
    queue = queue_with(*(Sequence(number, REQUEST, [7]) for number in range(10)))
    asked: list[int] = []

    def reconsider(seq: Sequence) -> None:
        asked.append(seq.number)
        seq.due = -seq.number

    num_before = 0
    for _ in range(40):
        queue.refresh(most, reconsider)
        assert len(asked) - num_before <= most
        num_before = len(asked)
    assert set(asked) == set(range(10))
    assert [take_next(queue).number for _ in range(10)] == list(range(9, -1, -1))


def test_what_ended_while_waiting_is_not_kept() -> None:
    """Behind one that waits long, however many come and go: each holds its prompt."""
    queue = queue_with(Sequence(0, REQUEST, [7]))
    for number in range(1, 2000):
        seq = Sequence(number, REQUEST, [7])
        arrive(queue, seq)
        queue.discard(seq)
        seq.status = Status.FINISHED
        queue.service.close(seq)
    assert len(queue) == 1 and sum(len(line.heap) for line in queue._lines.values()) < 100
    assert take_next(queue).number == 0 and queue.peek() is None


def test_unknown_names_are_errors_that_name_the_nearest() -> None:
    """A misspelt policy does not start an engine."""
    with pytest.raises(ConfigError, match=r"scheduling_policy must be one of .*fcfs.* Did you mean 'fcfs'"):
        pick(EngineConfig(groups=full_groups(1), max_model_len=1, scheduling_policy="fcsf"))
    assert (
        pick(EngineConfig(groups=full_groups(1), max_model_len=1, scheduling_policy="lpm")).order
        == LongestPrefixFirst()
    )


CONFIG = EngineConfig(full_groups(100), max_model_len=1000, max_num_seqs=1, max_num_batched_tokens=72)


def ledger(policy: str, config: EngineConfig = CONFIG) -> FakeLedger:
    return FakeLedger(config, pick(replace(config, scheduling_policy=policy)))


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [4, 0, 1, 2, 3]), ("short-prompts-first", [4, 3, 2, 1, 0]), ("lpm", [4, 1, 2, 0, 3])],
)
def test_orders_serve_as_they_say(policy: str, order: list[int]) -> None:
    """Four that arrive together: by arrival, by what is left to compute, by what is cached; priority comes first."""
    fake = ledger(policy)
    fake.add(300)
    fake.add(290, num_cached=160)
    fake.add(150, num_cached=32)
    fake.add(20)
    fake.add(500, priority=-1)
    assert fake.serve() == order


def test_lpm_sees_what_comes_to_be_cached_while_it_waits() -> None:
    """A hit that was not there on arrival counts at the next step; one that was evicted counts no more."""
    fake = ledger("lpm")
    first, had, gets = fake.add(100), fake.add(100, num_cached=64), fake.add(100)
    fake.cached |= {had.number: 0, gets.number: 64}
    assert fake.serve() == [gets.number, first.number, had.number]


def test_lpm_starves_nobody() -> None:
    """Prompts that are cached keep coming, more than can be served; one that is not comes first after a bounded time,
    which is that of PATIENCE times the longest hit."""
    fake = ledger("lpm")
    lonely = fake.add(64, 1)
    for _ in range(200):
        fake.add(80, 1, num_cached=64)
        fake.add(80, 1, num_cached=64)
        fake.step()
        fake.step()
        if lonely.num_computed:
            break
    assert 0 < fake.work <= 64 * PATIENCE + 2 * (72 + 9)


def test_a_ninth_of_a_step_is_left_for_the_ends_of_prompts() -> None:
    """In whole blocks. A chunk beside it, and the end of a short prompt in the same step."""
    assert SpareEnds().most_tokens(replace(CONFIG, max_num_batched_tokens=576), 10) == 512
    assert SpareEnds().most_tokens(CONFIG, 0) == 72
    fake = ledger("fcfs", replace(CONFIG, max_num_batched_tokens=144, max_num_seqs=8))
    fake.add(500)
    fake.add(16)
    assert fake.step() == [(0, 128), (1, 16)]


def test_the_latest_gives_way() -> None:
    """Of the lowest priority the last to arrive; whoever came first of all is never preempted."""
    fake = ledger("fcfs", replace(CONFIG, groups=full_groups(8), max_num_seqs=8, max_num_batched_tokens=144))
    first, second = fake.add(40, 40), fake.add(40, 40)
    fake.step()
    urgent = fake.add(16, 40, priority=-1)
    fake.serve()
    assert (urgent.num_preemptions, first.num_preemptions) == (0, 0)
    assert second.num_preemptions > 0


def test_a_policy_that_takes_from_its_seniors_is_stopped() -> None:
    """Blocks go by seniority, which keeps somebody going on for ever: another choice is a bug."""

    class First:
        def victim(self, running: object, asking: int) -> int:
            return 0

    config = replace(CONFIG, groups=full_groups(6), max_num_seqs=8)
    fake = FakeLedger(config, replace(pick(config), preemption=First()))
    fake.add(30, 40)
    fake.add(30, 40)
    with pytest.raises(AssertionError, match="not junior"):
        fake.serve()
