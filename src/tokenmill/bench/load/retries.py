"""When a run is not worth going on with: nearly everything fails, or the server can never catch up; and when a client
is not: it asks again what was refused, and leaves where nothing comes.

Pure. A load generator that goes on regardless fills its result with failures, or waits an hour for a queue to drain.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ConfigError
from .plan import generator
from .stream import Exchange

MIN_ENDED = 50
"""Before so many requests have ended, a share of failures says little."""
WAIT_FACTOR, LEAST_WAIT_S = 10.0, 10.0


@dataclass(frozen=True, slots=True)
class EarlyStop:
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


GAVE_UP = "gave_up", "no token came within the client's patience"
"""The error of a request whose client left, and its detail."""
REFUSALS = ("http_429", "http_503")
"""Errors that say "later"."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_RETRY_AFTER_S = 0.5, 8.0, 60.0
"""Pauses of the openai package's clients (2.x): what Retry-After says, if it is at most a minute; else doubled each
time, less up to a quarter of it by chance."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """num_retries: how often a client asks again what was refused. patience_s: after so long without a token, counted
    from when its request was due, it leaves; None: it stays. obeys_s: the longest Retry-After that it waits."""

    num_retries: int = 0
    patience_s: float | None = None
    obeys_s: float = MAX_RETRY_AFTER_S

    def __post_init__(self) -> None:
        if self.num_retries < 0:
            raise ConfigError("--retries must not be negative.", param="retries")
        if self.patience_s is not None and not self.patience_s > 0:
            raise ConfigError("--patience must be above 0.", param="patience")

    def pause_s(self, exchange: Exchange, seed: int) -> float | None:
        """How long a client waits before it asks again; None where it does not."""
        if exchange.error not in REFUSALS or exchange.num_refused >= self.num_retries:
            return None
        told_s = exchange.retry_after_s
        if told_s is not None and 0 < told_s <= self.obeys_s:
            return told_s
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**exchange.num_refused)
        return pause_s * (1 - 0.25 * generator(seed, f"retry/{exchange.index}/{exchange.num_refused}").random())

    def facts(self) -> dict[str, float | int]:
        """Those that are not usual, for the result."""
        patience = {} if self.patience_s is None else {"patience_s": self.patience_s}
        return ({"retries": self.num_retries} if self.num_retries else {}) | patience
