"""The toy model notices when a plan breaks the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import PlanRow, StepPlan
from tokenmill.sim.executor import Failures, StepFailure, ToyExecutor, Violation
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.toy_model import introduction, solo_answer

CONFIG = EngineConfig(
    groups=full_groups(8), max_model_len=32, block_size=4, steps_in_flight=2, max_num_batched_tokens=32
)
REQUEST = Request("r", (1, 2, 3, 4, 5), SamplingParams(), 4, 3)
INTRO = introduction(REQUEST)
FIRST = PlanRow(0, 0, REQUEST.prompt_tokens, blocks=(0, 1), intro=INTRO, sample=True)


def run(plans: list[StepPlan], *, together: bool = False, failure_rate: float = 0.0) -> list[list[int]]:
    """Tokens drawn in each step; the plans run one after the other, or are all submitted at once."""
    loop = VirtualLoop()
    executor = ToyExecutor(CONFIG, loop, failures=Failures(rate=failure_rate))

    async def main() -> list[list[int]]:
        drawn: list[list[int]] = []
        if together:
            results = [loop.create_task(executor.execute(plan)) for plan in plans]
            for result in results:
                drawn.append([token for row in (await result).rows for token in row.tokens])
        else:
            for plan in plans:
                drawn.append([token for row in (await executor.execute(plan)).rows for token in row.tokens])
        return drawn

    return loop.run(main())


def test_it_gives_the_solo_answer() -> None:
    """Tokens read back through the table give what the request gives alone, also with the input still in flight."""
    answer = solo_answer(REQUEST, 64).tokens
    plans = [StepPlan(0, (FIRST,)), StepPlan(1, (PlanRow(0, 5, (), from_step=0, sample=True),))]
    assert run(plans, together=True) == [[answer[0]], [answer[1]]]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda: StepPlan(2, (PlanRow(0, 5, (7,), sample=True),)), "when 1 was due"),
        (lambda: StepPlan(1, (PlanRow(4, 0, (7,), blocks=(3,)),)), "unknown sequence"),
        (lambda: StepPlan(1, (PlanRow(0, 5, (7,), blocks=(3,), sample=True),)), "3 blocks to 6"),
        (lambda: StepPlan(1, (PlanRow(0, 5, (63,), sample=True),)), "read tokens"),
        (lambda: StepPlan(1, (PlanRow(1, 4, (5,), blocks=(3, 4), intro=INTRO, sample=True),)), "read positions"),
        (lambda: StepPlan(1, (PlanRow(0, 5, (7,), sample=True),), released=(0,)), "unknown sequence"),
    ],
)
def test_it_notices_broken_plans(second: Callable[[], StepPlan], message: str) -> None:
    """Wrong order, unknown sequences, wrong tables, wrong tokens and slots never written are violations."""
    with pytest.raises(Violation, match=message):
        run([StepPlan(0, (FIRST,)), second()])


def test_it_notices_a_block_reused_too_early() -> None:
    """Writing a block that a step in flight may touch is a violation; once that step has ended it is not."""
    plans = [StepPlan(0, (FIRST,)), StepPlan(1, (PlanRow(1, 0, (1, 2), blocks=(0,), intro=INTRO),), released=(0,))]
    with pytest.raises(Violation, match="step 0 may touch it"):
        run(plans, together=True)
    assert run(plans) == [[solo_answer(REQUEST, 64).tokens[0]], []]


def test_it_fails_by_choice() -> None:
    """An injected failure is an ordinary exception, so that a shell treats it as a failed step."""
    with pytest.raises(StepFailure):
        run([StepPlan(0, (FIRST,))], failure_rate=1.0)
