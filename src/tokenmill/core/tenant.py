"""A tenant as requests are served for it, and what its key opens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

from .terms import NUM_PRIORITY_CLASSES, USUAL, Terms

ADMIN = "admin"
"""The scope of a key that manages tenants, keys and the server."""
OPERATOR = "operator"
"""The scope that shows what the server does: an admin key has it, and where no keys are given out, everyone."""
ADAPTERS = "adapters"
"""The scope that loads and unloads adapters, which all tenants share: admin keys have it and those of --api-key, and
where no keys are given out, everyone."""


class RateLimits(NamedTuple):
    """0: there is no limit. max_concurrent: calls open at once."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0


NO_LIMITS = RateLimits()


@dataclass(frozen=True, slots=True)
class Tenant:
    """id: its own for ever, "" for whoever calls a server without tenants; name: what people call it. terms: what its
    requests get unless they ask for less. salt: KV and prompts are shared within one salt only."""

    id: str = ""
    name: str = ""
    terms: Terms = USUAL
    salt: str = ""
    limits: RateLimits = NO_LIMITS

    def salt_with(self, cache_salt: str) -> str:
        """One salt for the tenant's and the client's own: which of two pairs it comes from can be told."""
        if not self.salt:
            return cache_salt
        joined = f"{len(self.salt)}:{self.salt}{cache_salt}"
        return hashlib.sha256(joined.encode("utf8", "surrogatepass")).hexdigest()

    def in_batches(self) -> Tenant:
        """As the lines of its batches are served: nobody waits for them, so that they come last, without targets or
        times by which they must be over, and count towards no limit."""
        terms = self.terms._replace(
            priority_class=NUM_PRIORITY_CLASSES - 1,
            profile="batch",
            ttft_s=0.0,
            tpot_s=0.0,
            queue_s=0.0,
            timeout_s=0.0,
            shorten_to=0,
        )
        return replace(self, terms=terms, limits=NO_LIMITS)


ANYONE = Tenant()
