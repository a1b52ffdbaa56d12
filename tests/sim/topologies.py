"""Topologies that several tests have."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.sim.topology import Node, Topology


def flat(names: Iterable[str], bytes_s: float = 1e9, latency_s: float = 0.0) -> Topology:
    """A node for each name, with one NIC."""
    return Topology({name: Node(name, nic_bytes_s=bytes_s, nic_latency_s=latency_s) for name in names})
