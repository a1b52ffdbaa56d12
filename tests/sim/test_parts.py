"""A service with links, cores, tiers and faults: what is shared slows those who share it, and nothing is lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from topologies import flat

from tokenmill.cluster.gateway import Gateway
from tokenmill.cluster.pools import decision_named
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work
from tokenmill.core.errors import ConfigError
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.plan.evaluate import fault_warnings, lines_of
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.fault_script import read_faults
from tokenmill.sim.fields import Fields
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.parts import ColdStart, CorePlan, FrontCosts, PartsPlan, read_cores
from tokenmill.sim.service import Service, ServiceReport
from tokenmill.sim.tier_plan import read_tiers

BLOCK_BYTES = 1_000_000
CONFIG = EngineConfig(groups=full_groups(512, BLOCK_BYTES), max_model_len=1024, max_num_batched_tokens=512)
SERVICES: list[Service] = []
"""The one that served last."""
COSTS = Costs(step_s=0.02, token_s=1e-4)


def deploy(parts: PartsPlan = PartsPlan(), pools: Sequence[str] = ("mixed", "mixed"), **of_workers: Any) -> Deployment:  # noqa: B008
    workers = tuple(
        WorkerPlan(f"w{number}", pool, CONFIG, COSTS, **{name: make(number) for name, make in of_workers.items()})
        for number, pool in enumerate(pools)
    )
    return Deployment(workers, parts=parts)


def serve(
    deployment: Deployment, num_requests: int = 8, *, gap_s: float = 0.1, num_output: int = 32, prompt: int = 64
) -> tuple[list[list[float]], ServiceReport]:
    """When each request got its tokens; the last has ended as it should."""
    loop = VirtualLoop()

    def set_up(gateway: Gateway) -> None:
        gateway.pools.decision = decision_named("always")

    service = Service(deployment, loop, set_up=set_up if "decode" in {w.pool for w in deployment.workers} else _nothing)
    SERVICES[:] = [service]
    heard: list[list[float]] = [[] for _ in range(num_requests)]
    ends: list[str] = []

    def hear(number: int, output: Output) -> None:
        heard[number] += [loop.time()] * len(output.tokens)
        if output.finish_reason is not None:
            ends.append(output.error or output.finish_reason)

    async def main() -> None:
        await service.start()
        for number in range(num_requests):
            sampling = SamplingParams(max_tokens=num_output, temperature=0.0)
            tokens = tuple((number * 7 + place) % 200 for place in range(prompt))
            request = Request(f"r{number}", tokens, sampling, num_output, number, arrival_s=loop.time())
            service.open(request, "client", lambda output, number=number: hear(number, output))  # type: ignore[misc]
            await asyncio.sleep(gap_s)
        while len(ends) < num_requests:
            await asyncio.sleep(0.5)
        await service.stop()

    loop.run(main())
    assert ends == ["length"] * num_requests
    assert [len(times) for times in heard] == [num_output] * num_requests
    return heard, service.report


def _nothing(gateway: Gateway) -> None:
    pass


def faults(*tables: dict[str, Any]) -> PartsPlan:
    return PartsPlan(faults=read_faults(Fields({"faults": list(tables)})))


def test_a_crash_costs_time_and_no_request() -> None:
    """Requests of the worker that dies go on at the other; it is back after its cold start, and serves again."""
    crash = {"kind": "crash", "target": "w0", "at_s": 0.3}
    cold = deploy(faults(crash), cold=lambda number: ColdStart(1.0))
    sound, _ = serve(deploy(), 20)
    heard, report = serve(cold, 20)
    assert report.faults == [(pytest.approx(0.3), "crash", "w0")] and report.num_resumed >= 1
    assert sum(times[-1] for times in heard) > sum(times[-1] for times in sound)
    never = deploy(faults(crash), cold=lambda number: ColdStart(1e5))
    assert serve(never, 20)[1].steps["w0"] < report.steps["w0"]


def test_faults_of_every_kind_by_seed_lose_nothing() -> None:
    """Crashes, freezes, slow steps, drains, cut links and partitions: each request gets its tokens, each once; and the
    same run again is the same."""
    kinds = ("crash", "freeze", "slow", "leave", "cut", "partition")
    tables = [{"kind": kind, "mean_time_between_s": 2.0, "until_s": 20.0, "seed": 5} for kind in kinds]
    tables = [table | ({"for_s": 0.5} if table["kind"] in ("freeze", "slow", "partition") else {}) for table in tables]
    made = deploy(faults(*tables), ("mixed",) * 4, cold=lambda number: ColdStart(0.3))
    heard, report = serve(made, 60, gap_s=0.2)
    assert {kind for _, kind, _ in report.faults} == set(kinds)
    assert serve(made, 60, gap_s=0.2)[0] == heard


def test_a_slow_worker_is_slow_as_long_as_it_lasts() -> None:
    """Steps take three times as long for a second; two are under way at its end."""
    slow = {"kind": "slow", "target": "w0", "at_s": 0.0, "for_s": 1.0, "factor": 3.0}
    sound, _ = serve(deploy(pools=["mixed"]), 1, num_output=100)
    heard, _ = serve(deploy(faults(slow), ["mixed"]), 1, num_output=100)
    assert heard[0][-1] - sound[0][-1] == pytest.approx(2 / 3, abs=0.09)


def test_kv_goes_over_the_links_that_the_topology_has() -> None:
    """Prefill and decode on nodes whose NIC takes 4 s for the KV of a prompt, against one that takes none; the links
    report the bytes."""
    nodes = {"node": lambda number: f"n{number}"}

    def second_token_s(bytes_s: float) -> tuple[float, ServiceReport]:
        parts = PartsPlan(topology=flat(("n0", "n1"), bytes_s=bytes_s))
        heard, report = serve(deploy(parts, ("prefill", "decode"), **nodes), 1, prompt=64)
        return heard[0][1] - heard[0][0], report

    (fast_s, _), (slow_s, report) = second_token_s(1e12), second_token_s(1e6)
    assert slow_s - fast_s == pytest.approx(4.0, abs=0.2)
    assert report.carried_bytes["n0.nic0.up"] == report.carried_bytes["n1.nic0.down"] == 4 * BLOCK_BYTES
    assert report.carried_bytes["n1.nic0.up"] == 0


def test_what_shares_cores_slows_the_steps() -> None:
    """Two workers of two threads on two cores take twice as long a step as with a machine each; on four, and with
    cores that nobody counts, they do not see each other."""
    alone, _ = serve(deploy(threads=lambda number: 2), 2, gap_s=0.0)
    on = {
        cores: serve(deploy(PartsPlan(cores=CorePlan(cores)), threads=lambda number: 2), 2, gap_s=0.0)[0]
        for cores in (2, 4)
    }
    assert on[4] == [pytest.approx(times, abs=1e-6) for times in alone]
    for slow, fast in zip(on[2], alone, strict=True):
        assert slow[-1] - slow[0] == pytest.approx(2 * (fast[-1] - fast[0]), rel=0.1)


class Slack:
    """COSTS, and 5 ms of the engine's own after each step."""

    def predict(self, work: Work) -> float:
        return COSTS.predict(work)

    def gap_s(self, work: Work) -> float:
        return 0.005


def test_what_engines_take_between_steps_delays_the_next() -> None:
    """5 ms more from token to token, whether cores are counted or not."""
    plain, _ = serve(deploy(pools=["mixed"]), 1)
    for cores in (0, 2):
        made = deploy(PartsPlan(cores=CorePlan(cores)), ["mixed"], threads=lambda number: 2)
        made = replace(made, workers=tuple(replace(each, cost_model=Slack()) for each in made.workers))
        heard, _ = serve(made, 1)
        assert heard[0][0] == pytest.approx(plain[0][0], abs=1e-6)
        assert heard[0][-1] - plain[0][-1] == pytest.approx(31 * 0.005, abs=1e-3)


def test_front_ends_and_clients_take_their_time() -> None:
    """10 ms for a call, 1 ms for a token and for a client's event: the first token comes 12 ms later, and with two
    cores besides a worker of two threads steps are slower, too."""
    front = FrontCosts(request_s=0.01, token_s=0.001)
    apart = CorePlan(0, front, 0.001)
    plain, _ = serve(deploy(pools=["mixed"]), 1)
    later, _ = serve(deploy(PartsPlan(cores=apart), ["mixed"]), 1)
    assert later[0][0] - plain[0][0] == pytest.approx(0.012, abs=1e-6)
    assert later[0][-1] - plain[0][-1] == pytest.approx(0.012, abs=1e-6)
    shared, _ = serve(deploy(PartsPlan(cores=replace(apart, cores=2)), ["mixed"], threads=lambda number: 2), 1)
    assert shared[0][-1] > later[0][-1] + 0.01


class Measured(NamedTuple):
    """A FrontCostModel whose calls and tokens are under way for longer than is computed, with work behind answers."""

    rest_s: float = 0.0

    def front_s(self, num_prompt_tokens: int) -> float:
        return 0.004

    def front_delay_s(self, num_prompt_tokens: int) -> float:
        return 0.006

    def back_s(self, num_rows: int) -> float:
        return 0.001 * num_rows

    def back_delay_s(self) -> float:
        return 0.002

    def end_s(self) -> float:
        return self.rest_s


def test_what_only_passes_delays_and_takes_no_core() -> None:
    plain, _ = serve(deploy(pools=["mixed"]), 1)
    apart, _ = serve(deploy(PartsPlan(cores=CorePlan(0, Measured())), ["mixed"]), 1)
    assert apart[0][0] - plain[0][0] == pytest.approx(0.013, abs=1e-6)
    shared, _ = serve(deploy(PartsPlan(cores=CorePlan(2, Measured())), ["mixed"], threads=lambda number: 2), 1)
    # Of the tokens' way back a third is taken from the step beside, and nothing of the delays.
    assert shared[0][-1] - apart[0][-1] == pytest.approx(31 * 0.0005, rel=0.15)


def test_what_is_left_after_an_answer_holds_others_up() -> None:
    """And the answer itself by what its last token takes longer on a shared core."""
    ends = []
    for rest_s in (0.0, 0.05):
        plan = PartsPlan(cores=CorePlan(2, Measured(rest_s)))
        heard, _ = serve(deploy(plan, ["mixed"], threads=lambda number: 2), 4)
        ends.append(sorted(times[-1] for times in heard))
    assert ends[1][0] == pytest.approx(ends[0][0], abs=1e-3)
    assert ends[1][-1] > ends[0][-1] + 0.02


def test_prefixes_come_back_from_tiers_and_spoilt_blocks_are_computed_again() -> None:
    """With a store and pools that forget, a prompt's blocks are fetched; while its tier spoils what it loads, they are
    not taken."""
    tables = [
        {"kind": "host", "bytes": 40 * BLOCK_BYTES, "shared_by": 2},
        {"kind": "disk", "bytes": "10GB", "admission": "all"},
    ]
    tiers = read_tiers(Fields({"tiers": tables}))
    small = replace(CONFIG, groups=full_groups(48, BLOCK_BYTES))
    workers = tuple(WorkerPlan(f"w{number}", "mixed", small, COSTS) for number in range(2))

    def run(plan: PartsPlan) -> ServiceReport:
        made = Deployment(workers, parts=replace(plan, tiers=tiers))
        loop = VirtualLoop()
        service = Service(made, loop)
        num_ended = 0

        def hear(output: Output) -> None:
            nonlocal num_ended
            num_ended += output.finish_reason is not None
            assert not output.error

        async def main() -> None:
            await service.start()
            for number in range(60):
                which = number % 12
                tokens = tuple((which * 7 + place) % 200 for place in range(160))
                sampling = SamplingParams(max_tokens=4, temperature=0.0)
                request = Request(f"r{number}", tokens, sampling, 4, number, arrival_s=loop.time())
                service.open(request, "client", hear)
                await asyncio.sleep(0.4)
            await asyncio.sleep(5.0)
            await service.stop()

        loop.run(main())
        assert num_ended == 60
        return service.report

    sound = run(PartsPlan())
    assert sound.num_fetched > 50 and not sound.num_spoilt
    spoilt = run(faults({"kind": "corrupt", "target": "host0.disk", "at_s": 0.0, "for_s": 1000.0}))
    assert spoilt.num_spoilt > 0 and spoilt.num_fetched < sound.num_fetched


def test_what_is_shared_is_told() -> None:
    """Faults with cold starts, the busiest links, and how busy front end and clients are; nothing where nothing is."""
    parts = PartsPlan(
        topology=flat(("n0", "n1"), bytes_s=1e8),
        faults=faults({"kind": "crash", "target": "w1", "at_s": 0.5}).faults,
        cores=CorePlan(4, FrontCosts(token_s=0.001), 0.001),
    )
    made = deploy(parts, ("prefill", "decode"), node=lambda number: f"n{number}", cold=lambda number: ColdStart(0.2))
    told = serve(made, 8)
    lines = lines_of(SERVICES[-1])
    assert told[1].num_resumed and len(lines) == 3
    assert lines[0] == "faults: crash 1; 1 cold starts, 0.2 s each"
    assert re.match(r"links: \d+ transfers, 0.0 GB; of their bandwidth n\d.nic0", lines[1])
    assert re.match(r"busy, each one process: front end [\d.]+%, clients [\d.]+%", lines[2])
    assert fault_warnings(SERVICES[-1]) == ["Faults: crash 1; 1 cold starts, 0.2 s each."]
    serve(deploy(), 2)
    assert lines_of(SERVICES[-1]) == []


def test_what_cannot_be_is_said_before_anything_runs() -> None:
    """Workers on nodes that are not there, faults of workers that are not."""
    loop = VirtualLoop()
    topology = flat(("n0", "n1"))
    with pytest.raises(ConfigError, match=r"workers\[0\].node: 'n9' is unknown"):
        Service(deploy(PartsPlan(topology=topology), node=lambda number: "n9"), loop)
    with pytest.raises(ConfigError, match=r"workers\[0\].gpus: n0 has 0 GPUs"):
        Service(deploy(PartsPlan(topology=topology), node=lambda number: "n0", gpus=lambda number: (0,)), loop)
    loop.close()
    with pytest.raises(ConfigError, match=r"faults\[0\].target: 'w7' is unknown; one of w0, w1"):
        serve(deploy(faults({"kind": "crash", "target": "w7", "at_s": 1.0})))
    assert read_cores(Fields({"cores": 2, "front_token_s": 3e-5})) == CorePlan(2, FrontCosts(token_s=3e-5))
    assert read_cores(Fields({})) == CorePlan()
