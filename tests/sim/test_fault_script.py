"""Faults of a service's file: what it may say, and how long a worker takes to come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from topologies import flat

from tokenmill.core.errors import ConfigError
from tokenmill.sim.fault_script import Fault, FaultRunner, read_faults
from tokenmill.sim.fields import Fields
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.parts import ColdStart, ColdStarts, read_cold_start
from tokenmill.sim.shared_links import SharedLinks
from tokenmill.sim.topology import Place

GB = 10**9


def read(*tables: dict[str, Any]) -> tuple[Fault, ...]:
    return read_faults(Fields({"faults": list(tables)}))


def test_faults_are_read() -> None:
    """At a time, for a while, with a factor; or again and again by seed, of any target."""
    slow, crash = read(
        {"kind": "slow", "target": "w1", "at_s": 10, "for_s": 5, "factor": 4},
        {"kind": "crash", "mean_time_between_s": 3600, "seed": 3},
    )
    assert (slow.target, slow.at_s, slow.for_s, slow.factor) == ("w1", 10.0, 5.0, 4.0)
    assert (crash.target, crash.mean_time_between_s, crash.seed) == ("", 3600.0, 3)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "crush", "target": "w0", "at_s": 1}, "faults[0].kind: 'crush' is unknown; did you mean 'crash'?"),
        ({"kind": "crash", "at_s": 1}, "faults[0].target: a word is needed here"),
        ({"kind": "crash", "target": "w0"}, "faults[0].at_s: a number is needed here"),
        ({"kind": "crash", "target": "w0", "at_s": 1, "for_s": 2}, "faults[0].for_s: no such key"),
        ({"kind": "slow", "target": "w0", "at_s": 1, "factor": 0.5}, "faults[0].factor: a number that is 1 or more"),
        ({"kind": "corrupt", "target": "w0", "at_s": 1, "factor": 2}, "faults[0].factor: a number that is 0 or more"),
        ({"kind": "crash", "target": "w0", "at_s": 1, "until_s": 9}, "faults[0].until_s: is of faults that come again"),
        ({"kind": "crash", "mean_time_between_s": 0}, "faults[0].mean_time_between_s: a number that is more than 0"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(table: dict[str, Any], message: str) -> None:
    """The line begins with the place of the field."""
    with pytest.raises(ConfigError) as raised:
        read(table)
    assert raised.value.message.startswith(message)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "crash", "target": "w0", "at_s": 1}, "faults[0].target: there is nothing here that crash can strike"),
        ({"kind": "flap", "target": "a", "at_s": 1}, "faults[0].target: there is nothing here that flap can strike"),
        ({"kind": "corrupt", "mean_time_between_s": 9}, "faults[0].kind: there is nothing here that corrupt can"),
    ],
)
def test_what_is_not_there_cannot_be_struck(table: dict[str, Any], message: str) -> None:
    """Found before anything runs."""
    loop = VirtualLoop()
    with pytest.raises(ConfigError) as raised:
        FaultRunner(read(table), loop, {})
    loop.close()
    assert raised.value.message.startswith(message)


def test_a_link_that_flaps_holds_up_what_it_carries() -> None:
    """A quarter of its bandwidth for a second, then none for two, by the file; the transfer takes so much longer."""
    loop = VirtualLoop()
    topology = flat(("a", "b"))
    wiring = topology.wire()
    shared_links = SharedLinks(loop, wiring)
    faults = read(
        {"kind": "flap", "target": "a.nic0", "at_s": 0.5, "for_s": 1, "factor": 0.25},
        {"kind": "flap", "target": "b", "at_s": 2, "for_s": 2},
    )
    runner = FaultRunner(faults, loop, {}, shared_links=shared_links, wiring=wiring)

    async def main() -> float:
        runner.start()
        await shared_links.carry("a", "b", 2 * GB)
        return loop.time()

    assert loop.run(main()) == pytest.approx(0.5 + 1.0 + 0.5 + 2.0 + 0.75)
    assert [each.kind for each in runner.struck] == ["flap", "flap"]


def test_faults_by_seed_come_at_the_same_times() -> None:
    """One seed, one history, of any target that fits; about as many as the mean says; none after the end."""

    def history(seed: int) -> list[tuple[float, str]]:
        loop = VirtualLoop()
        wiring = flat(("a", "b", "c")).wire()
        table = {"kind": "flap", "mean_time_between_s": 10, "for_s": 0.1, "until_s": 2000}
        runner = FaultRunner(read(table), loop, {}, seed=seed, shared_links=SharedLinks(loop, wiring), wiring=wiring)

        async def main() -> None:
            runner.start()
            await asyncio.sleep(5000.0)

        loop.run(main())
        return [(each.at_s, each.target) for each in runner.struck]

    assert history(1) == history(1) != history(2)
    assert 150 < len(history(1)) < 250 and history(1)[-1][0] <= 2000
    assert len({target for _, target in history(1)}) == 6


@pytest.mark.parametrize(
    ("start", "end_s"),
    [(ColdStart(2.0, 3 * GB, weights_node="store"), (11, 11, 11)), (ColdStart(2.0, 3 * GB, 1e9), (5, 8, 11)),
     (ColdStart(2.0), (2, 2, 2))],
)  # fmt: skip
def test_workers_that_start_together_share_what_their_weights_come_over(start: ColdStart, end_s: tuple[int]) -> None:
    """Three at once from one store of 1 GB/s: thrice the time of one; from a disk one after the other; and a process
    takes its own time before that."""
    loop = VirtualLoop()
    names = ("w0", "w1", "w2")
    topology = flat(("store", "n0", "n1", "n2"))
    shared_links = SharedLinks(loop, topology.wire([Place(name, f"n{i}") for i, name in enumerate(names)]))
    cold = ColdStarts(dict.fromkeys(names, start), loop, dict.fromkeys(names, "host"), shared_links)

    async def one(name: str) -> float:
        await cold.wait(name)
        return loop.time()

    async def main() -> list[float]:
        return list(await asyncio.gather(*(one(name) for name in names)))

    assert loop.run(main()) == pytest.approx(end_s)
    assert cold.num_starts == 3


def test_cold_starts_are_read() -> None:
    """Without a place that weights come from they take no time."""
    assert read_cold_start(Fields({}), 5 * GB) == ColdStart()
    table = {"cold_start_s": 3, "weights_node": "store"}
    assert read_cold_start(Fields(table), 5 * GB, ("store",)) == ColdStart(3.0, 5 * GB, weights_node="store")
    assert read_cold_start(Fields({"weights_bytes_s": 1e9}), 5 * GB).alone_s == 5.0
    with pytest.raises(ConfigError, match=r"workers\[0\].weights_node: weights come from here or from a disk"):
        read_cold_start(Fields({"weights_bytes_s": 1e9, "weights_node": "a"}, "workers[0]"))
