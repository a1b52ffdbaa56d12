"""Hardware that a cluster's file names: of the table, or a machine by the kernels' benchmark of it."""

from __future__ import annotations

import json
from pathlib import Path

from ..core.errors import ConfigError
from ..sim.hardware import Hardware, hardware_named, measured_hardware


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
