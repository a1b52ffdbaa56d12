"""What idle work gets on a machine where even a step without rows takes longer than its bound."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from tokenmill.core.cost import Costs
from tokenmill.sched.spare import BLOCK, alone


def test_prompts_go_on_where_nothing_is_drawn_and_every_step_is_slow() -> None:
    """Not even one row is known to fit, and there is no row to choose: prompts get a block of tokens."""
    slow = Costs(step_s=1.0)
    prompt: Any = Mock(num_planned=0, num_pending=0, tokens=[1] * 100)
    for running in ([], [prompt]):
        chosen, num_tokens = alone(running, 512, slow)
        assert chosen == running and num_tokens == BLOCK
