"""What idle work gets on a machine where even a step without rows takes longer than its bound."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from ledger import FakeLedger
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.sequence import Status
from tokenmill.core.terms import Terms
from tokenmill.sched.budget import BLOCK, alone
from tokenmill.sched.policies import pick


def test_prompts_go_on_where_nothing_is_drawn_and_every_step_is_slow() -> None:
    """Not even one row is known to fit, and there is no row to choose: prompts get a block of tokens."""
    slow = Costs(step_s=1.0)
    prompt: Any = Mock(num_planned=0, num_pending=0, tokens=[1] * 100)
    for running in ([], [prompt]):
        chosen, num_tokens = alone(running, 512, slow)
        assert chosen == running and num_tokens == BLOCK


def test_idle_work_that_gave_way_to_idle_work_gets_no_row() -> None:
    """Where others leave time and no block is free, one that is preempted for an older one's next block waits."""
    config = EngineConfig(full_groups(9), max_model_len=60, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    engine = FakeLedger(config, pick(config))
    engine.costs = Costs(step_s=0.001, row_s=1e-6, token_s=1e-6)
    idle = [engine.add(7, 20, priority=IDLE_PRIORITY) for _ in range(2)]
    while idle[-1].num_planned < 8:  # both need a block for their next token
        engine.step()
    live = engine.add(9, 20, terms=Terms(tpot_s=1.0))
    engine.step()
    engine.num_free = 0
    assert engine.step() == [(live.number, 1), (idle[0].number, 1)]
    assert [seq.status for seq in idle] == [Status.RUNNING, Status.WAITING]
