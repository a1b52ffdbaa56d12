"""A simulated service with something of everything that could make two runs differ: a prefill and several decode
workers, stores of KV in memory and on disk, faults by seed, migration, and clients that hold conversations, ask again
and leave. Prints the digest of what the clients saw, and what happened; `test_determinism` runs it."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from tokenmill.bench.load.options import add_serve_arguments, make_load
from tokenmill.cluster.admission import BoundedWait
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.tiers import DISK, HOST
from tokenmill.plan.play import About, digest_of, simulate
from tokenmill.plan.policies import read_policies
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.fault_script import Fault, FaultRunner
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.parts import PartsPlan
from tokenmill.sim.service import Service
from tokenmill.sim.tier_plan import TierSpec, TierSpecs

BLOCK_BYTES = 16 * 1024
CONFIG = EngineConfig(
    full_groups(56, BLOCK_BYTES), max_model_len=768, max_num_seqs=8, max_num_batched_tokens=128
)  # fmt: skip
COSTS = Costs(step_s=0.01, row_s=2e-4, token_s=2e-4, position_s=1e-7, context_s=1e-6)
TIERS = TierSpecs(
    (
        TierSpec(HOST, 150 * BLOCK_BYTES, 1e10, 1e10, 1e-4),
        TierSpec(DISK, 600 * BLOCK_BYTES, 1e9, 1e9, 1e-3, admission="all"),
    ),
    shared_by=2,
)
POOLS = ("prefill", "decode", "decode", "mixed", "mixed")
LOAD = (
    "--dataset-name multi-turn --num-turns 4 --think-time 0.3 --system-len 64 --num-prompts 120 --request-rate 24"
    " --random-input-len 60 --random-output-len 40 --random-range-ratio 0.9 --retries 3 --patience 8 --num-warmups 0"
)
FAULTS = (
    Fault("faults[0]", "crash", mean_time_between_s=3.0, until_s=1e9),
    Fault("faults[1]", "slow", "w2", at_s=3.0, for_s=2.0, factor=4.0),
    Fault("faults[2]", "cut", "w1", at_s=6.0),
)


def deployment() -> Deployment:
    workers = tuple(WorkerPlan(f"w{number}", pool, CONFIG, COSTS) for number, pool in enumerate(POOLS))
    return Deployment(workers, parts=PartsPlan(tiers=TIERS))


def set_up(gateway: Gateway) -> None:
    gateway.admission = BoundedWait(16, 20_000, 0.2)
    read_policies(["kv_aware", "disaggregation=cost", "migration=on", "replication=on"]).set_up(gateway)


def main(seed: int) -> None:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    flags = ["--url", "http://h", "--seed", str(seed), *LOAD.split()]
    load = make_load(parser.parse_args(flags), flags, None)
    runners: list[FaultRunner] = []

    def begin(loop: VirtualLoop, seed: int) -> Service:
        service = Service(deployment(), loop, seed=seed, set_up=set_up)

        async def strike() -> None:
            await asyncio.sleep(1.0)
            workers = {worker.name: worker for worker in service.workers}
            runners.append(FaultRunner(FAULTS, loop, workers, seed=seed))
            runners[0].start()

        loop.spawn(strike(), "faults")
        return service

    made = simulate(begin, load, About())
    report, run = made.service.report, made.run
    happened = {
        "struck": len(runners[0].struck),
        "moved": report.num_moved,
        "fetched": report.num_fetched,
        "resumed": report.num_resumed,
        "preempted": report.num_preemptions,
        "refused": sum(row.num_refused for row in run.requests),
        "ok": run.num_ok,
        "failed": run.num_failed,
    }
    print(digest_of(run.requests), json.dumps(happened), sorted(report.reasons.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
