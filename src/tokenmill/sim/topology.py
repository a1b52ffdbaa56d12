"""Which links there are between the workers of a cluster, read from tables, and which of them a transfer takes.

    GPU --nvlink--> GPU                                      of one node, over a switch that does not block
    GPU --pcie--> [pcie switch] --> [pcie switch] --> GPU    of one node without NVLink
    GPU --pcie--> NIC --> [rack up] --> [rack down] --> NIC --pcie--> GPU   of two nodes
    node (its host memory) is an address too: its GPUs reach it over pcie, others over its NICs

Each link is one direction of one GPU, switch, NIC or rack. A rack's link to the spine is there only where racks are
oversubscribed: else it cannot bind. A worker of several GPUs sends from all of them at once, each its share, each over
the NIC beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .fields import Fields

BYTES_S = {"nvlink": 450e9, "pcie": 64e9, "rdma": 50e9, "ethernet": 12.5e9, "memory": 20e9}
"""Each direction, as built, where a file does not say: NVLink 4 of an H100 SXM (900 GB/s both ways, NVIDIA H100
datasheet), PCIe 5.0 x16 (128 GB/s both ways, same), a 400 Gb/s RDMA and a 100 Gb/s Ethernet port (IEEE 802.3), and a
copy through the memory of one host, which is an assumption."""
LATENCY_S = {"nvlink": 2e-6, "pcie": 2e-6, "rdma": 5e-6, "ethernet": 50e-6, "memory": 1e-6}
"""Of a whole way over links of a kind: assumptions of the usual order."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host. num_gpus: 0 of one that computes on its cores. nvlink_bytes_s: of each GPU, 0 without NVLink;
    pcie_bytes_s: of each GPU; gpus_per_switch: GPUs behind one PCIe switch, 0 without any, and switch_bytes_s is what
    leads up from it. nic: rdma or ethernet, nic_bytes_s: of each. memory_bytes_s: of copies between workers of the
    host that have no GPU. has_workers: False of one that only stores."""

    name: str
    num_gpus: int = 0
    nvlink_bytes_s: float = 0.0
    pcie_bytes_s: float = BYTES_S["pcie"]
    gpus_per_switch: int = 0
    switch_bytes_s: float = BYTES_S["pcie"]
    num_nics: int = 1
    nic: str = "ethernet"
    nic_bytes_s: float = BYTES_S["ethernet"]
    nic_latency_s: float = LATENCY_S["ethernet"]
    memory_bytes_s: float = BYTES_S["memory"]
    rack: str = ""
    has_workers: bool = True


class Place(NamedTuple):
    """Where a worker is. gpus: of its node; none where it computes on the node's cores."""

    address: str
    node: str
    gpus: tuple[int, ...] = ()


class Route(NamedTuple):
    """share: of the bytes of a transfer. links: by their places in Wiring.bytes_s."""

    share: float
    links: tuple[int, ...]
    latency_s: float


@dataclass(frozen=True, slots=True)
class Topology:
    """nodes: by name. oversubscription: what the NICs of a rack can send, over what its way to the spine carries; 1:
    the spine never binds."""

    nodes: Mapping[str, Node]
    oversubscription: float = 1.0
    spine_latency_s: float = 0.0

    def wire(self, places: Iterable[Place] = ()) -> Wiring:
        """Links, with workers at their places."""
        return Wiring(self, places)


def read_topology(table: Mapping[str, Any] | Fields) -> Topology:
    """From `[[nodes]]` and `[spine]`. Raises ConfigError, which names the field."""
    fields = table if isinstance(table, Fields) else Fields(table, "topology")
    nodes: dict[str, Node] = {}
    for each in fields.tables("nodes"):
        for node in _read_nodes(each):
            if node.name in nodes:
                raise each.error("name", f"there are two nodes {node.name!r}; give each its own name")
            nodes[node.name] = node
    if not nodes:
        raise fields.error("nodes", "at least one [[nodes]] is needed")
    spine = fields.table("spine")
    over = spine.number("oversubscription", 1.0, least=1.0)
    latency_s = spine.number("latency_s", 0.0)
    per_rack = spine.count("nodes_per_rack", 0)
    spine.end()
    fields.end()
    if per_rack:
        nodes = {
            name: node if node.rack else replace(node, rack=f"rack{number // per_rack}")
            for number, (name, node) in enumerate(nodes.items())
        }
    if over > 1 and not any(node.rack for node in nodes.values()):
        raise spine.error("nodes_per_rack", "is needed where racks are oversubscribed")
    return Topology(nodes, over, latency_s)


def _read_nodes(each: Fields) -> list[Node]:
    name = each.text("name", "n")
    count = each.count("count", 1, least=1)
    num_gpus = each.count("gpus", 0)
    has_nvlink = each.flag("nvlink", each.has("nvlink_bytes_s"))
    nic = each.text("nic", "rdma" if num_gpus else "ethernet", among=("rdma", "ethernet"))
    switch = each.count("gpus_per_switch", 0)
    if switch and num_gpus % switch:
        raise each.error("gpus_per_switch", f"{num_gpus} GPUs cannot be divided among switches of {switch}")
    pcie_bytes_s = each.number("pcie_bytes_s", BYTES_S["pcie"], is_open=True)
    values: dict[str, Any] = {
        "num_gpus": num_gpus,
        "nvlink_bytes_s": each.number("nvlink_bytes_s", BYTES_S["nvlink"], is_open=True) if has_nvlink else 0.0,
        "pcie_bytes_s": pcie_bytes_s,
        "gpus_per_switch": switch,
        "switch_bytes_s": each.number("switch_bytes_s", pcie_bytes_s, is_open=True),
        "num_nics": each.count("nics", 1, least=1),
        "nic": nic,
        "nic_bytes_s": each.number("nic_bytes_s", BYTES_S[nic], is_open=True),
        "nic_latency_s": each.number("nic_latency_s", LATENCY_S[nic]),
        "memory_bytes_s": each.number("memory_bytes_s", BYTES_S["memory"], is_open=True),
        "rack": each.text("rack", ""),
        "has_workers": each.flag("has_workers", True),
    }
    each.end()
    return [Node(name if count == 1 and each.has("name") else f"{name}{number}", **values) for number in range(count)]


class Wiring:
    """bytes_s: of each link; places: link name -> its place there. Addresses are those of workers and nodes.

    Names of links: `n0.gpu3.pcie.up`, `n0.gpu3.nvlink.down`, `n0.switch1.up`, `n0.nic1.down`, `n0.memory`, `rack0.up`.
    """

    def __init__(self, topology: Topology, places: Iterable[Place]) -> None:
        self.bytes_s: list[float] = []
        self.places: dict[str, int] = {}
        self._topology = topology
        self._at = {name: Place(name, name) for name in topology.nodes}
        for place in places:
            assert place.node in topology.nodes, place
            self._at[place.address] = place
        self._routes: dict[tuple[str, str], tuple[Route, ...]] = {}
        for node in topology.nodes.values():
            self._add_node(node)
        self._add_racks()

    def links_of(self, name: str) -> tuple[str, ...]:
        """Links of a node, worker, NIC, rack or the like: those whose names begin with it, or the ones of the worker's
        place."""
        found = tuple(link for link in self.places if link == name or link.startswith(f"{name}."))
        if found or name not in self._at:
            return found
        place = self._at[name]
        node = self._topology.nodes[place.node]
        if not place.gpus:
            return self.links_of(node.name)
        nics = {f"{node.name}.nic{self._nic(node, gpu)}": None for gpu in place.gpus}
        return tuple(
            link for part in (*(f"{node.name}.gpu{gpu}" for gpu in place.gpus), *nics) for link in self.links_of(part)
        )

    def latency_s(self, source: str, destination: str) -> float:
        return max((route.latency_s for route in self.routes(source, destination)), default=0.0)

    def routes(self, source: str, destination: str) -> tuple[Route, ...]:
        """The ways of a transfer, each with its share of the bytes. None to oneself."""
        known = self._routes.get((source, destination))
        if known is None:
            known = self._routes[source, destination] = self._find(self._at[source], self._at[destination])
        return known

    # ---- links ----

    def _add(self, name: str, bytes_s: float) -> None:
        for way in ("up", "down"):
            self.places[f"{name}.{way}"] = len(self.bytes_s)
            self.bytes_s.append(bytes_s)

    def _add_node(self, node: Node) -> None:
        for nic in range(node.num_nics):
            self._add(f"{node.name}.nic{nic}", node.nic_bytes_s)
        for gpu in range(node.num_gpus):
            self._add(f"{node.name}.gpu{gpu}.pcie", node.pcie_bytes_s)
            if node.nvlink_bytes_s:
                self._add(f"{node.name}.gpu{gpu}.nvlink", node.nvlink_bytes_s)
        for switch in range(node.num_gpus // node.gpus_per_switch if node.gpus_per_switch else 0):
            self._add(f"{node.name}.switch{switch}", node.switch_bytes_s)
        self.places[f"{node.name}.memory"] = len(self.bytes_s)
        self.bytes_s.append(node.memory_bytes_s)

    def _add_racks(self) -> None:
        topology = self._topology
        if topology.oversubscription <= 1:
            return
        widths: dict[str, float] = {}
        for node in topology.nodes.values():
            widths[node.rack] = widths.get(node.rack, 0.0) + node.num_nics * node.nic_bytes_s
        for rack, bytes_s in widths.items():
            if rack:
                self._add(rack, bytes_s / topology.oversubscription)

    # ---- ways ----

    def _find(self, source: Place, destination: Place) -> tuple[Route, ...]:
        if source == destination:
            return ()
        num = max(len(source.gpus), len(destination.gpus), 1)
        shares: dict[tuple[int, ...], float] = {}
        latency_s = 0.0
        for nth in range(num):
            from_gpu = source.gpus[nth * len(source.gpus) // num] if source.gpus else -1
            to_gpu = destination.gpus[nth * len(destination.gpus) // num] if destination.gpus else -1
            names, latency_s = self._way(source.node, from_gpu, destination.node, to_gpu, nth)
            links = tuple(self.places[name] for name in names)
            shares[links] = shares.get(links, 0.0) + 1 / num
        return tuple(Route(share, links, latency_s) for links, share in shares.items())

    def _way(self, source: str, from_gpu: int, destination: str, to_gpu: int, nth: int) -> tuple[list[str], float]:
        one, other = self._topology.nodes[source], self._topology.nodes[destination]
        if source == destination:
            return self._inside(one, from_gpu, to_gpu)
        names: list[str] = []
        if from_gpu >= 0:
            names.append(f"{source}.gpu{from_gpu}.pcie.up")
        names.append(f"{source}.nic{self._nic(one, from_gpu, nth)}.up")
        if one.rack != other.rack:
            names += [name for name in (f"{one.rack}.up", f"{other.rack}.down") if name in self.places]
        names.append(f"{destination}.nic{self._nic(other, to_gpu, nth)}.down")
        if to_gpu >= 0:
            names.append(f"{destination}.gpu{to_gpu}.pcie.down")
        spine_s = self._topology.spine_latency_s if one.rack != other.rack else 0.0
        return names, max(one.nic_latency_s, other.nic_latency_s) + spine_s

    def _inside(self, node: Node, from_gpu: int, to_gpu: int) -> tuple[list[str], float]:
        name = node.name
        if from_gpu < 0 and to_gpu < 0:
            return [f"{name}.memory"], LATENCY_S["memory"]
        if from_gpu == to_gpu:
            return [], 0.0
        if from_gpu >= 0 and to_gpu >= 0 and node.nvlink_bytes_s:
            return [f"{name}.gpu{from_gpu}.nvlink.up", f"{name}.gpu{to_gpu}.nvlink.down"], LATENCY_S["nvlink"]
        size = node.gpus_per_switch
        one = from_gpu // size if size and from_gpu >= 0 else -1
        other = to_gpu // size if size and to_gpu >= 0 else -1
        names = [f"{name}.gpu{from_gpu}.pcie.up"] if from_gpu >= 0 else []
        if one != other:
            names += [f"{name}.switch{one}.up"] if one >= 0 else []
            names += [f"{name}.switch{other}.down"] if other >= 0 else []
        names += [f"{name}.gpu{to_gpu}.pcie.down"] if to_gpu >= 0 else []
        return names, LATENCY_S["pcie"]

    @staticmethod
    def _nic(node: Node, gpu: int, nth: int = 0) -> int:
        """The one beside the GPU; of a host without, one after the other."""
        return gpu * node.num_nics // node.num_gpus if gpu >= 0 else nth % node.num_nics
