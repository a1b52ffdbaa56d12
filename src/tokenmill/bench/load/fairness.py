"""How evenly tenants were served: each one's speed, and Jain's index over them (Jain, Chiu and Hawe 1984)."""

from __future__ import annotations

from collections.abc import Sequence

from ..result import Fairness, RequestRow, TenantRow
from .histogram import quantile


def fairness(rows: Sequence[RequestRow]) -> Fairness:
    """Per tenant; a run without tenants is one tenant, and its index says nothing."""
    by_tenant: dict[str, list[RequestRow]] = {}
    for row in rows:
        by_tenant.setdefault(row.tenant, []).append(row)
    tenants = [_tenant(name, by_tenant[name]) for name in sorted(by_tenant)]
    speeds = [tenant.service_tokens_per_s or 0.0 for tenant in tenants]
    return Fairness(jain(speeds) if len(speeds) > 1 else None, tenants)


def _tenant(name: str, rows: Sequence[RequestRow]) -> TenantRow:
    good = [row for row in rows if row.ok]
    latencies = sorted(row.last_s - row.due_s for row in good if row.last_s is not None)
    firsts = sorted(row.first_s - row.due_s for row in good if row.first_s is not None)
    tokens = sum(row.output_tokens or 0 for row in good)
    return TenantRow(
        tenant=name,
        num_requests=len(rows),
        num_ok=len(good),
        output_tokens=tokens,
        service_tokens_per_s=tokens / sum(latencies) if latencies and sum(latencies) > 0 else None,
        ttft_p50_s=quantile(firsts, 0.5) if firsts else None,
        e2el_p50_s=quantile(latencies, 0.5) if latencies else None,
    )


def jain(values: Sequence[float]) -> float | None:
    """Jain's fairness index: 1 for equal shares, 1 / n where one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None
