"""A tenant as requests are served for it, and what its key opens."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.terms import USUAL, Terms

ADMIN = "admin"
"""The scope of a key that manages tenants, keys and the server."""
OPERATOR = "operator"
"""The scope that shows what the server does: an admin key has it, and where no keys are given out, everyone."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """id: its own for ever, "" for whoever calls a server without tenants; name: what people call it. terms: what its
    requests get unless they ask for less. salt: KV and prompts are shared within one salt only."""

    id: str = ""
    name: str = ""
    terms: Terms = USUAL
    salt: str = ""


ANYONE = Tenant()
