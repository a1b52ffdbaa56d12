"""Steps of an engine that were alike, told to a gateway at once: for simulations (`sim.leaper`). Pure."""

from __future__ import annotations

from .events import Effects, Repeated
from .gateway import Gateway


def repeat(gateway: Gateway, event: Repeated) -> Effects:
    """As Stepped of each, where nothing waits for a step (Placing.waits_for_steps) and no request begins or ends. Other
    engines may have been heard of since."""
    effects, step, link = Effects(), event.step, gateway.link(event.link)
    if link is None:
        return effects
    for output in step.outputs:
        entry = link.entries.get(output.request_id)
        if entry is None or output.attempt != entry.attempt:
            continue
        assert entry.has_progressed and output.finish_reason is None, output
        entry.last_token_s = step.now_s
        entry.tokens.extend(output.tokens)
        if entry.num_lives > 1:
            output = entry.as_first_life(output)
        if entry.ending is None:
            effects.outputs.append(output)
    gateway.progress_s = max(gateway.progress_s, step.now_s)
    link.step(step.stats)
    gateway.totals.step(event.link, step.stats, event.times[-1])
    gateway.desk.repeat(gateway.totals.sums, step.now_s, event.link, step.stats)
    return effects
