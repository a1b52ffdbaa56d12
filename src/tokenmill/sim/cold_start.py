"""How long a worker takes to come up: its process begins, its weights come over a link, and it is ready.

Weights that come from a store over the network share its links with everything else, so that a rack of workers that
start together waits for the store's ports; weights on a host's own disk are read one worker after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from .fabric import Fabric
from .fields import Fields
from .loop import VirtualLoop


@dataclass(frozen=True, slots=True)
class ColdStart:
    """begin_s: of the process, and all that does not depend on weights. weights_bytes: that come from the node
    `weights_node` of the topology, or at weights_bytes_s from the host's own disk; 0: none do."""

    begin_s: float = 0.0
    weights_bytes: int = 0
    weights_bytes_s: float = 2e9
    weights_node: str = ""

    @property
    def alone_s(self) -> float:
        """Without what its way over the network takes."""
        return self.begin_s + (0.0 if self.weights_node else self.weights_bytes / self.weights_bytes_s)


def read_cold_start(fields: Fields, weights_bytes: int = 0, nodes: tuple[str, ...] = ()) -> ColdStart:
    """From the fields of a table of workers: cold_start_s, weights_bytes_s or weights_node (without either, weights
    take no time). weights_bytes: of the model, 0 where its shape is not known. Raises ConfigError, which names
    the field."""
    begin_s = fields.number("cold_start_s", 0.0)
    has_disk, has_node = fields.has("weights_bytes_s"), fields.has("weights_node")
    if has_disk and has_node:
        raise fields.error(
            "weights_node", "weights come from here or from a disk (weights_bytes_s), not both; keep one"
        )
    if (has_disk or has_node) and not weights_bytes:
        key = "weights_node" if has_node else "weights_bytes_s"
        raise fields.error(key, "needs a [model]: its shape says how many bytes the weights have")
    if has_node and not nodes:
        raise fields.error("weights_node", "needs [topology], which has the nodes; give one, or weights_bytes_s")
    bytes_s = fields.number("weights_bytes_s", 2e9, is_open=True)
    node = fields.text("weights_node", among=nodes) if has_node else ""
    return ColdStart(begin_s, weights_bytes if has_disk or has_node else 0, bytes_s, node)


class ColdStarts:
    """Of all workers. starts: by worker; hosts: worker -> what it shares a disk with. num_starts, taken_s: so far, in
    all."""

    def __init__(
        self,
        starts: Mapping[str, ColdStart],
        loop: VirtualLoop,
        hosts: Mapping[str, str] | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        self.num_starts = 0
        self.taken_s = 0.0
        self._starts = starts
        self._loop = loop
        self._hosts = hosts or {}
        self._fabric = fabric
        self._free_s: dict[str, float] = {}

    async def wait(self, worker: str) -> None:
        """Returns when it can serve that has begun to start now."""
        start = self._starts.get(worker, ColdStart())
        began_s = self._loop.time()
        if start.begin_s:
            await asyncio.sleep(start.begin_s)
        if start.weights_bytes and start.weights_node and self._fabric is not None:
            await self._fabric.carry(start.weights_node, worker, start.weights_bytes)
        elif start.weights_bytes:
            host, now = self._hosts.get(worker, worker), self._loop.time()
            self._free_s[host] = max(now, self._free_s.get(host, 0.0)) + start.weights_bytes / start.weights_bytes_s
            await asyncio.sleep(self._free_s[host] - now)
        self.num_starts += 1
        self.taken_s += self._loop.time() - began_s
