"""What a run is beside its figures, and which part of it counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...core.errors import ConfigError
from ..result import ServerMetrics
from .tally import Tally


@dataclass(frozen=True, slots=True)
class Window:
    """What is cut off a run's beginning and end, so that its steady state is measured: below 1 a share of its length,
    else seconds."""

    warmup: float = 0.0
    cooldown: float = 0.0

    def __post_init__(self) -> None:
        if not (self.warmup >= 0 and self.cooldown >= 0):
            raise ConfigError("--warmup and --cooldown must not be negative.", param="warmup")

    def of(self, begin_s: float, end_s: float) -> tuple[float, float] | None:
        """[from, to) of a run; None where all of it counts."""
        if not self.warmup and not self.cooldown:
            return None
        cut = [part * (end_s - begin_s) if part < 1 else part for part in (self.warmup, self.cooldown)]
        return begin_s + cut[0], end_s - cut[1]


@dataclass(frozen=True, slots=True)
class Context:
    """What a run is beside its figures. tally: what there is instead of the times of tokens."""

    name: str
    started_at: str
    objectives: dict[str, float]
    schedule: dict[str, Any]
    dataset: dict[str, Any]
    endpoint: dict[str, Any]
    environment: dict[str, Any]
    argv: list[str]
    server: ServerMetrics | None = None
    energy_source: str | None = None
    joules: float | None = None
    keep_event_times: bool = True
    window: Window = field(default_factory=lambda: Window())
    percentiles: tuple[float, ...] = ()
    counts_tokens: bool = False
    tally: Tally | None = None
