"""The loop guard against its definition, and what an engine does with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_engine_core import CONFIG, Engine, make_request

from tokenmill.core.block import full_groups
from tokenmill.core.loop_guard import LOOP_PERIOD, LOOP_TOKENS, REPETITION, tokens_to_loop
from tokenmill.core.sequence import Sequence

PROMPT = [3, 3, 3]


def is_loop(answer: list[int]) -> bool:
    """The definition, word by word."""
    last = answer[-LOOP_TOKENS:]
    periods = range(1, LOOP_PERIOD + 1)
    return len(last) == LOOP_TOKENS and any(
        all(last[place] == last[place - period] for place in range(period, LOOP_TOKENS)) for period in periods
    )


def first_loop(answer: list[int]) -> int | None:
    """After how many tokens the guard ends it; and that it has looked at few of them."""
    check, num_looks = LOOP_TOKENS, 0
    for num in range(1, len(answer) + 1):
        if num >= check:
            num_looks += 1
            num_more = tokens_to_loop([*PROMPT, *answer[:num]], len(PROMPT))
            check = num + num_more
            if not num_more:
                assert num_looks <= 2 + len(answer) // 64
                return num
    return None


PIECES = st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=70), st.integers(1, 500)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(PIECES)
@example([([1], 600)])
@example([([0, 1], 500), ([2], 1), ([0, 1], 255), ([0], 1)])
@example([(list(range(64)), 9)])
@example([(list(range(65)), 9)])
@example([([0] * 63 + [1], 9)])
def test_it_ends_at_the_token_that_the_definition_says(pieces: list[tuple[list[int], int]]) -> None:
    """Pieces that repeat for a while, one after the other: the first token at which the answer is a loop."""
    answer = [token for piece, num_tokens in pieces for token in (piece * num_tokens)[:num_tokens]]
    wanted = next((num for num in range(LOOP_TOKENS, len(answer) + 1) if is_loop(answer[:num])), None)
    assert first_loop(answer) == wanted


LONG = replace(CONFIG, groups=full_groups(600), max_model_len=2000)


@pytest.mark.parametrize("num_known", [0, 100, LOOP_TOKENS - 1])
def test_the_engine_ends_a_loop_where_it_began_or_went_on(num_known: int) -> None:
    """The same token ends it where another engine has produced the first of them, and the output says why."""
    engine = Engine(LONG)
    known = (7,) * num_known
    engine.add(make_request("a", 4, 900, loop_guard=True, output_tokens=known, is_resumed=bool(known)))
    last = engine.finish()[-1]
    assert (last.finish_reason, last.error, last.num_output) == ("length", REPETITION, LOOP_TOKENS)


def test_what_keeps_the_guard_away() -> None:
    """Nothing is ended that has no guard or a grammar, nor before min_tokens; a limit at the same token is a loop."""
    engine = Engine(LONG)
    engine.add(
        make_request("off", 4, 700),
        make_request("late", 4, 700, loop_guard=True, min_tokens=600),
        make_request("same", 4, LOOP_TOKENS, loop_guard=True),
    )
    ends = {each.request_id: (each.num_output, each.error) for each in engine.finish() if each.finish_reason}
    assert ends == {"off": (700, ""), "late": (600, REPETITION), "same": (LOOP_TOKENS, REPETITION)}
    guarded = make_request("a", 4, 700, loop_guard=True, grammar="{}")
    assert Sequence(0, guarded, list(guarded.prompt_tokens)).loop_check > 10**9
