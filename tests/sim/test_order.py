"""Short prompts beside long ones: they are served at once, and the long ones hardly notice."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from queueing import CONFIG, Ask, Replay, percentile


def long_and_short(seed: int) -> list[Ask]:
    """64 long prompts at once, 25 s of work, and a short one now and then until they are done."""
    rng = random.Random(seed)
    long = [Ask(0.001 * number, rng.randint(1500, 2500), 8, name="long") for number in range(64)]
    short = [Ask(rng.random() * 25, rng.randint(4, 40), 8, name="short") for _ in range(100)]
    return long + short


def ttfts(replay: Replay, name: str) -> list[float]:
    return [seen.ttft_s for seen in replay.seen if seen.call.startswith(name)]


@pytest.mark.parametrize("seed", range(4))
def test_a_short_prompt_is_served_at_once_beside_64_long_ones(seed: int) -> None:
    """Its first token takes less than a second; the long prompts' p99 is at most 1.2 times that of first come, first
    served, under which the short ones wait for all that came before."""
    fair = Replay().run(long_and_short(seed))
    in_turn = Replay(replace(CONFIG, scheduling_policy="fcfs")).run(long_and_short(seed))
    assert max(ttfts(fair, "short")) < 1.0
    assert percentile(ttfts(in_turn, "short"), 0.5) > 5.0, "the load does not press"
    assert percentile(ttfts(fair, "long"), 0.99) <= 1.2 * percentile(ttfts(in_turn, "long"), 0.99)


def test_a_long_prompt_comes_although_short_ones_never_cease() -> None:
    """Short prompts alone are more than the engine can do; the long one is overtaken for a while and then served."""
    short = [Ask(number * 0.02, 150, 1, name="short") for number in range(3000)]
    replay = Replay().run([Ask(1.0, 1500, 1, name="long"), *short])
    (long_s,) = ttfts(replay, "long")
    assert percentile(ttfts(replay, "short"), 1.0) > 10.0, "the load does not press"
    assert long_s < 40.0


def test_under_fcfs_calls_are_served_as_they_came() -> None:
    """Whatever their length, in the engine and in front of it: the first tokens come in the order of the calls."""
    rng = random.Random(5)
    asks = [Ask(0.01 * number, rng.choice([20, 3000]), 2) for number in range(120)]
    served = Replay(replace(CONFIG, scheduling_policy="fcfs", max_num_seqs=4)).run(asks)
    first_token_s = [seen.at_s + seen.ttft_s for seen in sorted(served.seen, key=lambda seen: seen.at_s)]
    assert max(first_token_s) > 30.0, "the load does not press"
    assert first_token_s == sorted(first_token_s)
