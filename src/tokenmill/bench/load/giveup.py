"""When a run is not worth going on with: nearly everything fails, or the server can never catch up.

Pure. A load generator that goes on regardless fills its result with failures, or waits an hour for a queue to drain.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ConfigError

MIN_ENDED = 50
"""Before so many requests have ended, a share of failures says little."""
WAIT_FACTOR, LEAST_WAIT_S = 10.0, 10.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """max_error_rate: share of ended requests that may have failed. max_wait_s: how long a request may wait, from when
    it was due, for its first token (in open loops: there a queue grows without end)."""

    max_error_rate: float = 0.9
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_error_rate <= 1:
            raise ConfigError("--max-error-rate is from 0 to 1.", param="max_error_rate")
        if self.max_wait_s is not None and not self.max_wait_s > 0:
            raise ConfigError("--max-wait must be above 0.", param="max_wait")

    def reason(self, num_ended: int, num_failed: int, longest_wait_s: float) -> str | None:
        """Why to stop now; None to go on."""
        if num_ended >= MIN_ENDED and num_failed > self.max_error_rate * num_ended:
            return f"{num_failed} of {num_ended} requests failed (--max-error-rate {self.max_error_rate:g})"
        if self.max_wait_s is not None and longest_wait_s > self.max_wait_s:
            return f"a request waited {longest_wait_s:.1f} s for its first token (--max-wait {self.max_wait_s:g})"
        return None


def hopeless_wait_s(objectives: dict[str, float]) -> float | None:
    """A wait so long that all requests behind it miss their objectives too; None where none of them limits it."""
    limits = [objectives[name] for name in ("ttft_s", "e2el_s") if name in objectives]
    return max(LEAST_WAIT_S, WAIT_FACTOR * min(limits)) if limits else None
