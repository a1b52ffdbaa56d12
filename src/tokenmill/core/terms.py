"""On whose account a request is served, and on what terms: what fairness, admission and SLOs know of it."""

from __future__ import annotations

from typing import NamedTuple

from .speculation import MOST_SPECULATIVE_TOKENS

NUM_PRIORITY_CLASSES = 3
STANDARD_CLASS = 1
"""Of requests of which nothing else is said: P1."""


class Terms(NamedTuple):
    """What a request may expect.

    tenant          whose it is; "": nobody's in particular
    priority_class  P0 to P2: a lower class goes first, whatever the priorities within it
    weight          the tenant's share of service, against that of other tenants in its class
    kv_share        of the KV blocks, how much the tenant's running requests may hold together
    profile         the SLO profile (chat, code, rag, ...); "": none
    ttft_s, tpot_s  its targets; 0: none
    queue_s         seconds after its arrival by which its first step must have been planned; 0: it waits as long as it
                    takes
    timeout_s       seconds after its arrival by which it ends; 0: it may run as long as it takes
    shorten_to      tokens to which its answer may be cut under load; 0: it may not
    draft_n_max     most tokens drafted for it in a step; 0: none are
    draft_n_min     where fewer than this are worth it, none is drafted
    draft_p_min     nor is a token drafted that is right with a probability below this. They bound what the server
                    drafts further (core/speculation.py)
    """

    tenant: str = ""
    priority_class: int = STANDARD_CLASS
    weight: float = 1.0
    kv_share: float = 1.0
    profile: str = ""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    queue_s: float = 0.0
    timeout_s: float = 0.0
    shorten_to: int = 0
    draft_n_max: int = MOST_SPECULATIVE_TOKENS
    draft_n_min: int = 0
    draft_p_min: float = 0.0


USUAL = Terms()
