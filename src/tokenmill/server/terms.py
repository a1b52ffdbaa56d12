"""On what terms a call is served: its tenant's, and what it may say of them itself."""

from __future__ import annotations

from ..core.terms import Terms
from .helper import Caller


def terms_of(caller: Caller) -> Terms:
    return caller.tenant.terms
