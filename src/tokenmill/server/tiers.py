"""Which priority class a call asks for: the field `priority_class`, or OpenAI's `service_tier`.

A tenant's class is that of its calls; one may ask for less. `flex` is the last class, and every other tier the tenant's
own: who is served first is agreed with the tenant, not claimed by a call.
"""

from __future__ import annotations

from ..core.config import check_name
from ..core.errors import ConfigError, InvalidRequest
from ..core.terms import NUM_PRIORITY_CLASSES, Terms
from .fields import Fields

FLEX = NUM_PRIORITY_CLASSES - 1
_TIERS = ("auto", "default", "flex", "priority", "scale", "standard_only")


def read_class(fields: Fields) -> int | None:
    """None: the tenant's own. Raises InvalidRequest naming the field."""
    asked = fields.integer("priority_class", 0, FLEX)
    tier = fields.text("service_tier")
    if tier is None:
        return asked
    try:
        check_name(tier[:100], _TIERS, "service_tier")
    except ConfigError as error:
        raise InvalidRequest(error.message, param="service_tier") from None
    if tier == "flex" and asked is None:
        return FLEX
    if tier == "flex" and asked != FLEX:
        raise InvalidRequest(f"service_tier 'flex' is priority_class {FLEX}; give one of them.", param="service_tier")
    return asked


def with_class(terms: Terms, asked: int | None) -> Terms:
    """Raises InvalidRequest for a class that comes before the tenant's."""
    if asked is None or asked == terms.priority_class:
        return terms
    if asked < terms.priority_class:
        raise InvalidRequest(
            f"priority_class must be from {terms.priority_class}, the caller's own, to {FLEX}; got {asked}.",
            param="priority_class",
        )
    return terms._replace(priority_class=asked)
