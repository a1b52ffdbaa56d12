"""The upstreams of one application: models of the registry, and who hears of their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from ...control.audit.log import AuditLog
from ...control.models.registry import ModelRegistry
from ...control.usage.journal import Account
from ...control.usage.meter import Meter
from ...core.ports import Clock
from ..limits import Limits
from .metrics import UpstreamMetrics
from .passing import Ended, UpstreamModel
from .prefixes import Prefixes
from .upstream import Upstream


def add_upstreams(
    models: ModelRegistry,
    upstreams: Sequence[Upstream],
    limits: Limits,
    clock: Clock,
    new_id: Callable[[str], str],
    *,
    max_open: int,
    prefixes: Mapping[str, Prefixes],
    registry: CollectorRegistry,
    meter: Meter | None,
    audit: AuditLog | None,
) -> None:
    """Those of one name are one model. `prefixes`: what they have cached, by that name. `meter`, `audit`: None where
    nothing is counted, or noted."""
    if not upstreams:
        return
    metrics = UpstreamMetrics(upstreams, registry)
    for name in dict.fromkeys(each.name for each in upstreams):
        mine = [each for each in upstreams if each.name == name]
        model = UpstreamModel(name, mine, limits, clock, new_id, max_open=max_open, prefixes=prefixes.get(name))
        model.on_end.append(metrics.ended)
        if meter is not None:
            model.on_end.append(_charging(meter))
        if audit is not None:
            model.on_end.append(_noting(audit))
        models.add(model)


def _charging(meter: Meter) -> Callable[[Ended], None]:
    def charge(ended: Ended) -> None:
        if not ended.counts:
            return
        caller, tally = ended.caller, ended.tally
        number = meter.journal.number_of(Account(caller.tenant.id, caller.key, ended.model))
        meter.journal.append([(number, 1, tally.num_prompt, tally.num_cached, tally.num_output, caller.once)])

    return charge


def _noting(audit: AuditLog) -> Callable[[Ended], None]:
    def note(ended: Ended) -> None:
        audit.note(
            {
                "actor": {"tenant": ended.caller.tenant.id, "client": ended.caller.name},
                "action": "call.end",
                "object": ended.address,
                "outcome": ended.outcome,
                "model": ended.model,
                "prompt_tokens": ended.tally.num_prompt,
                "output_tokens": ended.tally.num_output,
            }
        )

    return note
