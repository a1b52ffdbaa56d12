"""On what terms a call is served: its tenant's, and what it may say of them itself."""

from __future__ import annotations

from ..core.slo import NO_WISH, OFF, Wish
from ..core.terms import Terms
from .helper import Caller
from .slo.objectives import Objectives
from .slo.wishes import with_headers
from .tiers import with_class


def terms_of(
    caller: Caller,
    objectives: Objectives,
    wish: Wish = NO_WISH,
    num_prompt: int = 0,
    asked: int | None = None,
    recognised: str = "",
) -> Terms:
    """wish: of its body, to which its headers are added. num_prompt: tokens of its longest prompt. asked:
    the priority class that it asks for. recognised: the profile that its caller's traffic resembles. Raises
    InvalidRequest naming the field or header."""
    terms = with_class(caller.tenant.terms, asked)
    if caller.request is not None:
        wish = with_headers(wish, caller.request.scope["headers"])
    if wish == NO_WISH and objectives.mode == OFF and not terms.profile:
        return terms
    return objectives.terms(terms, wish, num_prompt, recognised)
