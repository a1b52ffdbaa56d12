"""Engines that have not told what their steps take get their share: without shared prefixes no policy that predicts
does worse than the one that only counts tokens, however far the engines are from what is assumed of them.

python tests/sim/test_routing_sweep.py [ENGINES [REQUESTS]]      the whole sweep, as a table
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from scale import run_scale, synthetic
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.terms import USUAL, Terms

CONFIG = EngineConfig(groups=full_groups(4096), max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=64)
LAWS = {
    "as assumed": Costs(1e-2, 1e-5, 1e-4),
    "like a GPU": Costs(1e-2, 1e-5, 2e-5, 1e-9, 2e-8),
    "like a CPU": Costs(1e-2, 2e-4, 3.5e-4, 1.5e-8, 3e-7),
}
SLOWER = (100.0, 10.0, 1.0, 0.1, 0.01)
SHARES = (0.1, 0.4, 0.8)
NUM_PROMPT, NUM_ANSWER = 256, 48
WORST = 1.05
TTFT_S, TPOT_S = 0.2, 0.05
POLICIES = ("kv_aware", "slo_aware", "slo_aware with targets", "prefix_affinity", "two pools", "three pools")


def latency_s(policy: str, cost_model: Costs, share: float, terms: Terms, num_engines: int, num_requests: int) -> float:
    """Mean E2EL at this share of what engines can do that draw eight rows a step."""
    work_s = NUM_PROMPT * cost_model.token_s + NUM_ANSWER * (
        cost_model.step_s / 8 + cost_model.row_s + cost_model.token_s
    )
    asks = synthetic(
        num_requests,
        share * num_engines / work_s,
        lambda rng: rng.randint(NUM_PROMPT // 4, NUM_PROMPT * 7 // 4),
        lambda rng: rng.randint(NUM_ANSWER // 3, NUM_ANSWER * 5 // 3),
        most=4 * NUM_ANSWER,
    )

    def set_up(gateway: Gateway) -> None:
        gateway.router.choose_by("kv_aware" if "pools" in policy else policy.split()[0])

    quarter = num_engines // 4
    num_decode = {"two pools": num_engines - quarter, "three pools": quarter}.get(policy, 0)
    pools = ["prefill"] * quarter * bool(num_decode) + ["decode"] * num_decode
    pools += ["mixed"] * (num_engines - len(pools))
    return run_scale([ask._replace(terms=terms) for ask in asks], CONFIG, cost_model, pools, set_up).mean("latency_s")


def worse(
    cost_model: Costs, share: float, policies: Sequence[str], num_engines: int, num_requests: int
) -> dict[str, float]:
    """Of each policy, its mean E2EL over that of least_load."""
    found: dict[str, float] = {}
    of_least: dict[Terms, float] = {}
    slower = cost_model.step_s / 1e-2
    for policy in policies:
        terms = Terms(ttft_s=TTFT_S * slower, tpot_s=TPOT_S * slower) if policy.endswith("targets") else USUAL
        if terms not in of_least:
            of_least[terms] = latency_s("least_load", cost_model, share, terms, num_engines, num_requests)
        found[policy] = latency_s(policy, cost_model, share, terms, num_engines, num_requests) / of_least[terms]
    return found


def scaled(cost_model: Costs, slower: float) -> Costs:
    return Costs(*[slower * each for each in cost_model[:5]])


@pytest.mark.sampled(1 / 5)
@pytest.mark.parametrize("slower", SLOWER)
def test_no_policy_is_worse_than_least_load_by_a_twentieth_where_nothing_is_shared(slower: float) -> None:
    for name, share in (("as assumed", 0.1), ("like a CPU", 0.4), ("like a GPU", 0.8)):
        found = worse(scaled(LAWS[name], slower), share, POLICIES, 8, 150)
        assert max(found.values()) <= WORST, (name, share, found)


def main() -> None:
    num_engines, num_requests = [*map(int, sys.argv[1:]), *(8, 300)[len(sys.argv) - 1 :]]
    for name, cost_model in LAWS.items():
        for slower in SLOWER:
            for share in SHARES:
                found = worse(scaled(cost_model, slower), share, POLICIES, num_engines, num_requests)
                told = ", ".join(f"{policy} {value:.3f}" for policy, value in found.items())
                print(f"{name}, {slower:g} times slower, {share:.0%} loaded: {told}", flush=True)


if __name__ == "__main__":
    main()
