"""The steps of a load whose requests are all there from the start, as benchmarks of peak throughput send them.

The engine admits a request when its whole length fits (`GUARANTEED_NO_EVICT` of TensorRT-LLM), and a step has a token
of each running request and as many prompt tokens as its limit allows. Requests of one load have one length, so that
those admitted in one step stay together and a step's work follows from the groups: nothing is simulated one by one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from ..core.cost import Work

_MOST_WORKS = 300
"""Of one load; neighbouring steps are averaged beyond that, since a law is nearly linear between them."""


class PeakLoad(NamedTuple):
    """num_requests of num_prompt and num_output tokens each, all at once; at most max_rows run, and a step has at most
    max_tokens."""

    num_prompt: int
    num_output: int
    num_requests: int
    max_rows: int
    max_tokens: int


@cache
def works_of(load: PeakLoad) -> tuple[tuple[float, Work], ...]:
    """The works of all steps, in order, each with the number of steps that it stands for."""
    assert min(load) > 0, load
    steps: list[tuple[float, Work]] = []
    groups: list[list[int]] = []  # requests, output tokens still to draw, positions of each
    num_waiting, num_running, num_begun = load.num_requests, 0, 0  # num_begun: tokens computed of the next prompt
    while num_waiting or groups:
        num_decodes = sum(num for num, _, _ in groups)
        room = min(num_waiting, load.max_rows - num_running) * load.num_prompt - num_begun
        num_tokens = max(0, min(load.max_tokens - num_decodes, room))
        num_new, num_begun = divmod(num_begun + num_tokens, load.num_prompt)
        # Until a group ends or another begins, steps differ by their context alone.
        num_steps = 1 if num_tokens else min(left for _, left, _ in groups)
        context = sum(num * (length + (num_steps - 1) / 2) for num, _, length in groups)
        drawn = num_decodes + num_new
        positions = num_tokens * load.num_prompt / 2 + context
        steps.append((num_steps, Work(drawn, num_decodes + num_tokens, positions, context, drawn)))
        for group in groups:
            group[1] -= num_steps
            group[2] += num_steps
        num_waiting -= num_new
        num_running += num_new - sum(num for num, left, _ in groups if not left)
        groups = [group for group in groups if group[1]]
        if num_new and load.num_output > 1:
            groups.append([num_new, load.num_output - 1, load.num_prompt + 1])
        elif num_new:
            num_running -= num_new
    return _averaged(steps)


def _averaged(steps: list[tuple[float, Work]]) -> tuple[tuple[float, Work], ...]:
    size = math.ceil(len(steps) / _MOST_WORKS)
    found = []
    for start in range(0, len(steps), size):
        some = steps[start : start + size]
        num = sum(each for each, _ in some)
        columns = zip(*([each * value for value in work] for each, work in some), strict=True)
        found.append((num, Work(*(sum(column) / num for column in columns))))
    return tuple(found)
