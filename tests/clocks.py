"""A clock of tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ManualClock:
    """Stands until a test moves it; seconds, since whenever the code under test counts them."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s
