"""The kinds of policies of gateways that a file of one's own may hold."""

from __future__ import annotations

from ..core.own_policy import Kind
from ..core.policy import Admission
from .pools import Disaggregation
from .replication import Replication
from .rescheduling import Rescheduling
from .routing import Routing

ADMISSION = Kind("admission", Admission)
OF_GATEWAYS = {
    "routing_policy": Kind("routing", Routing, ("index", "stores")),
    "disaggregation": Kind("disaggregation", Disaggregation),
    "migration": Kind("migration", Rescheduling),
    "replication": Kind("replication", Replication),
}
