"""What a simulated service is made of, as `cluster_file` reads it or a test writes it.

Settings of the gateway have the names and defaults of `tokenmill serve`; there are no other defaults where the live
programs have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cluster.admission import BoundedWait
from ..cluster.gateway import Gateway
from ..cluster.pools import DECISIONS, decision_named
from ..cluster.replication import POLICIES as REPLICATION
from ..cluster.replication import replication_named
from ..cluster.rescheduling import POLICIES as MIGRATION
from ..cluster.rescheduling import policy_named
from ..cluster.router import ROUTING_POLICIES, USUAL_ROUTING
from ..core.config import EngineConfig
from ..core.cost import CostModel
from ..core.terms import NUM_PRIORITY_CLASSES, USUAL, Terms
from .acceptance import Acceptance
from .fields import Fields
from .network import Shape
from .parts import NO_PARTS, ColdStart, PartsPlan, Site

ADMISSIONS = ("enforce", "shadow", "off")
_FOREVER_S = 1e9


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """Policies by name. max_queue_s: a call that would wait longer is refused, 0: none is. admission: whether calls are
    refused that are expected to miss their targets. shares_rows: tenants and clients have the engines' rows in turn;
    else each request goes to its engine when it comes. terms: what the requests of a tenant may expect; under "" those
    of all others."""

    routing_policy: str = USUAL_ROUTING
    disaggregation: str = "cost"
    migration: str = "on"
    replication: str = "on"
    admission: str = "enforce"
    max_queue_s: float = 10.0
    max_open_requests: int = 8192
    max_open_tokens: int = 2_000_000
    shares_rows: bool = True
    terms: Mapping[str, Terms] = field(default_factory=dict)

    def set_up(self, gateway: Gateway) -> None:
        gateway.is_shared = self.shares_rows
        gateway.router.choose_by(self.routing_policy)
        gateway.pools.decision = decision_named(self.disaggregation)
        gateway.reviews.policy = policy_named(self.migration)
        gateway.reviews.replication = replication_named(self.replication)
        gateway.admission = BoundedWait(
            self.max_open_requests, self.max_open_tokens, self.max_queue_s or _FOREVER_S, self.admission != "off"
        )

    def terms_of(self, terms: Terms) -> Terms:
        """With what the tenant has, or else all have, where the request does not say."""
        if terms != USUAL._replace(tenant=terms.tenant):
            return terms
        return self.terms.get(terms.tenant) or self.terms.get("", USUAL)._replace(tenant=terms.tenant)


def read_gateway(fields: Fields) -> GatewayPlan:
    """From `[router]`, `[admission]`, `[slo]` and `[tenants.NAME]`. Raises ConfigError, which names the field."""
    router = fields.table("router")
    routing = router.text("routing_policy", USUAL_ROUTING, among=ROUTING_POLICIES)
    splits = router.text("disaggregation", "cost", among=DECISIONS)
    migration = router.text("migration", "on", among=MIGRATION)
    replication = router.text("replication", "on", among=REPLICATION)
    router.end()
    door = fields.table("admission")
    admission = door.text("admission", "enforce", among=ADMISSIONS)
    max_queue_s = door.number("max_queue_s", 10.0)
    most_requests = door.count("max_open_requests", 8192, least=1)
    most_tokens = door.count("max_open_tokens", 2_000_000, least=1)
    shares_rows = door.flag("shares_rows", True)
    door.end()
    usual = _read_terms(fields.table("slo"), USUAL)
    terms = {} if usual == USUAL else {"": usual}
    tenants = fields.table("tenants")
    for name in tenants.names:
        terms[name] = _read_terms(tenants.table(name), usual._replace(tenant=name))
    tenants.end()
    return GatewayPlan(
        routing,
        splits,
        migration,
        replication,
        admission,
        max_queue_s,
        most_requests,
        most_tokens,
        shares_rows,
        terms=terms,
    )


def _read_terms(fields: Fields, usual: Terms) -> Terms:
    """weight, kv_share and class, and targets in milliseconds as objectives are told elsewhere."""
    terms = usual._replace(
        priority_class=fields.count("priority_class", usual.priority_class),
        weight=fields.number("weight", usual.weight, is_open=True),
        kv_share=fields.number("kv_share", usual.kv_share, most=1.0, is_open=True),
        ttft_s=fields.number("ttft_ms", 1e3 * usual.ttft_s) / 1e3,
        tpot_s=fields.number("tpot_ms", 1e3 * usual.tpot_s) / 1e3,
        timeout_s=fields.number("timeout_s", usual.timeout_s),
    )
    if terms.priority_class >= NUM_PRIORITY_CLASSES:
        what = f"from 0 to {NUM_PRIORITY_CLASSES - 1} is needed, not {terms.priority_class}"
        raise fields.error("priority_class", what)
    fields.end()
    return terms


LAN = Shape(latency_s=0.0002, byte_s=1e-10)
"""Messages take 0.2 ms, and a wire carries 10 GB a second."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker. name: its address on the network, too; node: the machine it stands in; cost_model: what its steps
    take; start_s: from the beginning of the run until it is ready; price_per_h: in dollars, of all its hardware, 0
    where nobody has said. gpus: of the node, where the topology has some; threads: of its steps, where cores are
    shared; cold: how a further life begins, None: as the first one; acceptance: what comes of drafts, where config has
    some."""

    name: str
    pool: str
    config: EngineConfig
    cost_model: CostModel
    node: str = ""
    start_s: float = 0.0
    price_per_h: float = 0.0
    gpus: tuple[int, ...] = ()
    threads: int = 1
    cold: ColdStart | None = None
    acceptance: Acceptance | None = None

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
