"""Requests with a target for their first token (TTFT) are served by slack: the time by which they may begin later and
still meet it, which is target - waited - what their prompt takes.

On the clock of work, on which all orders of service have their due times, a request is due when as much work is done as
takes that long. So it stands among those without a target where it must to be served in time, and no further ahead; who
waits without a target is passed only by those that come before it is due itself. What can no longer meet its target is
served as if it had none: otherwise, under load, everyone would be late by a little (the domino effect of earliest
deadline first: Stankovic et al., IEEE Computer 1995).
"""

from __future__ import annotations

from ...core.cost import Work
from ...core.policy import Order, Waiting
from ...core.work import step_work

NUM_REFRESHED = 32
"""Waiting sequences whose slack is looked at again at each step that has room for one, while there are targets."""


def due(order: Order, waiting: Waiting, step_tokens: int) -> float:
    """When it should be served, on the clock of work. step_tokens: of a full step."""
    request, costs = waiting.request, waiting.costs
    full_s = costs.predict(Work(1, step_tokens, step_tokens * step_tokens // 2))
    if not (request.terms.ttft_s and full_s) or waiting.num_tokens > len(request.prompt_tokens):
        return order.due(waiting)
    num_left = waiting.num_tokens - waiting.num_cached
    num_steps = -(-num_left // step_tokens)
    num_positions = num_left * waiting.num_cached + num_left * (num_left - 1) // 2
    needed_s = num_steps * costs.predict(Work(1, num_left // num_steps, num_positions // num_steps))
    slack_s = request.arrival_s + request.terms.ttft_s - waiting.now - needed_s
    if slack_s < 0:
        return order.due(waiting)
    return waiting.work_done + slack_s / full_s * step_work(step_tokens, step_tokens)
