"""What a simulated service is made of, as `cluster_file` reads it or a test writes it. No defaults of its own where the
live programs have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.config import EngineConfig
from ..core.cost import StepLaw
from .cold_start import ColdStart
from .gateway_plan import GatewayPlan
from .network import Shape
from .parts import NO_PARTS, PartsPlan, Site

LAN = Shape(latency_s=0.0002, byte_s=1e-10)
"""Messages take 0.2 ms, and a wire carries 10 GB a second."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker. name: its address on the network, too; node: the machine it stands in; law: what its steps take;
    start_s: from the beginning of the run until it is ready; price_per_h: in dollars, of all its hardware, 0 where
    nobody has said. gpus: of the node, where the topology has some; threads: of its steps, where cores are shared;
    cold: how a further life begins, None: as the first one."""

    name: str
    pool: str
    config: EngineConfig
    law: StepLaw
    node: str = ""
    start_s: float = 0.0
    price_per_h: float = 0.0
    gpus: tuple[int, ...] = ()
    threads: int = 1
    cold: ColdStart | None = None

    @property
    def site(self) -> Site:
        cold = ColdStart(self.start_s) if self.cold is None else self.cold
        return Site(self.name, self.config, self.node, self.gpus, self.threads, cold)


@dataclass(frozen=True, slots=True)
class Deployment:
    """workers: in the order in which they join; shape: of messages between programs, and of the wires for KV;
    parts: what workers share; gateway: its settings, None of one that lets everybody in; facts: what it is, to be
    printed; load: options of the load that usually comes."""

    workers: tuple[WorkerPlan, ...]
    shape: Shape = LAN
    parts: PartsPlan = NO_PARTS
    gateway: GatewayPlan | None = None
    facts: tuple[tuple[str, str], ...] = ()
    load: Mapping[str, Any] = field(default_factory=dict)

    @property
    def price_per_h(self) -> float:
        """In dollars, of all workers; 0 where the price of one is not known."""
        prices = [each.price_per_h for each in self.workers]
        return sum(prices) if all(prices) else 0.0
