"""Steps of an engine that were alike, told to a gateway at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...cluster.gateway import Gateway
from ...core.events import Output, StepOutputs


@dataclass(frozen=True, slots=True)
class Repeated:
    """Steps of an engine that were alike, told at once: each gave one token of each of `step.outputs`, which hold all
    of them, and nothing else; `step.stats` are those after the last. times: when each was heard. What follows
    from the durations of single steps is told by RequestQueue.pace, in the order of all engines' steps."""

    link: int
    step: StepOutputs
    times: Sequence[float]


def repeat(gateway: Gateway, event: Repeated) -> list[Output]:
    """As Stepped of each, where nothing waited for a step (Placing.waits_for_steps) and no request began or ended.
    Engines may have been heard of since, and calls opened. Returns the outputs for those who wait for them."""
    step, link = event.step, gateway.link(event.link)
    outputs: list[Output] = []
    if link is None:
        return outputs
    entries, now = link.entries, step.now_s
    for output in step.outputs:
        entry = entries.get(output.request_id)
        if entry is None or output.attempt != entry.attempt:
            continue
        assert entry.has_progressed and output.finish_reason is None, output
        entry.last_token_s = now
        entry.tokens.extend(output.tokens)
        if entry.num_lives > 1:
            output = entry.as_first_life(output)
        if entry.ending is None:
            outputs.append(output)
    gateway.progress_s = max(gateway.progress_s, now)
    link.step(step.stats)
    gateway.totals.step(event.link, step.stats, event.times[-1])
    num_steps = len(event.times)
    gateway.request_queue.repeat(
        gateway.totals.sums, now, event.link, step.stats, num_steps, num_steps * len(step.outputs)
    )
    return outputs
