"""The kinds of policies that a file of one's own may hold, by the setting that names them."""

from __future__ import annotations

from ..cluster.pools import Disaggregation
from ..cluster.replication import Replication
from ..cluster.rescheduling import Rescheduling
from ..cluster.routing import Routing
from ..core.own_policy import Kind
from ..core.policy import Admission
from ..kv.tiers.replacement import Replacement, TierAdmission
from ..node.options import OWN_POLICIES

ADMISSION = Kind("admission", Admission)
TIERING = Kind("tiering", Replacement, ("num_bytes",))
TIER_ADMISSION = Kind("tier-admission", TierAdmission, ("num_bytes",))
OF_GATEWAYS = {
    "routing_policy": Kind("routing", Routing, ("index", "stores")),
    "disaggregation": Kind("disaggregation", Disaggregation),
    "migration": Kind("migration", Rescheduling),
    "replication": Kind("replication", Replication),
}
KINDS = (*OF_GATEWAYS.values(), *OWN_POLICIES.values(), ADMISSION, TIERING, TIER_ADMISSION)
"""All of them, in the order in which they are told of."""
