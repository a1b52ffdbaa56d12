"""What a cluster's file names beside the tables: calibrations, checkpoints and measured machines, as paths from the
file's folder; checkpoints also as everywhere, by alias or hub name."""

from __future__ import annotations

from pathlib import Path

from ...core.cost import StepLaw
from ...core.errors import ConfigError
from ...sim.calibrated import Calibrated
from ...sim.hardware import Hardware
from ...sim.models import ModelShape
from ...sim.worker_file import Sources
from .machine import read_machine
from .model_shape import read_shape


def sources_beside(folder: Path) -> Sources:
    """Reads them; each raises ConfigError for what cannot be read."""

    def calibration(name: str) -> StepLaw:
        path = folder / name
        try:
            text = path.read_text(encoding="utf8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{path} cannot be read: {reason}; write one by tokenmill calibrate") from None
        return Calibrated.from_json(text, str(path))

    def shape(name: str) -> ModelShape:
        return read_shape(_beside(folder, name))

    def hardware(name: str, where: str) -> Hardware:
        return read_machine(_beside(folder, name), where)

    return Sources(calibration, shape, hardware)


def _beside(folder: Path, name: str) -> str:
    """The path of a file or folder there, else the name as it is, which may be one of the cache's."""
    path = folder / Path(name).expanduser()
    return str(path) if path.exists() else name
