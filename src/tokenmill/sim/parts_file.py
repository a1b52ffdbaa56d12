"""Sections of a cluster's file on what workers share, and where each worker is. docs/operate/simulate-parts.md says
every key.

[[topology.nodes]], [topology.spine]   links        [[tiers]]    KV below the pools
[topology] file                        links of a file of their own
[host]     cores, front end and clients             [[faults]]   what fails, and when
[[workers]]: node, threads, cold_start_s, weights_bytes_s or weights_node
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.errors import ConfigError, Infeasible
from .cold_start import ColdStart, read_cold_start
from .fault_script import read_faults
from .fields import Fields
from .parts import PartsPlan, read_cores
from .tier_plan import read_tiers
from .topology import Topology, read_topology


def no_topology(path: str) -> Topology:
    raise ConfigError("topologies cannot be read here; give their nodes")


def read_parts(fields: Fields, named: Callable[[str], Topology] = no_topology) -> PartsPlan:
    """From the whole file's fields. named: the topology in such a file. Raises ConfigError, which names the field."""
    topology = _read_topology(fields.table("topology"), named) if fields.has("topology") else None
    nodes = tuple(topology.nodes) if topology is not None else ()
    return PartsPlan(topology, read_tiers(fields, nodes=nodes), read_faults(fields), read_cores(fields.table("host")))


def _read_topology(fields: Fields, named: Callable[[str], Topology]) -> Topology:
    """In the section itself, or in the file that it names and that other clusters may name, too."""
    if not fields.has("file"):
        return read_topology(fields)
    name = fields.text("file")
    for key in ("nodes", "spine"):
        if fields.has(key):
            raise fields.error(key, f"links are described once; keep this, or file = {name!r}")
    fields.end()
    try:
        return named(name)
    except ConfigError as error:
        raise fields.error("file", error.message) from None


@dataclass(slots=True)
class Placer:
    """Puts workers on nodes, in the order of the file: each GPU is one worker's, and a worker without any goes where
    the fewest are of the nodes that have no GPU."""

    topology: Topology | None
    _num_used: dict[str, int] = field(default_factory=dict)

    def place(self, fields: Fields, num_gpus: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
        """(node, its GPUs) of each worker of a table; `node`: where all of them are. Raises Infeasible where there is
        no room."""
        topology = self.topology
        if topology is None:
            return [(fields.text("node", ""), ())] * count
        wanted = fields.text("node", "", among=list(topology.nodes))
        nodes = [wanted] if wanted else list(topology.nodes)
        found: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(count):
            node = self._next(nodes, num_gpus)
            if node is None:
                where = f"node {wanted!r}" if wanted else "the topology's nodes"
                what = f"of {count} workers of {num_gpus} GPUs {len(found)} fit on {where}; give more nodes or GPUs"
                raise fields.error("count", what, Infeasible)
            used = self._num_used.get(node, 0)
            self._num_used[node] = used + max(1, num_gpus)
            found.append((node, tuple(range(used, used + num_gpus))))
        return found

    def _next(self, nodes: list[str], num_gpus: int) -> str | None:
        assert self.topology is not None
        made, used = self.topology.nodes, self._num_used
        if num_gpus:
            return next((name for name in nodes if made[name].num_gpus - used.get(name, 0) >= num_gpus), None)
        without = [name for name in nodes if made[name].has_workers and not made[name].num_gpus]
        return min(without, key=lambda name: used.get(name, 0), default=None)


def read_cold(fields: Fields, parts: PartsPlan, weights_bytes: float) -> ColdStart:
    """How lives of the workers of a table begin. weights_bytes: of the model in one worker."""
    nodes = tuple(parts.topology.nodes) if parts.topology is not None else ()
    return read_cold_start(fields, round(weights_bytes), nodes)
