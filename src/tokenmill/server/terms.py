"""On what terms a call is served: its tenant's, and what it may say of them itself."""

from __future__ import annotations

from ..core.slo import NO_WISH, OFF, Wish
from ..core.terms import Terms
from .helper import Caller
from .slo.objectives import Objectives
from .slo.wishes import with_headers


def terms_of(caller: Caller, objectives: Objectives, wish: Wish = NO_WISH, num_prompt: int = 0) -> Terms:
    """wish: of its body, to which its headers are added. num_prompt: tokens of its longest prompt. Raises
    InvalidRequest naming the header."""
    terms = caller.tenant.terms
    if caller.request is not None:
        wish = with_headers(wish, caller.request.scope["headers"])
    if wish == NO_WISH and objectives.mode == OFF and not terms.profile:
        return terms
    return objectives.terms(terms, wish, num_prompt)
