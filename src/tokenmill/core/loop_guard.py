"""When an answer repeats itself without end: its last LOOP_TOKENS tokens have a period of at most LOOP_PERIOD.

It is decided by the tokens alone, so an answer ends at the same token whatever the batch, and also where another engine
has begun it. Tokens t have the period p as far back as t[i] = t[i - p]:

    t   . . x a b c a b c a b c a b c
                    |------ 9 ------|        period 3 holds for these 9, so that 12 tokens in a row have it

The guard is cheap because most tokens need no look. What is known of a period at one token says how many more there
must be before it can hold for all of the last LOOP_TOKENS: as many as are missing if each one goes on with it. The
least of these over all periods is slept through. Text that does not repeat is looked at every LOOP_TOKENS - LOOP_PERIOD
tokens. Two periods that hold for as many tokens as their sum are multiples of a common one (Fine and Wilf, Uniqueness
theorems for periodic functions, 1965), and begin and end together: a broken repetition leaves no other that is about to
be complete, so looks stay hundreds of tokens apart.
"""

from __future__ import annotations

from collections.abc import Sequence

LOOP_TOKENS = 512
LOOP_PERIOD = 64

REPETITION = "repetition_detected"
"""Why an answer ended, in vLLM's word for it."""

LOOP_WARNING = (
    f"The answer was ended because it repeats itself: its last {LOOP_TOKENS} tokens have a period of at most "
    f"{LOOP_PERIOD}. loop_guard false lets it go on; a higher temperature or a repetition_penalty may avoid it."
)


def tokens_to_loop(tokens: Sequence[int], begin: int) -> int:
    """How many tokens must follow at least before the answer, which starts at `begin` of `tokens`, may be a loop; 0: it
    is one."""
    end = len(tokens)
    if end - begin < LOOP_TOKENS:
        return LOOP_TOKENS - (end - begin)
    least = LOOP_TOKENS - LOOP_PERIOD  # a period that the last token breaks begins anew behind it
    last = tokens[end - 1]
    for period, token in enumerate(tokens[end - 2 : end - 2 - LOOP_PERIOD : -1], 1):
        if token != last:
            continue
        place, first = end - 2, end - LOOP_TOKENS + period
        while place >= first and tokens[place] == tokens[place - period]:
            place -= 1
        least = min(least, place + 1 - first)
        if least <= LOOP_TOKENS - 2 * LOOP_PERIOD:
            break  # no other period is nearer: it is a multiple of this one, or holds for fewer than 2 * LOOP_PERIOD
    return least
