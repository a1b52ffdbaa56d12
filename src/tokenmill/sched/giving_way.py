"""Who gives way to whom, between classes and tenants: which running sequences may be preempted, what a tenant holds.

    lower         those of lower classes than one that waits: they give way to it for a row or blocks
    next_of       who of several does: of the lowest class, of the tenant that has received most, the most junior
    has_share     whether a tenant that may hold only a share of the blocks may take some more

What has received more or less by up to the tolerance counts as equal here, too, so that the choice changes slowly: one
that has a row in flight is held back and asked about again at the next step.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from ..core.block import KVGroupSpec
from ..core.fairness import IDLE_CLASS, class_of
from ..core.sequence import Sequence
from .service import Service


def lower(running: List[Sequence], waiting: Sequence | None) -> List[Sequence]:
    """Idle work is not among them: it gives way to all, by rules of its own."""
    if waiting is None or not running:
        return ()
    class_ = class_of(waiting.request)
    if not class_ < class_of(running[-1].request) < IDLE_CLASS:
        return ()
    return [seq for seq in running if class_of(seq.request) > class_]


def next_of(sequences: List[Sequence], service: Service) -> List[Sequence]:
    """Those of `sequences`, which are by seniority, of whom the most junior may give way first."""
    if not service.is_shared:
        return sequences
    class_ = class_of(sequences[-1].request)
    last = [seq for seq in sequences if class_of(seq.request) == class_]
    most = max(service.steps_served(seq) for seq in last)
    return [seq for seq in last if service.steps_served(seq) == most]


def has_share(seq: Sequence, running: List[Sequence], num_more: List[int], groups: List[KVGroupSpec]) -> bool:
    """Whether the tenant of `seq` may take `num_more` blocks of each group. Whoever is alone may. What the tenant's
    requests of lower classes hold does not count: they give way."""
    terms, class_ = seq.request.terms, class_of(seq.request)
    own = [each for each in running if each.request.terms.tenant == terms.tenant and class_of(each.request) <= class_]
    if own in ([], [seq]):
        return True
    for index, group in enumerate(groups):
        num_held = sum(len(each.tables[index]) - each.tables[index].num_released for each in own)
        if num_held + num_more[index] > terms.kv_share * group.num_blocks:
            return False
    return True
