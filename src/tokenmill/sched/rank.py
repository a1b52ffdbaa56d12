"""The orders of sequences. Numbers are unique, so that no two are equal in either.

rank       who is served next: by class, then the tenant that has received least, then by priority, then the adapter
           that has received least, then as the order of service says (`due`), then by arrival
seniority  who keeps its blocks: by class, then by priority, then by arrival

Of ranks this is what does not depend on others; what tenants and adapters have received is known to `service`. Idle
work, whoever's it is, is a class of its own behind all.
"""

from __future__ import annotations

from ..core.fairness import class_of
from ..core.sequence import Sequence

Rank = tuple[int, float, int, float, float, int]


def seniority(seq: Sequence) -> tuple[int, int, int]:
    request = seq.request
    return (class_of(request), request.priority, seq.number)
