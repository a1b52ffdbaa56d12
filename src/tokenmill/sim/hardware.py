"""What of an accelerator, or of a machine's cores, a step's cost depends on: operations and bytes a second, memory,
links, price. The table is `tables/hardware.toml`, where every figure names its source; what `tokenmill bench kernels
--json` measured on a machine is read as such an entry too. Peak values: what of them is reached is for `roofline`."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..core.errors import ConfigError
from .fields import Fields
from .models import find

COMPUTE = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "int8": "int8",
    "fp4": "fp4",
    "int4": "bf16",
    "q8_0": "int8",
    "q4_0": "int8",
    "q4_1": "int8",
}
"""Precision of weights -> what products are computed in: int4 is unpacked, GGUF's meet activations of 8 bits."""


@dataclass(frozen=True)
class Hardware:
    """One device. memory_bytes: 0 where it is not known. flop_s: peak operations a second by precision (bf16 stands for
    fp16 too). link_bytes_s: one way between num_joined devices, or where is_mesh, of all the links that one has to
    each of the others together; network_bytes_s: beyond them, of one device. price_hour_usd: 0 where no source has one.
    sources: of each figure. generation: of devices that reach alike shares of their peaks, "" where there is one alone.
    is_cpu: a machine that was measured, which computes on its cores and is in no table."""

    name: str
    memory_bytes: float
    memory_bytes_s: float
    flop_s: Mapping[str, float]
    num_joined: int = 1
    link_bytes_s: float = 0.0
    pcie_bytes_s: float = 0.0
    network_bytes_s: float = 0.0
    price_hour_usd: float = 0.0
    is_mesh: bool = False
    title: str = ""
    sources: Mapping[str, str] | None = None
    is_cpu: bool = False
    generation: str = ""

    def computed_in(self, precision: str) -> str:
        """What it multiplies weights of this precision in: those that it cannot multiply as they are, in bf16 or, where
        it has not that, in fp32. Raises ConfigError for a precision that is unknown."""
        if precision not in COMPUTE:
            raise ConfigError(f"precision.weights: {precision!r} is unknown; known are {', '.join(COMPUTE)}")
        for each in (COMPUTE[precision], "bf16", "fp32"):
            if each in self.flop_s and (precision != "fp32" or each == "fp32"):
                return each
        raise ConfigError(f"hardware {self.name}: no FLOP/s for {precision}; give {COMPUTE[precision]}_flop_s")

    def link_rate(self, num: int) -> float:
        """Bytes a second, one way, that each of `num` devices which share a layer sends to the others. Where they are
        more than are joined, rings pass the border of a node on all its devices' networks at once."""
        if num > self.num_joined:
            return min(self.link_bytes_s, self.num_joined * self.network_bytes_s)
        return self.link_bytes_s * ((num - 1) / (self.num_joined - 1) if self.is_mesh else 1.0)

    def peak_flop_s(self, precision: str) -> float:
        """For weights of this precision. Raises ConfigError for one that is unknown."""
        return self.flop_s[self.computed_in(precision)]


def hardware_named(name: str, where: str = "hardware") -> Hardware:
    """Of the table, by name or alias in any case. Raises ConfigError, which names the field and the nearest ones."""
    return find(name, all_hardware(), where)


@cache
def all_hardware() -> dict[str, Hardware]:
    """All of the table, by name and by alias."""
    text = resources.files(__package__).joinpath("tables/hardware.toml").read_text(encoding="utf8")
    return read_hardware(text)


def read_hardware(text: str) -> dict[str, Hardware]:
    """Of a TOML text as in `tables/hardware.toml`, by name and by alias. Raises ConfigError for a figure that is
    missing, out of range or without a source."""
    tables = tomllib.loads(text)
    sources = tables.pop("sources", {})
    found: dict[str, Hardware] = {}
    for name, table in tables.items():
        fields = Fields(table, name)
        aliases = fields.texts("aliases")
        hardware = read_device(fields, name, sources)
        for each in (name, *aliases):
            found[each] = hardware
    return found


def read_device(fields: Fields, name: str, sources: Mapping[str, str]) -> Hardware:
    """One table of a device, where each figure is `{ value = ..., source = ... }`. sources: by their names."""
    cited: dict[str, str] = {}

    def figure(key: str) -> float:
        pair = fields.table(key)
        value = pair.number("value", is_open=True)
        source = pair.text("source", among=list(sources))
        pair.end()
        cited[key] = sources[source]
        return value

    flops = {
        each: figure(f"{each}_flop_s")
        for each in ("fp32", "bf16", "fp8", "int8", "fp4")
        if fields.has(f"{each}_flop_s")
    }
    if not flops:
        raise fields.error("bf16_flop_s", "operations a second are needed, of one precision at least")
    device = Hardware(
        name,
        figure("memory_bytes"),
        figure("memory_bytes_s"),
        flops,
        round(figure("num_joined")),
        figure("link_bytes_s"),
        figure("pcie_bytes_s"),
        figure("network_bytes_s"),
        figure("price_hour_usd") if fields.has("price_hour_usd") else 0.0,
        fields.flag("is_mesh"),
        fields.text("title", name),
        cited,
        generation=fields.text("generation", ""),
    )
    fields.end()
    return device


def measured_hardware(
    report: Mapping[str, Any], name: str, memory_bytes: float = 0.0, where: str = "hardware"
) -> Hardware:
    """A machine by what `tokenmill bench kernels --json` measured on it: peak operations, and the bandwidth that was
    probed beside the cases that read most. memory_bytes: 0 where nobody says. Raises ConfigError where
    the report is of another kind."""
    peaks, cases = report.get("peaks"), report.get("cases")
    if report.get("kind") != "kernels" or not peaks or not cases:
        raise ConfigError(f"{where}: {name} is no report of `tokenmill bench kernels --json`", param=where)
    largest = max(cases, key=lambda case: case["num_bytes"])
    most = [rate for case in cases if case["num_bytes"] == largest["num_bytes"] for rate in case["bandwidths"] if rate]
    flops = {{"f32": "fp32"}.get(what, what): rate for what, rate in peaks.items() if rate}
    if not most or not flops:
        raise ConfigError(f"{where}: {name} has no bandwidth or no peak; measure it again", param=where)
    source = f"tokenmill bench kernels, {name}"
    return Hardware(
        name,
        memory_bytes,
        statistics.median(most),
        flops,
        title=name,
        sources={"memory_bytes_s": source, "flop_s": source},
        is_cpu=True,
    )
