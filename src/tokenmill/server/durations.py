"""How long the parts of an answer took, for APIs that tell it."""

from __future__ import annotations

from dataclasses import dataclass

from ..text.choice import Choice


@dataclass(frozen=True, slots=True)
class Durations:
    """In seconds. wait_s: until the engine began; prompt_s: from there to the first token; output_s: from there on."""

    wait_s: float
    prompt_s: float
    output_s: float

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prompt_s + self.output_s


def durations(choice: Choice, now_s: float) -> Durations:
    """Of a choice as far as it is. What the engine has not told counts as happening now."""
    timing = choice.timing
    gates = () if timing is None else (timing.scheduled_s, timing.first_token_s, timing.finished_s)
    begun_s, first_s, end_s = (at if at >= 0 else now_s for at in gates or (now_s,) * 3)
    arrival_s = choice.request.arrival_s
    begun_s = max(arrival_s, begun_s)
    first_s = max(begun_s, first_s)
    return Durations(begun_s - arrival_s, first_s - begun_s, max(first_s, end_s) - first_s)
