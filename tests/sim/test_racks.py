"""The example of a cluster with racks, a store and faults is read, served through its faults, and documented."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import pytest

from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.plan.config import sources_beside
from tokenmill.sim.cluster_file import read_deployment
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.service import Service

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "deploy" / "simulate"
RACKS = (EXAMPLES / "racks.toml").read_text(encoding="utf8")
PAGE = (ROOT / "docs" / "operate" / "simulate-parts.md").read_text(encoding="utf8")


def test_racks_serve_through_their_faults() -> None:
    """Every request ends; KV goes over the spine; faults happen when they are said to; the worker that died is back
    after its process and its weights."""
    made = read_deployment(RACKS, sources_beside(EXAMPLES))
    loop = VirtualLoop()
    service = Service(made, loop, set_up=made.gateway.set_up)
    ends: list[str] = []

    def hear(output: Output) -> None:
        if output.finish_reason is not None:
            ends.append(output.error or output.finish_reason)

    async def main() -> None:
        await service.start()
        for number in range(30):
            tokens = tuple((number * 31 + place) % 200 for place in range(512))
            sampling = SamplingParams(max_tokens=32, temperature=0.0)
            request = Request(f"r{number}", tokens, sampling, 32, number, arrival_s=loop.time())
            service.open(request, "client", hear)
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        await service.stop()

    loop.run(main())
    report = service.report
    assert ends == ["length"] * 30
    assert [(round(at_s), kind, target) for at_s, kind, target in report.faults[:3]] == [
        (5, "flap", "n2.nic0"), (8, "slow", "n3"), (10, "crash", "p0"),
    ]  # fmt: skip
    assert report.carried_bytes["rack0.up"] >= 30 * 512 * 320 * 1024
    cold = service.parts.cold
    assert cold.num_starts == 1 and 20.5 < cold.taken_s < 40.0


def test_what_the_page_shows_can_be_read() -> None:
    """Its examples, put together into one file with workers of the last."""
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 5
    tables = tomllib.loads("\n".join(blocks))
    tables["workers"].append({"costs": {"step_s": 0.02}, "kv_blocks": 512, "kv_token_bytes": 131072})
    nodes = [node | {"gpus": 0, "nic": "rdma"} for node in tables["topology"]["nodes"]]
    tables["topology"]["nodes"] = [{key: value for key, value in node.items() if key != "nvlink"} for node in nodes]
    made = read_deployment(tables)
    assert made.parts.topology is not None and made.parts.tiers is not None
    assert (len(made.parts.faults), made.parts.cores.cores, len(made.parts.tiers.tiers)) == (2, 2, 3)
    assert [worker.node for worker in made.workers] == ["n0", "n1"]
    cold = made.workers[0].cold
    assert cold is not None and cold.alone_s == pytest.approx(28.0, abs=0.1)


def test_the_page_has_every_key() -> None:
    """Keys that the readers know, and no other, stand in the page."""
    known = set[str]()
    for name in ("topology", "tier_plan", "fault_script", "parts"):
        source = (ROOT / "src" / "tokenmill" / "sim" / f"{name}.py").read_text(encoding="utf8")
        known |= set(re.findall(r"\.(?:number|count|text|flag|size|table|tables)\(\s*\"(\w+)\"", source))
    missing = {key for key in known if not re.search(rf"\b{key}\b", PAGE)}
    assert len(known) > 30 and not missing
