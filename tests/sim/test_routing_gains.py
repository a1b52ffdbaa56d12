"""What routing is for: on conversations over simulated nodes, prefixes and queues together beat either alone."""

from __future__ import annotations

from random import Random

from route_mooncake import Line, run


def conversations(num_requests: int) -> list[Line]:
    """Sessions of several turns, each of which repeats the one before; a third begin with one of three documents."""
    random, at_s, lines = Random(5), 0.0, []
    sessions: list[tuple[int, ...]] = []
    for number in range(num_requests):
        at_s += random.expovariate(3.0)
        if sessions and random.random() < 0.7:
            begun = sessions.pop(random.randrange(len(sessions)))
        else:
            begun = tuple(range(50 * random.randrange(3), 50 * random.randrange(1, 4))) if random.random() < 0.3 else ()
        hashes = (*begun, *(1000 * (number + 1) + each for each in range(random.randrange(4, 24))))
        sessions.append(hashes)
        lines.append(Line(at_s, 512 * len(hashes) + 100, random.randrange(50, 400), hashes))
    return lines


def test_a_predicted_first_token_comes_sooner_than_by_load_or_by_prefix() -> None:
    """The simulation is exact: same lines, same result. Least load is saturated there, the others are not."""
    lines = conversations(500)
    made = {policy: run(lines, policy, 8, 0.7) for policy in ("least_load", "cache_aware", "kv_aware", "round_robin")}
    best = made["kv_aware"]
    assert best.ttft_s < made["cache_aware"].ttft_s and best.p99_s * 1.2 < made["cache_aware"].p99_s, made
    assert best.ttft_s * 3 < made["least_load"].ttft_s and best.ttft_s * 3 < made["round_robin"].ttft_s, made
    assert best.hit > 2 * made["least_load"].hit and best.balance < 1.1, made
