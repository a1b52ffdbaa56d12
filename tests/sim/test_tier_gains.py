"""What routing by KV stores gives: conversations come back to the machine that has their KV, though no pool has it."""

from __future__ import annotations

from random import Random

from scale import Ask, ScaleReport, run_scale
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.tiers import DISK, HOST
from tokenmill.sim.tier_plan import TierSpec, TierSpecs

BLOCK_BYTES = 320 * 1024 * 16
COSTS = Costs(step_s=0.030, row_s=5e-5, token_s=1.1e-4, position_s=2.1e-9, context_s=3.3e-8)
NUM_SESSIONS, NUM_TURNS, TURN, GAP_S = 24, 4, 1024, 20.0
POOL = NUM_SESSIONS * NUM_TURNS * TURN // 16 // 4 // 4
"""Blocks of each of four pools, which together hold a quarter of what there is at the end."""


def conversations() -> list[Ask]:
    random, asks = Random(0), []
    for session in range(NUM_SESSIONS):
        begun_s = random.uniform(0, GAP_S)
        for turn in range(NUM_TURNS):
            parts = tuple((1000 * session + each, TURN) for each in range(turn + 1))
            asks.append(Ask(begun_s + turn * GAP_S + random.uniform(0, 5), parts, 16))
    return sorted(asks)


def run(has_tiers: bool, is_told: bool = True) -> ScaleReport:
    config = EngineConfig(
        groups=full_groups(POOL, BLOCK_BYTES), max_model_len=NUM_TURNS * TURN + 64, max_num_batched_tokens=1024
    )
    host = TierSpec(HOST, 2 * POOL * BLOCK_BYTES, 2e10, 2e10, 1e-4)
    disk = TierSpec(DISK, 16 * POOL * BLOCK_BYTES, 5e9, 5e9, 1e-3, admission="all")
    tiers = TierSpecs((host, disk), shared_by=2, is_told=is_told) if has_tiers else None

    def set_up(gateway: Gateway) -> None:
        gateway.router.choose_by("kv_aware")

    return run_scale(conversations(), config, COSTS, ["mixed"] * 4, set_up, tiers=tiers)


def test_conversations_go_where_their_kv_is_stored() -> None:
    """Two machines of two workers each, whose pools hold a quarter of all KV: fewer tokens are computed, and first
    tokens come sooner, than without stores, and than with stores that the front end knows nothing of."""
    without, blind, routed = run(False), run(True, False), run(True)
    cached = [sum(each.num_cached for each in made.seen) for made in (without, blind, routed)]
    assert cached[2] > 1.2 * cached[1] > 3 * cached[0] and routed.reasons[HOST] + routed.reasons[DISK] > 10
    assert routed.mean("ttft_s") < blind.mean("ttft_s") < without.mean("ttft_s")
    assert not without.num_fetched and blind.num_fetched and routed.num_fetched
