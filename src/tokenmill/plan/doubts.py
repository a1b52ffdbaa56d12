"""What a reader of a simulation's figures should know: steps beyond what was calibrated, and what became of the parts
that its workers share: faults, links, front end and clients."""

from __future__ import annotations

from collections import Counter

from ..sim.service import Service, ServiceReport


def doubts_of(report: ServiceReport) -> list[str]:
    """What a reader of the figures should know: steps outside of what their law was measured on are extrapolated."""
    num_unseen, num_steps = sum(report.unseen.values()), sum(report.steps.values())
    if not num_unseen:
        return []
    (num_rows, num_tokens), num = max(report.unseen.items(), key=lambda each: each[1])
    return [
        f"Extrapolated: {num_unseen} of {num_steps} steps are outside of what was calibrated, most of them ({num}) of "
        f"up to {num_rows} rows and {num_tokens} tokens; calibrate with such a load."
    ]


def lines_of(service: Service) -> list[str]:
    """For people, one a line; none of parts that are not there."""
    return [line for line in (_faults(service), _spoilt(service), _links(service), _cores(service)) if line]


def fault_doubts(service: Service) -> list[str]:
    """For results: their figures are those of a service that was struck."""
    return [f"{line[0].upper()}{line[1:]}." for line in (_faults(service), _spoilt(service)) if line]


def _faults(service: Service) -> str:
    counts = Counter(kind for _, kind, _ in service.report.faults)
    if not counts:
        return ""
    cold = service.parts.cold
    back = f"; {cold.num_starts} cold starts, {cold.taken_s / cold.num_starts:.1f} s each" if cold.num_starts else ""
    return f"faults: {', '.join(f'{kind} {num}' for kind, num in counts.items())}{back}"


def _spoilt(service: Service) -> str:
    num = service.report.num_spoilt
    return f"blocks from KV stores with other bytes, computed again: {num}" if num else ""


def _links(service: Service) -> str:
    fabric, duration_s = service.parts.fabric, service.report.duration_s
    if fabric is None or not fabric.num_carried or not duration_s:
        return ""
    uses = [(use.carried_bytes / (use.bytes_s * duration_s), use.name) for use in fabric.use()]
    busiest = sorted(uses, reverse=True)[:3]
    told = ", ".join(f"{name} {share:.1%}" for share, name in busiest if share)
    return f"links: {fabric.num_carried} transfers, {fabric.carried_bytes / 1e9:.1f} GB; of their bandwidth {told}"


def _cores(service: Service) -> str:
    duration_s = service.report.duration_s
    made = (("front end", service.parts.front), ("clients", service.parts.clients))
    parts = [
        f"{name} {process.busy_s / duration_s:.1%}" for name, process in made if process is not None and duration_s
    ]
    return f"busy, each one process: {', '.join(parts)}" if parts else ""
