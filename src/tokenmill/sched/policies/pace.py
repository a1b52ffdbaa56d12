"""How long a step may take, so that sequences with a target for their time per output token (TPOT) keep their pace.

The token that a step draws is due at first token + (tokens since) * TPOT. What is left until then, when the step is
expected to begin, is what it may take. Who is ahead of its pace lends half of its lead, so that prompts come in larger
chunks, which cost less; who is behind gets shorter steps, of half its target at least. A margin is for errors of the
prediction. The budget that comes of it is Sarathi-Serve's (Agrawal et al., OSDI 2024, section 4.3), taken from the
running requests and the measured cost of steps in place of a profile.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.sequence import Sequence
from ...core.slo import paced_s


def allowed_s(sequences: Iterable[Sequence], begins_s: float) -> float | None:
    """Seconds that a step which begins then may take, by the tightest of those that draw in it; None: none has a
    target."""
    tightest: float | None = None
    for seq in sequences:
        tpot_s = seq.request.terms.tpot_s
        if tpot_s and seq.first_token_s >= 0:
            num_drawn = seq.num_output - len(seq.request.output_tokens) + seq.num_pending
            left_s = seq.first_token_s + num_drawn * tpot_s - begins_s
            own_s = paced_s(tpot_s, left_s - tpot_s)
            if tightest is None or own_s < tightest:
                tightest = own_s
    return tightest
