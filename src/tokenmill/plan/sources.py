"""What a cluster's file names beside the tables: calibrations, checkpoints, measured machines and topologies, as paths
from the file's folder; checkpoints also as everywhere, by alias or hub name."""

from __future__ import annotations

import json
from pathlib import Path

from ..core.cost import StepLaw
from ..core.errors import ConfigError
from ..sim.calibrated import Calibrated
from ..sim.cluster_file import parse
from ..sim.fields import Fields
from ..sim.hardware import Hardware, hardware_named, measured_hardware
from ..sim.models import ModelShape
from ..sim.topology import Topology, read_topology
from ..sim.worker_file import Sources
from .model_shape import read_shape


def sources_beside(folder: Path) -> Sources:
    """Reads them; each raises ConfigError for what cannot be read."""

    def calibration(name: str) -> StepLaw:
        path = folder / name
        return Calibrated.from_json(_text(path, "write one by tokenmill calibrate"), str(path))

    def shape(name: str) -> ModelShape:
        return read_shape(_beside(folder, name))

    def hardware(name: str, where: str) -> Hardware:
        return read_machine(_beside(folder, name), where)

    def topology(name: str) -> Topology:
        path = folder / name
        tables = parse(_text(path, "give [[nodes]] there"), str(path))
        try:
            return read_topology(Fields(tables))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}") from None

    return Sources(calibration, shape, hardware, topology)


def read_machine(name: str, where: str = "hardware") -> Hardware:
    """Of the table, or, where `name` ends in `.json`, of a file that `tokenmill bench kernels --json` wrote; how much
    memory that machine has is not in it. Raises ConfigError, at `where`."""
    if not name.endswith(".json"):
        return hardware_named(name, where)
    try:
        report = json.loads(Path(name).read_text(encoding="utf8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {name} cannot be read: {error}", param=where) from None
    return measured_hardware(report if isinstance(report, dict) else {}, name, where=where)


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{path} cannot be read: {reason}; {hint}") from None


def _beside(folder: Path, name: str) -> str:
    """The path of a file or folder there, else the name as it is, which may be one of the cache's."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name
