"""Pages of items, as /v1/responses and /v1/conversations list them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from ...core.errors import InvalidRequest
from .history import id_of
from .parse import INCLUDES

_MAX_LIMIT, _LIMIT = 100, 20


def page_of(request: HttpRequest, items: list[msgspec.Raw], kind: str) -> dict[str, Any]:
    """A part of the items (the oldest first) by `limit`, `order` and `after`. kind: what they are of."""
    query = request.query_params
    limit, order, after = query.get("limit", str(_LIMIT)), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= _MAX_LIMIT):
        raise InvalidRequest(f"limit must be an integer from 1 to {_MAX_LIMIT}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        place = next((place for place, item in enumerate(items) if id_of(item) == after), None)
        if place is None:
            raise InvalidRequest(f"after names no item of this {kind}: {after[:100]!r}.", param="after")
        items = items[place + 1 :]
    return listed(items[: int(limit)], has_more=len(items) > int(limit))


def listed(items: list[msgspec.Raw], *, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": id_of(items[0]) if items else None,
        "last_id": id_of(items[-1]) if items else None,
        "has_more": has_more,
    }


def check_include(request: HttpRequest) -> None:
    """What may be included is stored with the item, or never occurs."""
    for name in ("include", "include[]"):
        for value in request.query_params.getlist(name):
            if value not in INCLUDES:
                raise InvalidRequest(f"include must be one of {', '.join(INCLUDES)}.", param="include")
