"""Policies by example, without an engine."""

from __future__ import annotations

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.policy import Waiting
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence
from tokenmill.core.work import PATIENCE
from tokenmill.sched.policies import ORDERS, pick
from tokenmill.sched.policies.lpm import LongestPrefixFirst
from tokenmill.sched.queue import WaitingQueue

REQUEST = Request("r", (7,) * 500, SamplingParams(), 4, 0)


def due(name: str, *, num_tokens: int = 500, num_cached: int = 0, arrived: int = 0) -> float:
    return ORDERS[name].due(Waiting(REQUEST, num_tokens, num_cached, arrived, 0.0))


def test_fcfs_knows_no_difference() -> None:
    """Whatever is asked and cached: the order of arrival alone is left."""
    assert due("fcfs") == due("fcfs", num_tokens=1, num_cached=400, arrived=10**6)


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
    queue = WaitingQueue()
    sequences = [Sequence(number, REQUEST, [7]) for number in range(10)]
    for seq in sequences:
        queue.push(seq)
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
    assert [queue.pop().number for _ in range(10)] == list(range(9, -1, -1))


def test_unknown_names_are_errors_that_name_the_nearest() -> None:
    """A misspelt policy does not start an engine."""
    with pytest.raises(ConfigError, match=r"schedule_policy must be one of .*fcfs.* Did you mean 'fcfs'"):
        pick(EngineConfig(groups=full_groups(1), max_model_len=1, schedule_policy="fcsf"))
    assert (
        pick(EngineConfig(groups=full_groups(1), max_model_len=1, schedule_policy="lpm")).order == LongestPrefixFirst()
    )
