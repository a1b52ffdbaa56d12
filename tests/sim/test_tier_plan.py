"""Tiers of a cluster's file: what it may say, who shares what, and what they take when several want them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from topologies import flat

from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import BlockFacts, LoadFrom, SaveTo
from tokenmill.sim.fields import Fields
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.shared_links import SharedLinks
from tokenmill.sim.tier_plan import TierHosts, TierSpecs, read_tiers
from tokenmill.sim.tiers import Medium, Pace, TierFaults, VirtualTier
from tokenmill.sim.topology import Place

BLOCK = 1_000_000
HOST = {"kind": "host", "bytes": "64GiB", "read_bytes_s": 2e10, "shared_by": 2}
DISK = {"kind": "disk", "bytes": 10**12, "read_bytes_s": 5e9, "write_bytes_s": 2e9, "latency_s": 1e-3, "queue_depth": 4}
REMOTE = {"kind": "remote", "bytes": "10TB", "node": "store"}


def specs_of(*tables: dict[str, Any]) -> TierSpecs:
    specs = read_tiers(Fields({"tiers": list(tables)}), nodes=("store", "n0", "n1"))
    assert specs is not None
    return specs


def test_tiers_are_read() -> None:
    """Sizes, paces and who shares; without tables there are none."""
    specs = specs_of(HOST, DISK, REMOTE)
    assert [tier.kind for tier in specs.tiers] == ["host", "disk", "remote"]
    assert (specs.shared_by, specs.tiers[0].num_bytes, specs.tiers[2].node) == (2, 64 << 30, "store")
    assert specs.tiers[1].pace == Pace(1e-3, 5e9, write_bytes_s=2e9, queue_depth=4)
    made = specs.config(EngineConfig(groups=full_groups(64, BLOCK), max_model_len=512))
    assert (made.tiers, made.host_bytes, made.disk_bytes) == (("disk", "remote"), 64 << 30, 10**12)
    assert read_tiers(Fields({})) is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([DISK], "tiers[0].kind: the first tier is host memory"),
        ([HOST, REMOTE, DISK], "tiers[2].kind: tiers are named once each, nearest first"),
        ([HOST | {"kind": "hots"}], "tiers[0].kind: 'hots' is unknown; did you mean 'host'?"),
        ([HOST | {"bytes": "much"}], "tiers[0].bytes must be a size"),
        ([HOST | {"bytes": 0}], "tiers[0].bytes: a size of 1 bytes or more"),
        ([HOST, DISK | {"queue_deep": 1}], "tiers[1].queue_deep: no such key; did you mean 'queue_depth'?"),
        ([HOST, DISK | {"read_bytes_s": 0}], "tiers[1].read_bytes_s: a number that is more than 0"),
        ([HOST, DISK | {"lose_rate": 2}], "tiers[1].lose_rate: a number that is 0 or more and at most 1"),
        ([HOST, REMOTE | {"node": "stor"}], "tiers[1].node: 'stor' is unknown; did you mean 'store'?"),
        ([HOST, DISK | {"admission": "none"}], "tiers[1].admission: 'none' is unknown; one of"),
        ([HOST | {"write_bytes_s": 1e9}], "tiers[0].write_bytes_s: host memory has none"),
        ([HOST | {"queue_depth": 8}], "tiers[0].queue_depth: host memory has none"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tables: list[dict[str, Any]], message: str) -> None:
    """The line begins with the place of the field."""
    with pytest.raises(ConfigError) as raised:
        specs_of(*tables)
    assert raised.value.message.startswith(message)


def test_each_tier_fails_by_its_own_rates() -> None:
    """A host takes those of its disk and of the remote store from their tables, and none from the other."""
    loop = VirtualLoop()
    specs = specs_of(HOST, DISK | {"fail_rate": 0.5, "lose_rate": 0.1}, REMOTE | {"spoil_rate": 0.2})
    made = TierHosts(specs, EngineConfig(groups=full_groups(64, BLOCK), max_model_len=512), loop, random.Random(1))

    async def main() -> dict[str, TierFaults]:
        return {kind: tier.faults for kind, tier in made.machine("w0")._tiers.items()}

    assert loop.run(main()) == {"disk": TierFaults(fail=0.5, lose=0.1), "remote": TierFaults(spoil=0.2)}


def test_a_tier_that_holds_no_block_is_refused() -> None:
    """With the block's size, which only the model tells."""
    with pytest.raises(ConfigError, match=r"tiers\[0\].bytes: a block of this model's KV takes 1000000 bytes"):
        specs_of(HOST | {"bytes": 1000}).config(EngineConfig(groups=full_groups(64, BLOCK), max_model_len=512))


def end_s(*jobs: Callable[[], Awaitable[Any]], loop: VirtualLoop) -> float:
    """When all of them, begun together, have ended."""

    async def main() -> float:
        await asyncio.gather(*(job() for job in jobs))
        return loop.time()

    return loop.run(main())


def tier_of(pace: Pace) -> VirtualTier:
    return VirtualTier(Medium(100 * BLOCK, (BLOCK,), pace=pace), {n * 4096: n for n in range(64)}, random.Random(1))


def saving(*numbers: int) -> SaveTo:
    return SaveTo(0, "disk", tuple((BlockFacts((0, b"%d" % n), depth=n), n * 4096, n) for n in numbers))


def test_a_queue_of_a_depth_has_so_many_blocks_under_way() -> None:
    """Eight blocks whose latency is 1 s: at once with any depth, in two rounds with four, one by one with one."""
    for depth, seconds in ((0, 1.0), (8, 1.0), (4, 2.0), (1, 8.0)):
        tier = tier_of(Pace(1.0, 1e12, queue_depth=depth))
        assert end_s(lambda tier=tier: tier.save(saving(*range(8))), loop=VirtualLoop()) == pytest.approx(  # type: ignore[misc]
            seconds, abs=1e-3
        )


def test_writing_takes_its_own_bandwidth_and_both_share_the_device() -> None:
    """A second to write, half a one to read back; two jobs at once wait for each other."""
    pace = Pace(0.0, 2 * BLOCK, write_bytes_s=BLOCK)
    tier = tier_of(pace)

    async def both() -> None:
        places = await tier.save(saving(1))
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)
        await tier.load(LoadFrom(0, "disk", (((0, b"1"), places[0], 40 * 4096),)))

    assert end_s(both, loop=VirtualLoop()) == pytest.approx(1.5)
    other = tier_of(pace)
    assert end_s(lambda: other.save(saving(1)), lambda: other.save(saving(2)), loop=VirtualLoop()) == pytest.approx(2.0)


def test_hosts_share_one_remote_store_over_the_network() -> None:
    """Two workers a host; each host has its own disk, all one remote medium, whose network port they share."""
    loop = VirtualLoop()
    nodes = {"w0": "n0", "w1": "n0", "w2": "n1"}
    topology = flat(("n0", "n1", "store"))
    shared_links = SharedLinks(loop, topology.wire([Place(name, node) for name, node in nodes.items()]))
    remote = REMOTE | {"read_bytes_s": 1e12, "latency_s": 0.0, "admission": "all"}
    specs = specs_of(HOST, DISK, remote)
    made = TierHosts(
        specs,
        EngineConfig(groups=full_groups(64, 1000 * BLOCK), max_model_len=512),
        loop,
        random.Random(1),
        shared_links,
        nodes,
    )

    async def main() -> float:
        one, two, three = (made.machine(name) for name in nodes)
        assert one is two and three is not one
        assert one.media["remote"] is three.media["remote"] and one.media["disk"] is not three.media["disk"]
        tiers = [machine._tiers["remote"] for machine in (one, three)]
        for nth, machine in enumerate((one, three)):
            machine.arena[nth * 4096] = nth
        await asyncio.gather(*(tier.save(saving(nth)) for nth, tier in enumerate(tiers)))
        return loop.time()

    assert loop.run(main()) == pytest.approx(2.0, abs=1e-2)


def test_without_a_topology_hosts_are_counted_off() -> None:
    """Workers by twos, in the order in which they begin; the second life of one is on the same host."""
    loop = VirtualLoop()
    made = TierHosts(
        specs_of(HOST), EngineConfig(groups=full_groups(64, BLOCK), max_model_len=512), loop, random.Random(1)
    )
    assert [made.host_of(name) for name in ("w0", "w1", "w2", "w0")] == ["host0", "host0", "host1", "host0"]
    loop.close()
