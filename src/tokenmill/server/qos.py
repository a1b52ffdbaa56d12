"""On what terms a call is served: its tenant's, and what it may say of them itself."""

from __future__ import annotations

import math

from ..api.common_fields import with_class, with_headers
from ..api.sandbox import Caller
from ..control.slo.objectives import Objectives
from ..core.errors import InvalidRequest
from ..core.slo import NO_WISH, OFF, Wish
from ..core.terms import Terms
from .config import ENFORCE, ServerConfig

_TIMEOUT = b"x-request-timeout-s"
_LEAST_SHARE = 0.2
"""What is left of a target less than this is no bound on the wait: the target itself is missed anyway."""


def bounded(terms: Terms, caller: Caller, config: ServerConfig, alone_s: float) -> Terms:
    """The terms with the bounds of time that the server and a header set. Where a first token is wanted soon, its
    request need not be started any more when even alone, in `alone_s`, it would come too late. Raises InvalidRequest
    naming the header."""
    bounds = [each for each in (terms.timeout_s, config.request_timeout_s, _asked_s(caller)) if each]
    timeout_s, queue_s = min(bounds, default=0.0), terms.queue_s
    if terms.ttft_s and not queue_s and config.admission == ENFORCE:
        left_s = terms.ttft_s - alone_s
        queue_s = min(config.longest_wait_s, left_s) if left_s > _LEAST_SHARE * terms.ttft_s else 0.0
    if (timeout_s, queue_s) == (terms.timeout_s, terms.queue_s):
        return terms
    return terms._replace(timeout_s=timeout_s, queue_s=queue_s)


def _asked_s(caller: Caller) -> float:
    for name, value in () if caller.request is None else caller.request.scope["headers"]:
        if name == _TIMEOUT:
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds < math.inf:
                told = value.decode("latin-1")[:40]
                message = f"x-request-timeout-s must be a number of seconds above 0, got {told!r}."
                raise InvalidRequest(message, param="x-request-timeout-s")
            return seconds
    return 0.0


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
