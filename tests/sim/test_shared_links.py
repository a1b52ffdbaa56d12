"""Links that flows share: rates are max-min fair, bytes are conserved, and ends are exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from topologies import flat

from tokenmill.core.errors import ConfigError
from tokenmill.sim.loop import VirtualLoop
from tokenmill.sim.shared_links import Bundle, SharedLinks, fair_rates
from tokenmill.sim.topology import Place, Topology, read_topology

GB = 10**9
PAIR = flat(("a", "b", "c", "d"), bytes_s=1e9, latency_s=0.001)


def ends_of(
    topology: Topology,
    transfers: Sequence[tuple[float, str, str, int]],
    places: Sequence[Place] = (),
    flaps: Sequence[tuple[float, str, float]] = (),
) -> tuple[list[float], SharedLinks]:
    """When each transfer (begin_s, source, destination, bytes) has arrived."""
    loop = VirtualLoop()
    shared_links = SharedLinks(loop, topology.wire(places))
    ends = [0.0] * len(transfers)

    async def carry(nth: int) -> None:
        begin_s, source, destination, num_bytes = transfers[nth]
        await asyncio.sleep(begin_s)
        await shared_links.carry(source, destination, num_bytes)
        ends[nth] = loop.time()

    async def flap(at_s: float, link: str, share: float) -> None:
        await asyncio.sleep(at_s)
        shared_links.set_share(link, share)

    async def main() -> None:
        tasks = [loop.spawn(carry(nth), f"transfer {nth}") for nth in range(len(transfers))]
        tasks += [loop.spawn(flap(*each), f"flap {each}") for each in flaps]
        for task in tasks:
            await task

    loop.run(main())
    return ends, shared_links


def by_rising(capacities: dict[int, float], bundles: Sequence[Bundle]) -> list[float]:
    """Brute force: every flow for itself, one round for each that stops."""
    flows = [(nth, bundle) for nth, bundle in enumerate(bundles) for _ in range(bundle.num_flows)]
    rates = [0.0] * len(flows)
    stopped: set[int] = set()
    while len(stopped) < len(flows):
        rising = [i for i in range(len(flows)) if i not in stopped]
        room = [bundle.most_bytes_s - rates[i] for i, (_, bundle) in enumerate(flows) if i not in stopped]
        shares = {
            link: (bytes_s - sum(rates[i] for i, (_, bundle) in enumerate(flows) if link in bundle.links))
            / max(1, sum(link in flows[i][1].links for i in rising))
            for link, bytes_s in capacities.items()
            if any(link in flows[i][1].links for i in rising)
        }
        step = min([*room, *shares.values()])
        for i in rising:
            rates[i] += step
        full = {link for link, share in shares.items() if share <= step + 1e-9}
        stopped |= {i for i in rising if full & set(flows[i][1].links) or flows[i][1].most_bytes_s - rates[i] <= 1e-9}
    return [rates[[nth for nth, _ in flows].index(place)] for place in range(len(bundles))]


@pytest.mark.parametrize("seed", range(60))
def test_rates_are_those_of_brute_force(seed: int) -> None:
    """Filling link by link gives what raising every flow by itself gives."""
    rng = random.Random(seed)
    capacities = {link: rng.choice([0.5, 1.0, 2.0, 7.0]) * rng.uniform(1, 3) for link in range(rng.randint(1, 7))}
    bundles = [
        Bundle(
            tuple(rng.sample(range(len(capacities)), rng.randint(1, min(4, len(capacities))))),
            rng.randint(1, 4),
            rng.choice([100.0, rng.uniform(0.1, 2.0)]),
        )
        for _ in range(rng.randint(1, 9))
    ]
    assert fair_rates(capacities, bundles) == pytest.approx(by_rising(capacities, bundles), abs=1e-7)


def test_two_flows_on_one_link_take_twice_as_long_and_latency_counts_once() -> None:
    """One second alone, two together; into different hosts from one, too; apart they do not see each other."""
    alone, _ = ends_of(PAIR, [(0, "a", "b", GB)])
    together, _ = ends_of(PAIR, [(0, "a", "b", GB), (0, "a", "b", GB)])
    from_one, _ = ends_of(PAIR, [(0, "a", "b", GB), (0, "a", "c", GB)])
    apart, _ = ends_of(PAIR, [(0, "a", "b", GB), (0, "c", "d", GB), (0, "b", "a", GB)])
    assert alone == pytest.approx([1.001])
    assert together == pytest.approx([2.001] * 2)
    assert from_one == pytest.approx([2.001] * 2)
    assert apart == pytest.approx([1.001] * 3)


def test_a_flow_takes_up_what_another_leaves() -> None:
    """The second begins after half of the first: 0.5 s alone, then half each, then alone again."""
    ends, _ = ends_of(PAIR, [(0, "a", "b", GB), (0.5, "a", "b", GB)])
    assert ends == pytest.approx([1.501, 2.001])


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_conserved_and_ends_are_those_of_small_steps(seed: int) -> None:
    """Every link carries the bytes of the transfers over it; each ends where a simulation of all flows, each by itself
    and with rates of brute force, has it end."""
    rng = random.Random(seed)
    names = "abcd"
    transfers = []
    for _ in range(12):
        source, destination = rng.sample(names, 2)
        transfers.append((rng.choice([0.0, rng.uniform(0, 3)]), source, destination, rng.randint(1, GB)))
    ends, shared_links = ends_of(PAIR, transfers)
    carried = {use.name: use.carried_bytes for use in shared_links.use()}
    for name in names:
        assert carried[f"{name}.nic0.up"] == pytest.approx(sum(t[3] for t in transfers if t[1] == name), abs=50)
        assert carried[f"{name}.nic0.down"] == pytest.approx(sum(t[3] for t in transfers if t[2] == name), abs=50)
    assert all(not use.num_flows for use in shared_links.use())
    assert ends == pytest.approx(_by_hand(transfers), abs=1e-6)


def _by_hand(transfers: Sequence[tuple[float, str, str, int]]) -> list[float]:
    """Ends of transfers over PAIR: from event to event, with rates of brute force in between."""
    links = {name: nth for nth, name in enumerate(f"{n} {way}" for n in "abcd" for way in ("up", "down"))}
    left = [float(t[3]) for t in transfers]
    ends = [0.0] * len(transfers)
    now = 0.0
    while any(each > 0 for each in left):
        going = [i for i, t in enumerate(transfers) if t[0] <= now and left[i] > 0]
        bundles = [Bundle((links[f"{transfers[i][1]} up"], links[f"{transfers[i][2]} down"]), 1, 1e12) for i in going]
        rates = by_rising(dict.fromkeys(range(8), 1e9), bundles) if going else []
        waits = [t[0] - now for t in transfers if t[0] > now]
        step = min(waits + [left[i] / rate for i, rate in zip(going, rates, strict=True)])
        now += step
        for i, rate in zip(going, rates, strict=True):
            left[i] -= rate * step
            if left[i] <= 1e-3:
                left[i], ends[i] = 0.0, now + 0.001
    return ends


def test_a_link_that_is_down_holds_its_flows_up() -> None:
    """Nothing moves for half a second; another way goes on."""
    ends, _ = ends_of(
        PAIR, [(0, "a", "b", GB), (0, "c", "d", GB)], flaps=[(0.25, "a.nic0.up", 0.0), (0.75, "a.nic0.up", 1.0)]
    )
    assert ends == pytest.approx([1.501, 1.001])


def test_a_transfer_that_is_given_up_leaves_its_share_to_the_others() -> None:
    """Half a second of two, then the rest alone."""
    loop = VirtualLoop()
    shared_links = SharedLinks(loop, PAIR.wire())

    async def main() -> float:
        other = asyncio.ensure_future(shared_links.carry("a", "b", GB))
        loop.call_later(0.5, other.cancel)
        await shared_links.carry("a", "b", GB)
        return loop.time()

    assert loop.run(main()) == pytest.approx(1.251)


def test_thousands_of_flows_cost_no_more_than_their_ways() -> None:
    """5,000 transfers at once from one host all end together, after what their bytes take."""
    ends, shared_links = ends_of(PAIR, [(0, "a", "bcd"[i % 3], GB // 5000) for i in range(5000)])
    assert ends == pytest.approx([1.001] * 5000, abs=1e-5)
    assert shared_links.num_carried == 5000


NODES = {
    "nodes": [{"count": 4, "gpus": 8, "nvlink": True, "nics": 4, "nic": "rdma"}, {"name": "store", "nics": 2}],
    "spine": {"oversubscription": 4, "nodes_per_rack": 2, "latency_s": 1e-5},
}


def test_ways_go_over_what_the_file_says() -> None:
    """GPUs of a node over NVLink; between racks over PCIe, the NIC beside each GPU, and the racks' ways to the spine;
    a worker of four GPUs sends from all of them; host memory is reached over PCIe."""
    topology = read_topology(NODES)
    wiring = topology.wire(
        [Place("w0", "n0", (0,)), Place("w1", "n0", (1,)), Place("w2", "n2", (0, 1, 2, 3)), Place("w3", "n3", (6,))]
    )
    names = {place: name for name, place in wiring.places.items()}

    def ways(source: str, destination: str) -> list[tuple[float, list[str]]]:
        return [(route.share, [names[link] for link in route.links]) for route in wiring.routes(source, destination)]

    assert ways("w0", "w1") == [(1.0, ["n0.gpu0.nvlink.up", "n0.gpu1.nvlink.down"])]
    assert ways("w2", "w3")[0] == (
        0.25, ["n2.gpu0.pcie.up", "n2.nic0.up", "n3.nic3.down", "n3.gpu6.pcie.down"],
    )  # fmt: skip
    assert [share for share, _ in ways("w2", "w3")] == [0.25] * 4
    assert ways("w0", "w2")[0][1][1:4] == ["n0.nic0.up", "rack0.up", "rack1.down"]
    assert ways("w0", "n0") == [(1.0, ["n0.gpu0.pcie.up"])]
    assert ways("store", "w0") == [
        (1.0, ["store.nic0.up", "rack2.up", "rack0.down", "n0.nic0.down", "n0.gpu0.pcie.down"])
    ]
    assert ways("w0", "w0") == []
    parts = ("gpu6.pcie", "gpu6.nvlink", "nic3")
    assert wiring.links_of("w3") == tuple(f"n3.{part}.{way}" for part in parts for way in ("up", "down"))
    assert wiring.latency_s("w0", "w2") == pytest.approx(1.5e-5)


def test_oversubscribed_racks_slow_what_leaves_them() -> None:
    """Eight NICs of a rack at 50 GB/s with a way up of 100: all eight at once take four times as long."""
    topology = read_topology(NODES)
    places = [Place(f"w{n}", f"n{n // 4}", (2 * (n % 4),)) for n in range(16)]
    ends, _ = ends_of(topology, [(0, f"w{n}", f"w{n + 8}", 50 * GB) for n in range(8)], places)
    alone, _ = ends_of(topology, [(0, "w0", "w8", 50 * GB)], places)
    assert alone == pytest.approx([1.0], abs=1e-4)
    assert ends == pytest.approx([4.0] * 8, abs=1e-4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "topology.nodes: at least one"),
        ({"nodes": [{"nic": "rdmaa"}]}, "topology.nodes[0].nic: 'rdmaa' is unknown; did you mean 'rdma'?"),
        ({"nodes": [{"gpuss": 8}]}, "topology.nodes[0].gpuss: no such key; did you mean 'gpus'?"),
        ({"nodes": [{"count": 0}]}, "topology.nodes[0].count: a whole number of 1 or more is needed, not 0"),
        ({"nodes": [{"nic_bytes_s": 0}]}, "topology.nodes[0].nic_bytes_s: a number that is more than 0 is needed"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "topology.nodes[1].name: there are two nodes 'a'"),
        ({"nodes": [{"gpus": 8, "gpus_per_switch": 3}]}, "topology.nodes[0].gpus_per_switch: 8 GPUs cannot"),
        ({"nodes": [{}], "spine": {"oversubscription": 2}}, "topology.spine.nodes_per_rack: is needed"),
        ({"nodes": [{}], "spine": {"oversubscription": 0.5}}, "topology.spine.oversubscription: a number that is 1"),
        ({"nodes": "n"}, "topology.nodes: tables are needed"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(table: dict[str, object], message: str) -> None:
    """The line begins with the place of the field."""
    with pytest.raises(ConfigError) as raised:
        read_topology(table)
    assert raised.value.message.startswith(message)
    assert "\n" not in raised.value.message
