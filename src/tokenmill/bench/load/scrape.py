"""What the server says of itself: its Prometheus page before and after a run, and the difference.

Counters that grew during the run are the run's, if nobody else used the server meanwhile. Reading happens outside the
measured time. Energy counters of the machine are read the same way (RAPL of the processor packages, NVML of GPUs).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from ..result import ServerMetrics
from .http import Address

TIMEOUT_S = 5.0
MAX_PAGE_BYTES = 16 << 20
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Page:
    """counters and gauges by name with labels; histograms as (sum, count)."""

    counters: dict[str, float]
    gauges: dict[str, float]
    sums: dict[str, tuple[float, float]]


def scrape(url: str, address: Address) -> Page | None:
    """The Prometheus page at `url`; None where there is none."""
    try:
        return parse(address.get(url, TIMEOUT_S, MAX_PAGE_BYTES).decode("utf8", errors="replace"))
    except (OSError, ValueError):
        return None


def parse(text: str) -> Page:
    """A page in Prometheus text format. Raises ValueError if it is not one."""
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    sums: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + _labels(sample.labels)
            if sample.name.endswith(("_created", "_info")):
                continue
            if family.type == "counter" or sample.name.endswith("_total"):
                counters[name] = sample.value
            elif family.type in ("gauge", "unknown"):
                gauges[name] = sample.value
            elif sample.name.endswith(("_sum", "_count")):
                stem = sample.name.rpartition("_")[0] + _labels(sample.labels)
                sums.setdefault(stem, [0.0, 0.0])[sample.name.endswith("_count")] = sample.value
    return Page(counters, gauges, {name: (total, count) for name, (total, count) in sums.items()})


def _labels(labels: dict[str, str]) -> str:
    """Labels in one order; `engine` and `model_name`, the same on every sample of most servers, are left out."""
    kept = [f'{key}="{labels[key]}"' for key in sorted(labels) if key not in ("engine", "model_name")]
    return "{" + ",".join(kept) + "}" if kept else ""


def difference(url: str, before: Page | None, after: Page | None) -> ServerMetrics | None:
    """What happened between two pages; counters that did not move are left out."""
    if before is None or after is None:
        return None
    counters = {name: value - before.counters.get(name, 0.0) for name, value in after.counters.items()}
    gauges = {name: [before.gauges[name], value] for name, value in after.gauges.items() if name in before.gauges}
    means = {}
    for name, (total, count) in after.sums.items():
        total_before, count_before = before.sums.get(name, (0.0, 0.0))
        if count > count_before:
            means[name] = (total - total_before) / (count - count_before)
    moved = {name: value for name, value in counters.items() if value}
    return ServerMetrics(url, moved, {name: pair for name, pair in gauges.items() if any(pair)}, means)


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Counters that can be read now. `read_j` are running totals in joules, each wrapping at wraps_j (0: never)."""

    source: str
    read_j: Callable[[], list[float]]
    wraps_j: list[float]

    def spent_j(self, before_j: Sequence[float], after_j: Sequence[float]) -> float:
        return sum(
            after - before + (wrap if after < before else 0.0)
            for before, after, wrap in zip(before_j, after_j, self.wraps_j, strict=True)
        )


def find_energy_meter(powercap: Path = POWERCAP) -> EnergyMeter | None:
    """GPUs where the driver counts their energy, else processor packages; None where neither can be read."""
    return _nvml_meter() or _rapl_meter(powercap)


def _rapl_meter(powercap: Path) -> EnergyMeter | None:
    counters, wraps = [], []
    for zone in sorted(powercap.glob("intel-rapl:*")):
        # Zones with a second colon are parts of a package, and would be counted twice.
        if zone.name.count(":") != 1:
            continue
        try:
            int((zone / "energy_uj").read_text())
            wraps.append(int((zone / "max_energy_range_uj").read_text()) / 1e6)
        except (OSError, ValueError):
            continue
        counters.append(zone / "energy_uj")
    if not counters:
        return None
    return EnergyMeter("RAPL, processor packages", lambda: [int(c.read_text()) / 1e6 for c in counters], wraps)


def _nvml_meter() -> EnergyMeter | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    boards = []
    for i in range(count.value):
        board, energy_mj = ctypes.c_void_p(), ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(board)) != 0:
            continue
        if nvml.nvmlDeviceGetTotalEnergyConsumption(board, ctypes.byref(energy_mj)) == 0:
            boards.append(board)
    if not boards:
        return None

    def read_j() -> list[float]:
        totals = []
        for board in boards:
            energy_mj = ctypes.c_ulonglong()
            nvml.nvmlDeviceGetTotalEnergyConsumption(board, ctypes.byref(energy_mj))
            totals.append(energy_mj.value / 1e3)
        return totals

    return EnergyMeter(f"NVML, {len(boards)} GPU{'s' if len(boards) > 1 else ''}", read_j, [0.0] * len(boards))
