"""Reuse distances and the offline bound, against caches that are simulated and optima that are searched for."""

from __future__ import annotations

import random
from collections import OrderedDict
from functools import cache

import pytest

from kv_report import CURVE, draw
from kv_study import POLICIES, replay, study
from tokenmill.sim.kv_reuse import (
    RecomputeCosts,
    bound_s,
    lru_s,
    num_reused,
    recompute_costs,
    runs_of,
    total_s,
    working_set,
)
from tokenmill.sim.kv_traces import Asked, Load, agentic, load_of, mooncake


def random_load(seed: int, num: int = 60) -> Load:
    """Prompts that share heads, as conversations and system prompts do."""
    rng = random.Random(seed)
    grown: list[list[str]] = [[f"s{n}"] for n in range(3)]
    requests: list[tuple[float, list[str]]] = []
    for index in range(num):
        path = list(rng.choice(grown))[: rng.randint(1, 8)]
        path += [f"{index}.{depth}" for depth in range(rng.randint(0, 3))]
        grown.append(path)
        requests.append((float(index), path))
    return load_of("random", 4, requests)


def lru_by_hand(requests: list[Asked], costs: RecomputeCosts, room: int) -> tuple[float, int]:
    held: OrderedDict[int, None] = OrderedDict()
    saved, num = 0.0, 0
    for _, blocks in requests:
        num_hits = 0
        while num_hits < len(blocks) and blocks[num_hits] in held:
            num_hits += 1
        saved += costs.sum_s(0, num_hits)
        num += num_hits
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > room:
            held.popitem(last=False)
    return saved, num


def test_reuse_distances_are_those_of_lru() -> None:
    """What distances say for every size is what an LRU cache does."""
    costs = RecomputeCosts(1.0, 0.25)
    for seed in range(10):
        load = random_load(seed)
        runs = runs_of(load.requests)
        for room in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 1000):
            saved, num = lru_by_hand(list(load.requests), costs, room)
            assert lru_s(runs, costs, room) == pytest.approx(saved)
            assert num_reused(runs, room) == num
        most = working_set(runs, costs)
        assert lru_s(runs, costs, most) >= 0.99 * total_s(runs, costs) > lru_s(runs, costs, most - 1)


def best_s(requests: list[Asked], costs: RecomputeCosts, room: int) -> float:
    """What is saved by the best choice of blocks to keep after each request, all tried."""
    from itertools import combinations

    @cache
    def rest(index: int, held: frozenset[int]) -> float:
        if index == len(requests):
            return 0.0
        blocks = requests[index].blocks
        num_hits = 0
        while num_hits < len(blocks) and blocks[num_hits] in held:
            num_hits += 1
        later = {block for _, others in requests[index + 1 :] for block in others}
        may = sorted((held | set(blocks)) & later)
        choices = combinations(may, min(room, len(may)))
        return costs.sum_s(0, num_hits) + max(rest(index + 1, frozenset(kept)) for kept in choices)

    return rest(0, frozenset())


def test_no_cache_saves_more_than_the_bound() -> None:
    """The optimum that is searched for is below the bound, which is close to it where no block is in another's way."""
    gaps = []
    for seed in range(6):
        rng = random.Random(seed)
        paths = [[f"{rng.randrange(4)}", "a"][: rng.randint(1, 2)] for _ in range(14)]
        load = load_of("small", 4, [(float(nth), path) for nth, path in enumerate(paths)])
        costs = RecomputeCosts(1.0, 0.5)
        for room in (1, 2, 3):
            best = best_s(list(load.requests), costs, room)
            bound = bound_s(runs_of(load.requests), costs, room, len(load.requests), 14, 400)
            assert best <= bound + 1e-9
            gaps.append(bound / best - 1 if best else 0.0)
    assert sorted(gaps)[len(gaps) // 2] < 0.1


def test_a_policy_is_between_lru_and_the_bound() -> None:
    """The study's replay of LRU is LRU; no policy beats the bound; endless room saves all; and all of it is drawn."""
    load = random_load(3, 300)
    coefficients = (1e-3, 1e-4)
    costs = recompute_costs(load.block_size, *coefficients)
    curve = study(load, "toy", coefficients, shares=(0.2, 0.5))
    runs = runs_of(load.requests)
    for point in curve.points:
        assert point.saved["lru"] == pytest.approx(lru_s(runs, costs, point.num_blocks) / curve.total_s, rel=0.05)
        assert all(saved <= point.bound for saved in point.saved.values())
    assert replay(load, "cost", load.num_blocks, *coefficients) == pytest.approx(total_s(runs, costs))
    page, picture = draw([curve], POLICIES, CURVE)
    assert f"| {curve.points[0].num_blocks:,} (20%) |" in page and picture.count("<polyline") == 3
    assert curve.lru[-1] == curve.bound[-1] == pytest.approx(1.0)


def test_mooncake_ids_are_paths() -> None:
    """Only full blocks count, and rows come in order of time."""
    rows = [
        {"timestamp": 2000, "input_length": 1100, "hash_ids": [0, 1, 9]},
        {"timestamp": 1000, "input_length": 1024, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 1024, "hash_ids": [0, 2]},
    ]
    load = mooncake("m", rows)
    assert [one.at_s for one in load.requests] == [1.0, 2.0, 3.0]
    first, second, third = (list(one.blocks) for one in load.requests)
    assert first == second and third[0] == first[0] and third[1] != first[1] and load.num_blocks == 3


def test_agentic_conversations_share_their_tools() -> None:
    """Two conversations with equal tools share the head; a changed middle is another path from there on."""
    turn = {"type": "n", "t": 0.0, "hash_runs": [[1, 8]]}
    later = {"type": "n", "t": 5.0, "hash_runs": [[1, 4], [20, 4]]}
    rows = [{"id": name, "tool_tokens": 128, "system_tokens": 0, "requests": [turn, later]} for name in ("one", "two")]
    load = agentic("a", rows, block_size=128)
    paths = sorted(list(one.blocks) for one in load.requests)
    assert all(len(path) == 4 for path in paths)
    assert len({path[0] for path in paths}) == 1 and len({path[1] for path in paths}) == 2
    assert load.num_blocks == 1 + 2 * 3 + 2 * 2
